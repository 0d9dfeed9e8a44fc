//! Sparse attention: an indexer scores all cells with small keys of its own, and attention reads the best (`deepseek32.cpp`).

use super::{Build, Error, Norm};
use crate::arch::Indexer;
use crate::fit::compute::graph::{F16, F32, Fused, Home, I64, Id};

/// The inputs of the indexer.
#[derive(Debug, Clone, Copy)]
pub struct IndexerInputs {
    /// Rows of its keys that are written.
    rows: Id,
    /// Which cells each token sees.
    mask: Id,
    /// The Hadamard matrix that queries and keys are rotated by.
    rotation: Id,
}

impl Build<'_> {
    /// Whether a layer has an indexer of its own.
    pub fn has_indexer(&self, il: usize) -> bool {
        let indexer = self.hp.indexer.as_ref();
        indexer.is_some_and(|indexer| indexer.layers.get(il) == Some(&true))
    }

    fn indexer(&self) -> Result<&Indexer, Error> {
        let missing = || Error::MissingTensor("blk.0.indexer.attn_k.weight".to_owned());
        self.hp.indexer.as_ref().ok_or_else(missing)
    }

    /// The inputs of the indexers of all layers; the mask is in half precision with and without flash attention.
    pub fn indexer_inputs(&mut self) -> Result<IndexerInputs, Error> {
        let width = self.indexer()?.head_size;
        let (n, streams) = (self.batch.tokens, self.setting.context.n_streams.into());
        let rows = self.g.input(I64, &[n]);
        let mask = self
            .g
            .input(F16, &[self.setting.cache.cells, n / streams, 1, streams]);
        let rotated = (1 << width.trailing_zeros()).max(64);
        let rotation = self.g.input(F32, &[rotated, rotated]);
        Ok(IndexerInputs {
            rows,
            mask,
            rotation,
        })
    }

    /// The cache of the indexer's keys of a layer.
    fn indexer_cache(&mut self, il: usize) -> Result<Id, Error> {
        let layer = self.setting.cache.layers.get(il);
        let (layer, cache) = layer
            .and_then(|layer| Some((layer, layer.indexer?)))
            .ok_or(Error::NoCache(il))?;
        let home = Home {
            backend: self.setting.backend(layer.place),
            weights: false,
        };
        let ne = [cache.k_width, cache.cells, cache.streams];
        Ok(self.g.external(self.setting.cache.type_k, &ne, home))
    }

    /// The cells that each token reads, by their numbers.
    pub fn select_cells(
        &mut self,
        il: usize,
        inputs: &IndexerInputs,
        query: Id,
        x: Id,
        pos: Id,
    ) -> Result<Id, Error> {
        let (heads, width, top_k) = {
            let indexer = self.indexer()?;
            (indexer.n_head, indexer.head_size, indexer.top_k)
        };
        let (n, cells, streams) = (
            self.batch.tokens,
            self.setting.cache.cells,
            self.setting.context.n_streams.into(),
        );
        let q = self.product(il, "indexer.attn_q_b", query)?;
        let q = self.g.reshape(q, &[width, heads, n]);
        let q = self.g.rope(q, pos, None);
        let k = self.product(il, "indexer.attn_k", x)?;
        let k = self.norm(il, "indexer.k_norm", k, Norm::Layer);
        let k = self.g.reshape(k, &[width, 1, n]);
        let k = self.g.rope(k, pos, None);
        let q = self.g.mul_mat(inputs.rotation, q);
        let k = self.g.mul_mat(inputs.rotation, k);
        let cache = self.indexer_cache(il)?;
        self.store(cache, k, inputs.rows);
        let weights = self.product(il, "indexer.proj", x)?;
        let k = self.read(cache, width, 1);
        let per_stream = n / streams;
        let nb = self.g[q].nb;
        let q = self.g.view(
            q,
            &[width, heads, per_stream, streams],
            &[nb[1], nb[2], nb[3] / streams],
            0,
        );
        let nb = self.g[weights].nb;
        let strides = [nb[1], nb[2] / streams, nb[3] / streams];
        let weights = self
            .g
            .view(weights, &[heads, per_stream, 1, streams], &strides, 0);
        let weights = self.g.scale(weights);
        let scores = self.g.lightning_indexer(q, k, weights, inputs.mask);
        self.g.fused.push((Fused::LightningIndexer, scores, il));
        let best = self.g.top_k(scores, cells.min(top_k));
        Ok(self.g.cont(best))
    }

    /// A mask that lets only the selected cells through, where `mask` lets them through.
    pub fn mask_of_selected(&mut self, mask: Id, cells: Id) -> Id {
        let nothing = self.g.fill(mask);
        let ([cells_n, n, _, streams], nb) = (self.g[nothing].ne, self.g[nothing].nb);
        let by_cell = self.g.view(nothing, &[1, cells_n, n, streams], &nb[..3], 0);
        let ([k, n_k, _, streams_k], nb) = (self.g[cells].ne, self.g[cells].nb);
        let cells = self.g.view(
            cells,
            &[k, n_k, streams_k, 1],
            &[nb[1], nb[2], streams_k.saturating_mul(nb[3])],
            0,
        );
        let zeros = self.g.leaf(F32, &[1, k, n_k, streams_k]);
        let zeros = self.g.fill(zeros);
        let open = self.g.set_rows(by_cell, zeros, cells);
        let nb = self.g[open].nb;
        let open = self
            .g
            .view(open, &[cells_n, n, 1, streams], &[nb[2], nb[3], nb[3]], 0);
        self.g.add(open, mask)
    }
}
