//! Gemma 4: embeddings per layer, caches that layers share, values without a matrix, and experts beside the dense network.

use super::{Activation, AttentionInputs, Build, Error, Experts, Extras, FFN, Gating, Norm, Qkv};
use crate::fit::compute::graph::{I32, Id, Unary};

/// Builds the graph.
pub fn build(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(true)?;
    let positions = b.positions(1);
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let per_layer = match b.find_global("per_layer_token_embd.weight") {
        Some(_) => Some(per_layer_inputs(b, x)?),
        None => None,
    };
    for il in 0..b.hp.n_layer() {
        let normed = b.norm(il, "attn_norm", x, Norm::Rms);
        let mut cur = attention(b, il, normed, positions, &inputs)?;
        cur = b.norm(il, "post_attention_norm", cur, Norm::Rms);
        let middle = b.g.add(cur, x);
        cur = network(b, il, middle)?;
        cur = b.norm(il, "post_ffw_norm", cur, Norm::Rms);
        x = b.g.add(cur, middle);
        if let Some(all) = per_layer {
            x = add_layer_input(b, il, x, all)?;
        }
        if let Some(scale) = b.find(il, "layer_output_scale", "weight") {
            x = b.g.mul(x, scale);
        }
    }
    let normed = b.output_norm(x, Norm::Rms);
    b.g[normed].output = true;
    let picked = b.pick(normed, rows);
    let mut logits = b.logits(picked)?;
    if b.hp.keys.float("final_logit_softcapping").unwrap_or(0.0) != 0.0 {
        logits = b.soft_cap(logits);
    }
    b.finish(logits);
    Ok(())
}

/// The inputs of all layers, `[width, tokens, layers]`: a row of a table for each token, and a projection of its embedding
/// (`build_inp_per_layer`, `project_per_layer_inputs`).
pub(super) fn per_layer_inputs(b: &mut Build<'_>, x: Id) -> Result<Id, Error> {
    let norm = b.global("per_layer_proj_norm.weight")?;
    let (width, layers, n) = (b.g[norm].ne[0], b.hp.n_layer() as u64, b.batch.tokens);
    let shape = [width, layers, n];
    let table = b.global("per_layer_token_embd.weight")?;
    let tokens = b.g.input(I32, &[n]);
    let rows = b.g.get_rows(table, tokens);
    let rows = b.g.reshape(rows, &shape);
    let selected = b.g.scale(rows);
    b.g.expand(selected);
    let projection = b.global("per_layer_model_proj.weight")?;
    let projected = b.g.mul_mat(projection, x);
    let projected = b.g.scale(projected);
    let projected = b.g.reshape(projected, &shape);
    let projected = b.norm_with(projected, Some(norm), None, Norm::Rms, None);
    let sum = b.g.add(projected, selected);
    let sum = b.g.scale(sum);
    let by_layer = b.g.permute(sum, [0, 2, 1, 3]);
    Ok(b.g.cont(by_layer))
}

/// Slice `i` of the third dimension.
pub(super) fn slice(b: &mut Build<'_>, x: Id, i: u64) -> Id {
    let ([n0, n1, ..], nb) = (b.g[x].ne, b.g[x].nb);
    let row = n0.saturating_mul(nb[0]);
    let step = row.saturating_mul(n1);
    b.g.view(x, &[n0, n1], &[row], i.saturating_mul(step))
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    positions: Id,
    inputs: &AttentionInputs,
) -> Result<Id, Error> {
    let factors = if b.hp.is_swa(il) {
        None
    } else {
        b.rope_factors(il)
    };
    let (n, heads, heads_kv) = (b.batch.tokens, b.hp.n_head(il), b.hp.n_head_kv(il));
    let (width_k, width_v) = (b.hp.head_k(il), b.hp.head_v(il));
    let q = b.linear(il, "attn_q", x)?;
    let q = b.g.reshape(q, &[width_k, heads, n]);
    let q = b.norm(il, "attn_q_norm", q, Norm::Rms);
    let q = b.g.rope(q, positions, factors);
    if b.setting.cache.layers[il].shares.is_some() {
        let attended = b.attend_shared(il, inputs, q)?;
        return b.linear(il, "attn_output", attended);
    }
    let k = b.linear(il, "attn_k", x)?;
    let v = match b.has(il, "attn_v", "weight") {
        true => b.linear(il, "attn_v", x)?,
        false => k,
    };
    let k = b.g.reshape(k, &[width_k, heads_kv, n]);
    let v = b.g.reshape(v, &[width_v, heads_kv, n]);
    let k = b.norm(il, "attn_k_norm", k, Norm::Rms);
    let v = b.g.rms_norm(v);
    let k = b.g.rope(k, positions, factors);
    b.attention(il, inputs, Qkv { q, k, v }, Extras::default())
}

/// The dense network, and experts beside it where the layer has them.
fn network(b: &mut Build<'_>, il: usize, middle: Id) -> Result<Id, Error> {
    let normed = b.norm(il, "ffn_norm", middle, Norm::Rms);
    let dense = b.ffn(il, normed, FFN, Activation::Gelu)?;
    if !b.has(il, "ffn_gate_inp", "weight") {
        return Ok(dense);
    }
    let dense = b.norm(il, "post_ffw_norm_1", dense, Norm::Rms);
    let normed = b.norm(il, "pre_ffw_norm_2", middle, Norm::Rms);
    let router_in = b.g.rms_norm(middle);
    let router_in = b.g.scale(router_in);
    let scale = b.weight(il, "ffn_gate_inp", "scale")?;
    let router_in = b.g.mul(router_in, scale);
    let router = b.weight(il, "ffn_gate_inp", "weight")?;
    let logits = b.g.mul_mat(router, router_in);
    let experts = Experts {
        activation: Activation::Gelu,
        gating: Gating::Softmax,
        normalize: true,
        scale: false,
        weight_before: false,
    };
    let routed = b.routed_experts(il, normed, logits, experts)?;
    let routed = b.norm(il, "post_ffw_norm_2", routed, Norm::Rms);
    Ok(b.g.add(dense, routed))
}

/// The layer's own input, gated by the hidden state.
fn add_layer_input(b: &mut Build<'_>, il: usize, x: Id, all: Id) -> Result<Id, Error> {
    let gate = b.linear(il, "inp_gate", x)?;
    let gate = b.g.unary(Unary::Gelu, gate);
    let own = slice(b, all, il as u64);
    let gated = b.g.mul(gate, own);
    let cur = b.linear(il, "proj", gated)?;
    let cur = b.norm(il, "post_norm", cur, Norm::Rms);
    Ok(b.g.add(x, cur))
}
