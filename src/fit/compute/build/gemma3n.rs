//! Gemma 3n: several alternating hidden states (AltUp), a low-rank residual (LAuReL), embeddings per layer, shared caches.

use super::gemma4::per_layer_inputs;
use super::gemma4::slice;
use super::{AttentionInputs, Build, Error, Extras, Norm};
use crate::fit::compute::graph::{Id, Unary};

/// Hidden states that alternate; the first is the active one.
const N_ALTUP: u64 = 4;
/// Leading layers with sparse activations.
const SPARSE_LAYERS: usize = 10;

/// Builds the graph.
pub fn build(b: &mut Build<'_>) -> Result<(), Error> {
    let embedded = b.embeddings(true)?;
    let positions = b.positions(1);
    let inputs = b.attention_inputs();
    let per_layer = per_layer_inputs(b, embedded)?;
    let mut states = stack(b, embedded)?;
    for il in 0..b.hp.n_layer() {
        states = layer(b, il, states, per_layer, positions, &inputs)?;
    }
    let merged = merge(b, states)?;
    let rows = b.output_rows();
    let picked = b.pick(merged, rows);
    let normed = b.output_norm(picked, Norm::Rms);
    let logits = b.logits(normed)?;
    let logits = b.soft_cap(logits);
    b.finish(logits);
    Ok(())
}

/// Root of the sum of squares of each row.
fn magnitude(b: &mut Build<'_>, x: Id) -> Id {
    let squares = b.g.sqr(x);
    let sum = b.g.sum_rows(squares);
    b.g.sqrt(sum)
}

/// The states beside the active one, from the embeddings and as long as they are.
fn stack(b: &mut Build<'_>, x: Id) -> Result<Id, Error> {
    let target = magnitude(b, x);
    let [width, n, ..] = b.g[x].ne;
    let repeated = b.g.repeat(x, &[width, n, N_ALTUP - 1]);
    let projection = b.global("altup_proj.weight")?;
    let added = b.g.mul_mat(projection, repeated);
    let own = magnitude(b, added);
    let added = b.g.mul(added, target);
    let added = b.g.div(added, own);
    Ok(b.g.concat(x, added, 2))
}

/// All states but the first.
fn rest(b: &mut Build<'_>, states: Id) -> Id {
    let ([width, n, all, _], nb) = (b.g[states].ne, b.g[states].nb);
    b.g.view(states, &[width, n, all - 1], &nb[1..3], nb[2])
}

/// The mean of all states, the others brought back to the space of the active one.
fn merge(b: &mut Build<'_>, states: Id) -> Result<Id, Error> {
    let active = slice(b, states, 0);
    let target = magnitude(b, active);
    let others = rest(b, states);
    let projection = b.global("altup_unembd_proj.weight")?;
    let projected = b.g.mul_mat(projection, others);
    let own = magnitude(b, projected);
    let projected = b.g.mul(projected, target);
    let projected = b.g.div(projected, own);
    let mut sum = slice(b, states, 0);
    for i in 0..N_ALTUP - 1 {
        let other = slice(b, projected, i);
        sum = b.g.add(sum, other);
    }
    Ok(b.g.scale(sum))
}

fn layer(
    b: &mut Build<'_>,
    il: usize,
    states: Id,
    per_layer: Id,
    positions: Id,
    inputs: &AttentionInputs,
) -> Result<Id, Error> {
    let predictions = predict(b, il, states)?;
    let active = slice(b, predictions, 0);
    let normed = b.norm(il, "attn_norm", active, Norm::Rms);
    let laurel = laurel(b, il, normed)?;
    let cur = attention(b, il, normed, positions, inputs)?;
    let cur = b.norm(il, "post_attention_norm", cur, Norm::Rms);
    let cur = b.g.add(cur, active);
    let cur = b.g.add(cur, laurel);
    let middle = b.g.scale(cur);
    let normed = b.norm(il, "ffn_norm", middle, Norm::Rms);
    let cur = network(b, il, normed)?;
    let cur = b.norm(il, "post_ffw_norm", cur, Norm::Rms);
    let activated = b.g.add(cur, middle);
    let corrected = correct(b, il, predictions, activated)?;
    let first = layer_input(b, il, corrected, per_layer)?;
    let active = slice(b, corrected, 0);
    let others = rest(b, corrected);
    let others = b.g.add(others, first);
    Ok(b.g.concat(active, others, 2))
}

fn laurel(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let low = b.linear(il, "laurel_l", x)?;
    let high = b.linear(il, "laurel_r", low)?;
    let normed = b.norm(il, "laurel_post_norm", high, Norm::Rms);
    Ok(b.g.add(normed, x))
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    positions: Id,
    inputs: &AttentionInputs,
) -> Result<Id, Error> {
    if b.setting.cache.layers[il].shares.is_some() {
        let q = b.linear(il, "attn_q", x)?;
        let (width, heads, n) = (b.hp.head_k(il), b.hp.n_head(il), b.batch.tokens);
        let q = b.g.reshape(q, &[width, heads, n]);
        let q = b.norm(il, "attn_q_norm", q, Norm::Rms);
        let q = b.g.rope(q, positions, None);
        let attended = b.attend_shared(il, inputs, q)?;
        return b.linear(il, "attn_output", attended);
    }
    let mut qkv = b.qkv(il, x)?;
    qkv.q = b.norm(il, "attn_q_norm", qkv.q, Norm::Rms);
    qkv.k = b.norm(il, "attn_k_norm", qkv.k, Norm::Rms);
    qkv.v = b.g.rms_norm(qkv.v);
    qkv.q = b.g.rope(qkv.q, positions, None);
    qkv.k = b.g.rope(qkv.k, positions, None);
    b.attention(il, inputs, qkv, Extras::default())
}

fn network(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let up = b.linear(il, "ffn_up", x)?;
    let mut gate = b.linear(il, "ffn_gate", x)?;
    if il < SPARSE_LAYERS {
        gate = gaussian_top_k(b, gate);
    }
    let gate = b.g.unary(Unary::Gelu, gate);
    let hidden = b.g.mul(up, gate);
    b.linear(il, "ffn_down", hidden)
}

/// What is above a multiple of the standard deviation.
fn gaussian_top_k(b: &mut Build<'_>, x: Id) -> Id {
    let mean = b.g.mean(x);
    let centred = b.g.sub(x, mean);
    let squares = b.g.sqr(centred);
    let sum = b.g.sum_rows(squares);
    let variance = b.g.scale(sum);
    let deviation = b.g.sqrt(variance);
    let deviation = b.g.scale(deviation);
    let cutoff = b.g.add(mean, deviation);
    let above = b.g.sub(x, cutoff);
    b.g.unary(Unary::Relu, above)
}

fn modalities(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let normed = b.norm(il, "altup_router_norm", x, Norm::Rms);
    let scaled = b.g.scale(normed);
    let routed = b.linear(il, "altup_router", scaled)?;
    Ok(b.g.unary(Unary::Tanh, routed))
}

/// What the layer will make of all states, before it runs on the active one.
fn predict(b: &mut Build<'_>, il: usize, states: Id) -> Result<Id, Error> {
    let active = slice(b, states, 0);
    let modalities = modalities(b, il, active)?;
    let coefficients = b.linear(il, "altup_predict_coef", modalities)?;
    let coefficients =
        b.g.reshape(coefficients, &[N_ALTUP, N_ALTUP, b.batch.tokens]);
    let by_state = b.g.permute(states, [1, 2, 0, 3]);
    let by_state = b.g.cont(by_state);
    let predictions = b.g.mul_mat(by_state, coefficients);
    let predictions = b.g.permute(predictions, [0, 2, 1, 3]);
    let predictions = b.g.cont(predictions);
    Ok(b.g.add(predictions, states))
}

/// The predictions, corrected by what the layer made of the active state.
fn correct(b: &mut Build<'_>, il: usize, predictions: Id, activated: Id) -> Result<Id, Error> {
    let modalities = modalities(b, il, activated)?;
    let active = slice(b, predictions, 0);
    let innovation = b.g.sub(activated, active);
    let coefficients = b.linear(il, "altup_correct_coef", modalities)?;
    let coefficients = b.g.scale(coefficients);
    let coefficients = b.g.transpose(coefficients);
    let [width, n, ..] = b.g[innovation].ne;
    let coefficients = b.g.cont_as(coefficients, &[1, n, N_ALTUP]);
    let innovation = b.g.repeat(innovation, &[width, n, N_ALTUP]);
    let corrected = b.g.mul(innovation, coefficients);
    Ok(b.g.add(corrected, predictions))
}

/// The layer's own input, gated by the active state.
fn layer_input(b: &mut Build<'_>, il: usize, corrected: Id, per_layer: Id) -> Result<Id, Error> {
    let active = slice(b, corrected, 0);
    let scale = b.weight(il, "altup_correct_scale", "weight")?;
    let scaled = b.g.mul(active, scale);
    let gate = b.linear(il, "inp_gate", scaled)?;
    let gate = b.g.unary(Unary::Gelu, gate);
    let own = slice(b, per_layer, il as u64);
    let gated = b.g.mul(gate, own);
    let cur = b.linear(il, "proj", gated)?;
    Ok(b.norm(il, "post_norm", cur, Norm::Rms))
}
