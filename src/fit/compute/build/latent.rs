//! Multi-head latent attention: keys and values are cached compressed, and queries work on them as they are (`deepseek2.cpp`,
//! `deepseek32.cpp`, `glm-dsa.cpp`, `minicpm3.cpp`).

use super::sparse::IndexerInputs;
use super::{
    Activation, AttentionInputs, Build, Error, Experts, Extras, FFN, Gating, Norm, Qkv,
    SHARED_EXPERT,
};
use crate::fit::compute::graph::{F32, I64, Id};

/// The inputs of attention over a cache of compressed keys.
#[derive(Debug, Clone, Copy)]
pub struct LatentInputs {
    /// Rows that are written.
    pub rows: Id,
    /// Which cells each token sees.
    pub mask: Id,
}

/// Rotary positions: the tokens' positions, and frequency factors if there are any.
pub type Rope = (Id, Option<Id>);

/// Keys and values of a layer before they are decompressed.
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    /// Compressed and normed, `[rank, tokens]`.
    pub kv: Id,
    /// The part of the keys that has a position, `[width, 1, tokens]`.
    pub k_pe: Id,
}

/// The inputs of attention, by what is cached.
enum Inputs {
    /// Compressed keys.
    Latent(LatentInputs),
    /// Compressed keys, and those of an indexer.
    Sparse(LatentInputs, IndexerInputs),
    /// Keys and values of each head.
    Full(AttentionInputs),
}

/// The graph of `deepseek2` and `mistral4`, and of `deepseek32` and `glm-dsa`, whose attention is sparse.
pub fn deepseek(b: &mut Build<'_>) -> Result<(), Error> {
    let sparse = matches!(b.hp.arch(), "deepseek32" | "glm-dsa");
    let mut x = b.embeddings(false)?;
    let scaled = !sparse && b.is_set("attention.temperature_scale");
    let scale = scaled.then(|| b.g.input(F32, &[1, 1, b.batch.tokens]));
    let pos = b.positions(1);
    let inputs = if sparse {
        Inputs::Sparse(b.latent_inputs(), b.indexer_inputs()?)
    } else if b.hp.is_mla() {
        Inputs::Latent(b.latent_inputs())
    } else {
        Inputs::Full(b.attention_inputs())
    };
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    // Layers without an indexer of their own read what the one before them selected.
    let mut selected = None;
    let normalize = b.hp.keys.flag("expert_weights_norm").unwrap_or(false);
    for il in 0..layers {
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        let compressed = b.compressed_query(il, cur)?;
        if let Inputs::Sparse(_, indexer) = &inputs
            && b.has_indexer(il)
        {
            selected = Some(b.select_cells(il, indexer, compressed, cur, pos)?);
        }
        let q = b.query(il, compressed)?;
        let latent = b.compress(il, cur, Some((pos, None)))?;
        let mut cur = match &inputs {
            Inputs::Full(inputs) => {
                let mut qkv = b.decompressed(il, q, latent, Some((pos, None)))?;
                qkv.q = b.multiplied(qkv.q, scale);
                b.attention(il, inputs, qkv, Extras::default())?
            }
            Inputs::Latent(inputs) | Inputs::Sparse(inputs, _) => {
                let (q, k, v) = b.absorbed(il, q, latent, Some(pos))?;
                let q = b.multiplied(q, scale);
                b.latent_attention(il, *inputs, [q, k, v], selected)?
            }
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        let residual = b.g.add(cur, x);
        let cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        let cur = b.shared_and_routed(il, cur, normalize)?;
        x = b.g.add(cur, residual);
    }
    b.normed_logits(x, Norm::Rms)
}

/// The graph of `minicpm3`: compressed, but cached by heads.
pub fn minicpm3(b: &mut Build<'_>) -> Result<(), Error> {
    let x = b.embeddings(false)?;
    let mut x = b.g.scale(x);
    let pos = b.positions(1);
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let rope = (pos, b.rope_factors(il));
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        let compressed = b.compressed_query(il, cur)?;
        let q = b.query(il, compressed)?;
        let latent = b.compress(il, cur, Some(rope))?;
        let qkv = b.decompressed(il, q, latent, Some(rope))?;
        let mut cur = b.attention(il, &inputs, qkv, Extras::default())?;
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        cur = b.g.scale(cur);
        let residual = b.g.add(cur, x);
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = b.ffn(il, cur, FFN, Activation::Silu)?;
        cur = b.g.scale(cur);
        x = b.g.add(cur, residual);
    }
    let x = b.output_norm(x, Norm::Rms);
    b.g[x].output = true;
    let x = b.g.scale(x);
    let matrix = b.output_matrix()?;
    let logits = b.g.mul_mat(matrix, x);
    b.finish(logits);
    Ok(())
}

impl Build<'_> {
    /// The inputs of attention over compressed keys (`build_attn_inp_k`).
    pub fn latent_inputs(&mut self) -> LatentInputs {
        let rows = self.g.input(I64, &[self.batch.tokens]);
        let mask = self.mask(self.setting.cache.cells);
        LatentInputs { rows, mask }
    }

    /// The input of the query matrix: compressed and normed, if the layer does so; else `x`.
    pub fn compressed_query(&mut self, il: usize, x: Id) -> Result<Id, Error> {
        if self.has(il, "attn_q", "weight") {
            return Ok(x);
        }
        let q = self.product(il, "attn_q_a", x)?;
        Ok(self.norm(il, "attn_q_a_norm", q, Norm::Rms))
    }

    /// Queries, `[width, heads, tokens]`.
    pub fn query(&mut self, il: usize, compressed: Id) -> Result<Id, Error> {
        let name = if self.has(il, "attn_q", "weight") {
            "attn_q"
        } else {
            "attn_q_b"
        };
        let q = self.product(il, name, compressed)?;
        let (heads, n) = (self.hp.n_head(0), self.batch.tokens);
        let width = self.g[q].ne[0].checked_div(heads).unwrap_or(0);
        Ok(self.g.reshape(q, &[width, heads, n]))
    }

    /// Keys and values, compressed; the shared part of the keys has its position.
    pub fn compress(&mut self, il: usize, x: Id, rope: Option<Rope>) -> Result<Latent, Error> {
        let (rank, rotated, n) = (self.hp.mla.lora_kv, self.hp.n_rot, self.batch.tokens);
        let both = self.product(il, "attn_kv_a_mqa", x)?;
        let nb = self.g[both].nb;
        let kv = self.g.view(both, &[rank, n], &[nb[1]], 0);
        let mut k_pe = self
            .g
            .view(both, &[rotated, 1, n], &[nb[1], nb[1]], rank * nb[0]);
        if let Some((pos, factors)) = rope {
            k_pe = self.g.rope(k_pe, pos, factors);
        }
        let kv = self.norm(il, "attn_kv_a_norm", kv, Norm::Rms);
        Ok(Latent { kv, k_pe })
    }

    /// Queries, keys and values over the compressed width: the key matrix works on the queries instead of the keys.
    pub fn absorbed(
        &mut self,
        il: usize,
        q: Id,
        latent: Latent,
        pos: Option<Id>,
    ) -> Result<(Id, Id, Id), Error> {
        let ([width, heads, n, _], nb) = (self.g[q].ne, self.g[q].nb);
        let [rotated, ..] = self.g[latent.k_pe].ne;
        let plain = width.saturating_sub(rotated);
        let q_nope = self.g.view(q, &[plain, heads, n], &nb[1..3], 0);
        let mut q_pe = self
            .g
            .view(q, &[rotated, heads, n], &nb[1..3], plain * nb[0]);
        if let Some(pos) = pos {
            q_pe = self.g.rope(q_pe, pos, None);
        }
        let q_nope = self.g.permute(q_nope, [0, 2, 1, 3]);
        let k_b = self.weight(il, "attn_k_b", "weight")?;
        let q_nope = self.g.mul_mat(k_b, q_nope);
        let q_nope = self.g.permute(q_nope, [0, 2, 1, 3]);
        let q = self.g.concat(q_nope, q_pe, 0);
        let rank = self.g[latent.kv].ne[0];
        let v = self.g.reshape(latent.kv, &[rank, 1, n]);
        let k = self.g.concat(v, latent.k_pe, 0);
        Ok((q, k, v))
    }

    /// Queries, keys and values of each head. Without positions the shared part of the keys comes first.
    pub fn decompressed(
        &mut self,
        il: usize,
        mut q: Id,
        latent: Latent,
        rope: Option<Rope>,
    ) -> Result<Qkv, Error> {
        if let Some((pos, factors)) = rope {
            q = self.g.rope(q, pos, factors);
        }
        let ([width, heads, n, _], [rotated, ..]) = (self.g[q].ne, self.g[latent.k_pe].ne);
        let plain = width.saturating_sub(rotated);
        let kv = self.product(il, "attn_kv_b", latent.kv)?;
        let both = self.g[kv].ne[0].checked_div(heads).unwrap_or(0);
        let nb = [4 * both, 4 * both * heads];
        let k = self.g.view(kv, &[plain, heads, n], &nb, 0);
        let v = self
            .g
            .view(kv, &[both.saturating_sub(plain), heads, n], &nb, 4 * plain);
        let v = self.g.cont(v);
        let k_pe = self.g.repeat(latent.k_pe, &[rotated, heads, n]);
        let k = match rope {
            Some(_) => self.g.concat(k, k_pe, 0),
            None => self.g.concat(k_pe, k, 0),
        };
        Ok(Qkv { q, k, v })
    }

    /// Attention over compressed keys, and the output matrix.
    pub fn latent_attention(
        &mut self,
        il: usize,
        inputs: LatentInputs,
        qkv: [Id; 3],
        selected: Option<Id>,
    ) -> Result<Id, Error> {
        let x = self.attend_latent(il, inputs, qkv, selected)?;
        self.linear(il, "attn_output", x)
    }

    /// Attention over compressed keys, whose first part are the values; of the cells that are selected, if any are. The value
    /// matrix brings the result back to the width of a head.
    pub fn attend_latent(
        &mut self,
        il: usize,
        inputs: LatentInputs,
        [q, k, v]: [Id; 3],
        selected: Option<Id>,
    ) -> Result<Id, Error> {
        for id in [q, v, k] {
            self.g.expand(id);
        }
        self.store_keys(il, k, inputs.rows)?;
        let mask = match selected {
            Some(cells) => self.mask_of_selected(inputs.mask, cells),
            None => inputs.mask,
        };
        let rank = self.g[v].ne[0];
        let k = self.read_keys(il)?;
        let ([_, heads, cells, streams], nb) = (self.g[k].ne, self.g[k].nb);
        let v = self.g.view(k, &[rank, heads, cells, streams], &nb[1..], 0);
        let extras = Extras {
            v_mla: Some(self.weight(il, "attn_v_b", "weight")?),
            ..Extras::default()
        };
        Ok(self.multi_head(il, [q, k, v], mask, extras))
    }

    /// Routed experts and a shared one, or a dense network.
    pub fn shared_and_routed(&mut self, il: usize, x: Id, normalize: bool) -> Result<Id, Error> {
        let silu = |key| match self.hp.arch() {
            "bailingmoe3" => self.silu(il, key),
            _ => Activation::Silu,
        };
        let (dense, routed) = (silu("swiglu_clamp_shexp"), silu("swiglu_clamp_exp"));
        if !self.has(il, "ffn_gate_inp", "weight") {
            return self.ffn(il, x, FFN, dense);
        }
        let experts = Experts {
            activation: routed,
            ..self.swiglu_experts(self.gating(self.default_gating())?, normalize)
        };
        let routed = self.experts(il, x, experts)?;
        if !self.has(il, "ffn_up_shexp", "weight") {
            return Ok(routed);
        }
        let shared = self.ffn(il, x, SHARED_EXPERT, dense)?;
        Ok(self.g.add(routed, shared))
    }

    /// What files say nothing of: GLM has a sigmoid, DeepSeek V2 a softmax.
    fn default_gating(&self) -> Gating {
        let glm = self.hp.arch() == "glm-dsa"
            || (matches!(self.hp.n_layer(), 47 | 48) && self.hp.n_vocab == 154_880);
        if glm {
            Gating::Sigmoid
        } else {
            Gating::Softmax
        }
    }

    fn multiplied(&mut self, x: Id, by: Option<Id>) -> Id {
        match by {
            Some(by) => self.g.mul(x, by),
            None => x,
        }
    }
}
