//! The state that recurrent layers keep of a sequence: reading it, and writing what becomes of it (`build_rs`).

use super::{Build, Error};
use crate::fit::compute::graph::{F32, Home, I32, Id};

/// Which states of the cache a batch reads.
#[derive(Debug, Clone, Copy)]
pub struct StateInputs {
    /// The states of the batch, and behind them those that only move.
    all: Id,
    /// The states of the batch.
    batch: Id,
    /// All but the first one.
    tail: Id,
}

/// The two caches of a recurrent layer, a row for each sequence.
#[derive(Debug, Clone, Copy)]
pub struct StateCaches {
    /// What a convolution over time or a token shift has seen last.
    pub shift: Id,
    /// The state of the recurrence.
    pub state: Id,
}

impl Build<'_> {
    /// The inputs of all recurrent layers (`build_rs_inp`).
    pub fn state_inputs(&mut self) -> StateInputs {
        let n = self.batch.sequences;
        let all = self.g.input(I32, &[n]);
        let batch = self.g.view(all, &[n], &[], 0);
        let tail = self.g.view(all, &[n.saturating_sub(1)], &[], 4);
        StateInputs { all, batch, tail }
    }

    /// The caches of a layer.
    ///
    /// # Errors
    /// If the layer keeps no state.
    pub fn state_caches(&mut self, il: usize) -> Result<StateCaches, Error> {
        let layer = self.setting.cache.layers.get(il);
        let (layer, state) = layer
            .and_then(|layer| Some((layer, layer.state?)))
            .ok_or(Error::NoCache(il))?;
        let home = Home {
            backend: self.setting.backend(layer.place),
            weights: false,
        };
        let shift = self.g.external(F32, &[state.r_width, state.rows], home);
        let state = self.g.external(F32, &[state.s_width, state.rows], home);
        Ok(StateCaches { shift, state })
    }

    /// Tokens of each sequence of the batch.
    pub fn tokens_per_sequence(&self) -> u64 {
        self.batch.tokens / self.batch.sequences
    }

    /// `[width, tokens]` as `[width, tokens of a sequence, sequences]`.
    pub fn by_sequence(&mut self, x: Id) -> Id {
        let ne = [
            self.g[x].ne[0],
            self.tokens_per_sequence(),
            self.batch.sequences,
        ];
        self.g.reshape(x, &ne)
    }

    /// The rows of the batch's sequences, copied out of a cache: `[width, sequences]`.
    pub fn load_state(&mut self, inputs: StateInputs, cache: Id) -> Id {
        let [width, n, ..] = self.g[cache].ne;
        let states = self.clear_state(cache);
        let rows = self.g.get_rows(states, inputs.all);
        let nb = self.g[rows].nb[1];
        let own = self.g.view(rows, &[width, n], &[nb], 0);
        self.g.expand(own);
        self.move_others(cache, rows);
        own
    }

    /// The same for an operation that reads the cache itself: `read` makes it from the states and the numbers of the batch's.
    pub fn scan_state(
        &mut self,
        inputs: StateInputs,
        cache: Id,
        read: impl FnOnce(&mut Self, Id, Id) -> Id,
    ) -> Id {
        let states = self.clear_state(cache);
        let rows = self.g.get_rows(states, inputs.tail);
        let out = read(self, states, inputs.batch);
        self.g.expand(out);
        self.move_others(cache, rows);
        out
    }

    /// A state of a new sequence is cleared where it lies.
    fn clear_state(&mut self, cache: Id) -> Id {
        let [width, n, ..] = self.g[cache].ne;
        let states = self.g.reshape(cache, &[width, n]);
        let first = self.g.view(states, &[width], &[], 0);
        let cleared = self.g.scale_in_place(first);
        self.g.expand(cleared);
        states
    }

    /// States of sequences that are not in the batch move to other rows. All sequences are in the batch that is measured, so
    /// these are no rows; but the nodes are there.
    fn move_others(&mut self, cache: Id, rows: Id) {
        let ([width, ..], nb, to_nb) = (self.g[cache].ne, self.g[rows].nb[1], self.g[cache].nb[1]);
        let others = self.g.view(rows, &[width, 0], &[nb], 0);
        let to = self.g.view(cache, &[width, 0], &[to_nb], 0);
        let moved = self.g.cpy(others, to);
        self.g.expand(moved);
    }

    /// Writes `new`, of as many values as the cache has, to the cache.
    pub fn store_state(&mut self, new: Id, cache: Id) {
        let n = self.g[cache].elements();
        let to = self.g.view(cache, &[n], &[], 0);
        let stored = self.g.cpy(new, to);
        self.g.expand(stored);
    }

    /// The input of a convolution over time: the last columns of before, read from the layer's cache, and `x`
    /// (`[channels, tokens, sequences]`) behind them. Its last columns go to the cache.
    pub fn conv_input(&mut self, inputs: StateInputs, cache: Id, x: Id) -> Id {
        let [channels, _, n, _] = self.g[x].ne;
        let before = self.g[cache].ne[0] / channels.max(1);
        let old = self.load_state(inputs, cache);
        let old = self.g.reshape(old, &[before, channels, n]);
        let to = self.g.view(cache, &[before * channels, n], &[], 0);
        self.append_columns(old, x, to)
    }

    /// `x` transposed behind the columns of `old`; as many last columns as `old` has are written to `to`.
    pub fn append_columns(&mut self, old: Id, x: Id, to: Id) -> Id {
        let ([before, channels, n, _], tokens) = (self.g[old].ne, self.g[x].ne[1]);
        let columns = self.g.transpose(x);
        let both = self.g.concat(old, columns, 0);
        let nb = self.g[both].nb;
        let last = self
            .g
            .view(both, &[before, channels, n], &nb[1..3], tokens * nb[0]);
        let stored = self.g.cpy(last, to);
        self.g.expand(stored);
        both
    }
}
