//! Self attention: queries, keys and values, the cache, and the product (`build_qkv`, `build_attn`, `build_attn_mha`).

use super::{Build, Error, Norm};
use crate::arch::{Hparams, MemoryKind};
use crate::fit::compute::graph::{F16, F32, Fused, I64, Id, is_quantized, row_size};

/// The inputs of attention on one kind of cache: where new rows go, who sees whom, and the rotations of quantized caches.
#[derive(Debug, Clone, Copy)]
pub struct CacheInputs {
    /// Cells of a stream.
    pub cells: u64,
    /// Rows of the keys that are written.
    pub k_rows: Id,
    /// Rows of the values, or elements where values are stored transposed.
    pub v_rows: Id,
    /// Which cells each token sees.
    pub mask: Id,
    k_rotation: Option<Id>,
    v_rotation: Option<Id>,
}

/// The inputs of attention of a model: for all its layers, or apart for those with a window.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs {
    /// Layers that see everything.
    pub full: CacheInputs,
    /// Layers with a window, if the model has any.
    pub window: Option<CacheInputs>,
}

impl AttentionInputs {
    /// The inputs of a layer.
    fn of(&self, hp: &Hparams, il: usize) -> CacheInputs {
        match self.window {
            Some(window) if hp.is_swa(il) => window,
            _ => self.full,
        }
    }
}

/// What self attention goes over.
#[derive(Debug, Clone, Copy)]
pub enum SelfInputs {
    /// All that is in the caches.
    Caches(AttentionInputs),
    /// The batch only: masks for layers without and with a window.
    Batch {
        /// Layers that see everything.
        full: Id,
        /// Layers with a window.
        window: Id,
    },
}

/// Queries, keys and values of a layer, `[width of a head, heads, tokens]`.
#[derive(Debug, Clone, Copy)]
pub struct Qkv {
    /// Queries.
    pub q: Id,
    /// Keys.
    pub k: Id,
    /// Values.
    pub v: Id,
}

/// What attention can have besides queries, keys and values.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extras {
    /// Logits of each head that take part in the softmax.
    pub sinks: Option<Id>,
    /// Added to the logits (T5).
    pub bias: Option<Id>,
    /// Brings the values of latent attention back to the width of a head.
    pub v_mla: Option<Id>,
}

impl Build<'_> {
    /// The inputs of the caches of the model.
    pub fn attention_inputs(&mut self) -> AttentionInputs {
        let full = self.cache_inputs(false);
        let window = self.has_window().then(|| self.cache_inputs(true));
        AttentionInputs { full, window }
    }

    fn cache_inputs(&mut self, window: bool) -> CacheInputs {
        let (cache, tokens) = (self.setting.cache, self.batch.tokens);
        let cells = if window {
            cache.window_cells
        } else {
            cache.cells
        };
        let k_rows = self.g.input(I64, &[tokens]);
        let v_elements = if cache.v_trans {
            self.hp.n_embd_v_max()
        } else {
            1
        };
        let v_rows = self.g.input(I64, &[tokens.saturating_mul(v_elements)]);
        let mask = self.mask(cells);
        let (k_rotation, v_rotation) = (self.k_rotation(window), self.v_rotation());
        CacheInputs {
            cells,
            k_rows,
            v_rows,
            mask,
            k_rotation,
            v_rotation,
        }
    }

    /// The inputs of self attention, with caches if the model has them.
    pub fn self_inputs(&mut self) -> SelfInputs {
        match self.hp.memory {
            MemoryKind::None => self.batch_inputs(),
            _ => SelfInputs::Caches(self.attention_inputs()),
        }
    }

    /// The inputs of self attention within the batch (`build_attn_inp_no_cache`).
    pub fn batch_inputs(&mut self) -> SelfInputs {
        let keys = self.batch.tokens;
        let (full, window) = (self.mask_over(keys), self.mask_over(keys));
        SelfInputs::Batch { full, window }
    }

    /// A mask over `keys` positions that are in no cache.
    pub fn mask_over(&mut self, keys: u64) -> Id {
        let ty = if self.flash_attention { F16 } else { F32 };
        self.g.input(ty, &[keys, self.batch.tokens])
    }

    /// The mask of attention over `cells` cells of each stream (`build_attn_inp_kq_mask`).
    pub fn mask(&mut self, cells: u64) -> Id {
        let ty = if self.flash_attention { F16 } else { F32 };
        let streams = u64::from(self.setting.context.n_streams);
        self.g
            .input(ty, &[cells, self.batch.tokens / streams, 1, streams])
    }

    /// The Hadamard matrix that keys are rotated by before they are quantized: as large a power of two as divides a head.
    fn k_rotation(&mut self, window: bool) -> Option<Id> {
        let head = if window {
            self.hp.head_k_swa
        } else {
            self.hp.head_k
        };
        if self.is_hybrid_with_window()
            || !is_quantized(self.setting.cache.type_k)
            || !self.hp.head_k(0).is_multiple_of(64)
            || head == 0
        {
            return None;
        }
        let n = (1 << head.trailing_zeros()).max(64);
        Some(self.g.input(F32, &[n, n]))
    }

    /// llama.cpp makes no rotations for such a model (`build_inp_mem_hybrid_iswa`).
    fn is_hybrid_with_window(&self) -> bool {
        self.hp.memory == MemoryKind::Hybrid && self.has_window()
    }

    fn v_rotation(&mut self) -> Option<Id> {
        let rotated = !self.is_hybrid_with_window()
            && is_quantized(self.setting.cache.type_v)
            && self.hp.head_v(0).is_multiple_of(64)
            && self.hp.head_v(0) > 0;
        rotated.then(|| self.g.input(F32, &[64, 64]))
    }
}

impl Build<'_> {
    /// Queries, keys and values by heads: from one matrix or from three, with biases and bounds, as the tensors say (`build_qkv`).
    pub fn qkv(&mut self, il: usize, x: Id) -> Result<Qkv, Error> {
        let (n, heads, heads_kv) = (self.batch.tokens, self.hp.n_head(il), self.hp.n_head_kv(il));
        let (width_k, width_v) = (self.hp.head_k(il), self.hp.head_v(il));
        if self.has(il, "attn_qkv", "weight") {
            let qkv = self.fused_qkv(il, x)?;
            let (ty, row) = (self.g[qkv].ty, self.g[qkv].nb[1]);
            let mut part = |width: u64, heads: u64, offset: u64| {
                let nb = [row_size(ty, width), row];
                self.g
                    .view(qkv, &[width, heads, n], &nb, row_size(ty, offset))
            };
            return Ok(Qkv {
                q: part(width_k, heads, 0),
                k: part(width_k, heads_kv, width_k * heads),
                v: part(width_v, heads_kv, width_k * (heads + heads_kv)),
            });
        }
        let q = self.bounded_linear(il, "attn_q", x)?;
        let k = self.bounded_linear(il, "attn_k", x)?;
        let v = self.bounded_linear(il, "attn_v", x)?;
        Ok(Qkv {
            q: self.g.reshape(q, &[width_k, heads, n]),
            k: self.g.reshape(k, &[width_k, heads_kv, n]),
            v: self.g.reshape(v, &[width_v, heads_kv, n]),
        })
    }

    /// The same without heads, for norms over whole rows; parts of one matrix are copied out of it.
    pub fn flat_qkv(&mut self, il: usize, x: Id) -> Result<Qkv, Error> {
        let widths = [
            self.hp.head_k(il) * self.hp.n_head(il),
            self.hp.n_embd_k(il),
            self.hp.n_embd_v(il),
        ];
        self.flat_parts(il, x, widths)
    }

    /// Queries, keys and values of the given widths.
    pub fn flat_parts(&mut self, il: usize, x: Id, widths: [u64; 3]) -> Result<Qkv, Error> {
        if !self.has(il, "attn_qkv", "weight") {
            return Ok(Qkv {
                q: self.linear(il, "attn_q", x)?,
                k: self.linear(il, "attn_k", x)?,
                v: self.linear(il, "attn_v", x)?,
            });
        }
        let n = self.batch.tokens;
        let qkv = self.fused_qkv(il, x)?;
        let (ty, row) = (self.g[qkv].ty, self.g[qkv].nb[1]);
        let mut offset = 0;
        let views = widths.map(|width| {
            let view = self.g.view(qkv, &[width, n], &[row], row_size(ty, offset));
            offset += width;
            view
        });
        let [q, k, v] = views.map(|view| self.g.cont(view));
        Ok(Qkv { q, k, v })
    }

    /// Splits rows into heads.
    pub fn by_heads(&mut self, il: usize, flat: Qkv) -> Qkv {
        let (n, heads, heads_kv) = (self.batch.tokens, self.hp.n_head(il), self.hp.n_head_kv(il));
        let (width_k, width_v) = (self.hp.head_k(il), self.hp.head_v(il));
        Qkv {
            q: self.g.reshape(flat.q, &[width_k, heads, n]),
            k: self.g.reshape(flat.k, &[width_k, heads_kv, n]),
            v: self.g.reshape(flat.v, &[width_v, heads_kv, n]),
        }
    }

    /// Norms of queries and keys over whole rows, after the split into heads, if the layer has them.
    pub fn row_norms(&mut self, il: usize, mut qkv: Qkv, kind: Norm) -> Qkv {
        for (x, name) in [(&mut qkv.q, "attn_q_norm"), (&mut qkv.k, "attn_k_norm")] {
            if self.has(il, name, "weight") {
                let [width, heads, n, _] = self.g[*x].ne;
                let rows = self.g.reshape(*x, &[width * heads, n]);
                let normed = self.norm(il, name, rows, kind);
                *x = self.g.reshape(normed, &[width, heads, n]);
            }
        }
        qkv
    }

    fn fused_qkv(&mut self, il: usize, x: Id) -> Result<Id, Error> {
        let mut qkv = self.linear(il, "attn_qkv", x)?;
        if !self.has(il, "attn_qkv", "bias") {
            let biases = ["attn_q", "attn_k", "attn_v"].map(|name| self.find(il, name, "bias"));
            if let [Some(q), Some(k), Some(v)] = biases {
                let mut bias = self.g.concat(q, k, 0);
                bias = self.g.concat(bias, v, 0);
                qkv = self.g.add(qkv, bias);
            }
        }
        Ok(self.bounded(qkv))
    }

    fn bounded_linear(&mut self, il: usize, name: &str, x: Id) -> Result<Id, Error> {
        let y = self.linear(il, name, x)?;
        Ok(self.bounded(y))
    }

    /// Queries, keys and values of some models are kept within bounds.
    fn bounded(&mut self, x: Id) -> Id {
        if self.bounded { self.g.clamp(x) } else { x }
    }

    /// Whether layers with a window have a cache of their own.
    fn has_window(&self) -> bool {
        self.hp.window.is_some()
    }

    /// Attention of a layer over its cache, and the output matrix `attn_output` (`build_attn` with a cache).
    pub fn attention(
        &mut self,
        il: usize,
        inputs: &AttentionInputs,
        qkv: Qkv,
        extras: Extras,
    ) -> Result<Id, Error> {
        let x = self.attend(il, inputs, qkv, extras)?;
        if self.has(il, "attn_output", "weight") {
            self.linear(il, "attn_output", x)
        } else {
            Ok(x)
        }
    }

    /// Attention of a layer over its cache, before any output matrix.
    pub fn attend(
        &mut self,
        il: usize,
        inputs: &AttentionInputs,
        qkv: Qkv,
        extras: Extras,
    ) -> Result<Id, Error> {
        let inputs = inputs.of(self.hp, il);
        let Qkv {
            mut q,
            mut k,
            mut v,
        } = qkv;
        if let Some(rotation) = inputs.k_rotation {
            q = self.rotate(q, rotation);
            k = self.rotate(k, rotation);
        }
        if let Some(rotation) = inputs.v_rotation {
            v = self.rotate(v, rotation);
        }
        // Models with a window expand keys before values, others after them.
        let order = if self.has_window() {
            [q, k, v]
        } else {
            [q, v, k]
        };
        for id in order {
            self.g.expand(id);
        }
        self.store_keys(il, k, inputs.k_rows)?;
        self.store_values(il, v, inputs.v_rows)?;
        self.attend_to_cache(il, inputs, q, extras)
    }

    /// Attention of a layer that has queries only and reads the cache of another one.
    pub fn attend_shared(
        &mut self,
        il: usize,
        inputs: &AttentionInputs,
        mut q: Id,
    ) -> Result<Id, Error> {
        let inputs = inputs.of(self.hp, il);
        if let Some(rotation) = inputs.k_rotation {
            q = self.rotate(q, rotation);
        }
        self.g.expand(q);
        self.attend_to_cache(il, inputs, q, Extras::default())
    }

    fn attend_to_cache(
        &mut self,
        il: usize,
        inputs: CacheInputs,
        q: Id,
        extras: Extras,
    ) -> Result<Id, Error> {
        let [k, v] = self.read_keys_and_values(il)?;
        let x = self.multi_head(il, [q, k, v], inputs.mask, extras);
        Ok(match inputs.v_rotation {
            Some(rotation) => self.rotate(x, rotation),
            None => x,
        })
    }

    /// Attention to keys and values that are in no cache (`build_attn` without cache, and across).
    pub fn attend_in_batch(&mut self, il: usize, mask: Id, qkv: Qkv, extras: Extras) -> Id {
        let Qkv { q, k, v } = qkv;
        for id in [q, k, v] {
            self.g.expand(id);
        }
        self.multi_head(il, [q, k, v], mask, extras)
    }

    /// Self attention of a layer, before any output matrix.
    pub fn self_attend(
        &mut self,
        il: usize,
        inputs: &SelfInputs,
        qkv: Qkv,
        extras: Extras,
    ) -> Result<Id, Error> {
        match inputs {
            SelfInputs::Caches(caches) => self.attend(il, caches, qkv, extras),
            SelfInputs::Batch { full, window } => {
                let mask = if self.hp.is_swa(il) { *window } else { *full };
                Ok(self.attend_in_batch(il, mask, qkv, extras))
            }
        }
    }

    /// Multiplied by a Hadamard matrix in groups of its width (`llama_mul_mat_hadamard`).
    pub fn rotate(&mut self, x: Id, rotation: Id) -> Id {
        let (ne, n) = (self.g[x].ne, self.g[rotation].ne[0]);
        let groups = [n, self.g[x].elements() / n];
        let rows = if self.g[x].is_contiguous() {
            self.g.reshape(x, &groups)
        } else {
            self.g.cont_as(x, &groups)
        };
        let rotated = self.g.mul_mat(rotation, rows);
        self.g.reshape(rotated, &ne)
    }

    /// Writes keys to the cache of a layer.
    pub fn store_keys(&mut self, il: usize, k: Id, rows: Id) -> Result<(), Error> {
        let cache = self.cached_keys(il)?;
        self.store(cache, k, rows);
        Ok(())
    }

    /// Writes values to the cache of a layer; where it is transposed, element by element.
    pub fn store_values(&mut self, il: usize, v: Id, rows: Id) -> Result<(), Error> {
        let cache = self.cached_values(il)?;
        if !self.setting.cache.v_trans {
            self.store(cache, v, rows);
            return Ok(());
        }
        let ([width, heads, n, _], ty) = (self.g[v].ne, self.g[v].ty);
        let width = width * heads;
        let mut v = if row_size(ty, width) == self.g[v].nb[2] {
            self.g.reshape(v, &[width, n])
        } else {
            self.g.cont_as(v, &[width, n])
        };
        let widest = self.g[cache].ne[0];
        if width < widest {
            v = self.g.pad(v, [widest - width, 0, 0, 0]);
        }
        let elements = self.g[cache].elements();
        let cache = self.g.reshape(cache, &[1, elements]);
        let elements = self.g[v].elements();
        let v = self.g.reshape(v, &[1, elements]);
        let stored = self.g.set_rows(cache, v, rows);
        self.g.expand(stored);
        Ok(())
    }

    /// Writes `x` to rows of a cache.
    pub fn store(&mut self, cache: Id, x: Id, rows: Id) {
        let ([width, heads, n, _], row) = (self.g[x].ne, self.g[x].nb[2]);
        let x = self.g.view(x, &[width * heads, n], &[row], 0);
        let [width, cells, streams, _] = self.g[cache].ne;
        let cache = match streams {
            1 => cache,
            _ => self
                .g
                .reshape(cache, &[width, cells.saturating_mul(streams)]),
        };
        let stored = self.g.set_rows(cache, x, rows);
        self.g.expand(stored);
    }

    /// Keys of a layer's cache, `[width of a head, heads, cells, streams]`.
    pub fn read_keys(&mut self, il: usize) -> Result<Id, Error> {
        let cache = self.cached_keys(il)?;
        let (width, heads) = (self.hp.head_k(il), self.hp.n_head_kv(il));
        Ok(self.read(cache, width, heads))
    }

    /// A cache by heads, `[width of a head, heads, cells, streams]`.
    pub fn read(&mut self, cache: Id, width: u64, heads: u64) -> Id {
        let (ty, [row, cells, streams, _]) = (self.g[cache].ty, self.g[cache].ne);
        let nb = [width, row, row.saturating_mul(cells)].map(|n| row_size(ty, n));
        self.g.view(cache, &[width, heads, cells, streams], &nb, 0)
    }

    /// Keys and values of a layer's cache; transposed values are `[cells, heads, width of a head, streams]`.
    pub fn read_keys_and_values(&mut self, il: usize) -> Result<[Id; 2], Error> {
        let k = self.read_keys(il)?;
        let cache = self.cached_values(il)?;
        let (width, heads) = (self.hp.head_v(il), self.hp.n_head_kv(il));
        if !self.setting.cache.v_trans {
            return Ok([k, self.read(cache, width, heads)]);
        }
        let (ty, [row, cells, streams, _]) = (self.g[cache].ty, self.g[cache].ne);
        let nb = [
            cells.saturating_mul(width),
            cells,
            cells.saturating_mul(row),
        ]
        .map(|n| row_size(ty, n));
        let v = self.g.view(cache, &[cells, heads, width, streams], &nb, 0);
        Ok([k, v])
    }

    /// Attention of queries over keys and values, all `[width of a head, heads, positions, streams]`; heads side by side in the
    /// result (`build_attn_mha`).
    pub fn multi_head(&mut self, il: usize, [q, k, v]: [Id; 3], mask: Id, extras: Extras) -> Id {
        let transposed = self.g[v].nb[1] > self.g[v].nb[2];
        let streams = self.g[k].ne[3];
        let ([width, heads, n, _], nb) = (self.g[q].ne, self.g[q].nb);
        let per_stream = n.checked_div(streams).unwrap_or(n);
        let strides = [nb[1], nb[2], nb[2].saturating_mul(per_stream)];
        let q = self
            .g
            .view(q, &[width, heads, per_stream, streams], &strides, 0);
        let [q, k, v] = [q, k, v].map(|x| self.g.permute(x, [0, 2, 1, 3]));
        let x = if self.flash_attention && extras.bias.is_none() {
            self.flash(il, [q, k, v], mask, extras, transposed)
        } else {
            self.softmax_attention([q, k, v], mask, extras, transposed)
        };
        self.g.expand(x);
        x
    }

    fn flash(
        &mut self,
        il: usize,
        [q, k, v]: [Id; 3],
        mask: Id,
        extras: Extras,
        transposed: bool,
    ) -> Id {
        let v = if transposed { self.g.transpose(v) } else { v };
        let [k, v] = [k, v].map(|x| self.g.as_half(x));
        let alibi = uses_alibi(self.hp);
        let mut x = self.g.flash_attn_ext(q, k, v, Some(mask), alibi);
        self.g.fused.push((Fused::FlashAttention, x, il));
        self.g.add_sinks(x, extras.sinks);
        if let Some(v_mla) = extras.v_mla {
            x = self.g.permute(x, [0, 2, 1, 3]);
            x = self.g.mul_mat(v_mla, x);
            x = self.g.permute(x, [0, 2, 1, 3]);
            x = self.g.cont(x);
        }
        let [width, heads, n, streams] = self.g[x].ne;
        self.g.reshape(x, &[width * heads, n * streams])
    }

    fn softmax_attention(
        &mut self,
        [q, k, v]: [Id; 3],
        mask: Id,
        extras: Extras,
        transposed: bool,
    ) -> Id {
        let mut kq = self.g.mul_mat(k, q);
        if self.hp.arch() == "grok" {
            kq = self.soft_cap(kq);
        }
        if self.hp.arch() == "gemma2" {
            kq = self.soft_cap(kq);
        }
        if let Some(bias) = extras.bias {
            kq = self.g.add(kq, bias);
        }
        kq = self.g.soft_max(kq, Some(mask));
        self.g.add_sinks(kq, extras.sinks);
        let v = if transposed {
            v
        } else {
            let v = self.g.transpose(v);
            self.g.cont(v)
        };
        let mut x = self.g.mul_mat(v, kq);
        if let Some(v_mla) = extras.v_mla {
            x = self.g.mul_mat(v_mla, x);
        }
        x = self.g.permute(x, [0, 2, 1, 3]);
        let [width, heads, n, streams] = self.g[x].ne;
        self.g.cont_as(x, &[width * heads, n * streams])
    }
}

/// Whether positions are a slope on the logits of attention (`f_max_alibi_bias`).
fn uses_alibi(hp: &Hparams) -> bool {
    match hp.arch() {
        "bloom" | "jina-bert-v2" | "refact" => true,
        "baichuan" => hp.n_layer() == 40,
        "jais" | "mpt" => hp.keys.float("attention.max_alibi_bias").unwrap_or(0.0) > 0.0,
        _ => false,
    }
}
