//! The constructors of ggml for layers that keep a state, and for sparse attention.

use super::graph::{F32, Graph, I32, Id, Op};

impl Graph {
    /// The memory of `a` multiplied by a constant where it lies.
    pub fn scale_in_place(&mut self, a: Id) -> Id {
        let (ne, nb) = (self[a].ne, self[a].nb);
        self.node_in(Op::Scale, a, ne, nb, 0, &[a])
    }

    /// A convolution over time of each channel: `x` is (time, channels, sequences), `kernel` (width, channels).
    pub fn ssm_conv(&mut self, x: Id, kernel: Id) -> Id {
        let ([time, _, sequences, _], [width, channels, ..]) = (self[x].ne, self[kernel].ne);
        let tokens = (time + 1).saturating_sub(width);
        self.node(
            Op::SsmConv,
            F32,
            &[channels, tokens, sequences],
            &[x, kernel],
        )
    }

    /// The scan of a state space model; the result is the output and behind it the new states. `of` is
    /// (state, x, dt, A, B, C, numbers of the states).
    pub fn ssm_scan(&mut self, of: [Id; 7]) -> Id {
        let [state, x, .., ids] = of;
        let [n0, n1, n2, _] = self[state].ne;
        let states = n0
            .saturating_mul(n1)
            .saturating_mul(n2)
            .saturating_mul(self[ids].ne[0]);
        let n = self[x].elements().saturating_add(states);
        self.node(Op::SsmScan, F32, &[n], &of)
    }

    /// The gated delta rule; the result is the output and behind it the new states. `of` is
    /// (q, k, v, gate, beta, state).
    pub fn gated_delta_net(&mut self, of: [Id; 6]) -> Id {
        let [width, heads, tokens, sequences] = self[of[2]].ne;
        let rows = tokens.saturating_add(width).saturating_mul(sequences);
        self.node(
            Op::GatedDeltaNet,
            F32,
            &[width.saturating_mul(heads), rows],
            &of,
        )
    }

    /// The recurrence of RWKV 6, RWKV 7 or gated linear attention; the result is the output and behind it the new
    /// states. The first source has the shape (head, heads, tokens), the last one is the state.
    pub fn wkv(&mut self, op: Op, of: &[Id]) -> Id {
        let (Some(&first), Some(&state)) = (of.first(), of.last()) else {
            return self.leaf(F32, &[0]);
        };
        let ([width, heads, tokens, _], sequences) = (self[first].ne, self[state].ne[1]);
        let rows = tokens.saturating_add(width.saturating_mul(sequences));
        self.node(op, F32, &[width.saturating_mul(heads), rows], of)
    }

    /// The numbers of the `k` largest elements of each row.
    pub fn top_k(&mut self, a: Id, k: u64) -> Id {
        let [_, n1, n2, n3] = self[a].ne;
        self.node(Op::TopK, I32, &[k, n1, n2, n3], &[a])
    }

    /// The scores by which sparse attention selects what it reads.
    pub fn lightning_indexer(&mut self, q: Id, k: Id, weights: Id, mask: Id) -> Id {
        let (cells, [_, _, tokens, streams]) = (self[k].ne[2], self[q].ne);
        self.node(
            Op::LightningIndexer,
            F32,
            &[cells, tokens, 1, streams],
            &[q, k, weights, mask],
        )
    }
}
