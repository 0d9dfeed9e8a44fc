//! Models that alternate attention with state space or convolution layers.

use super::state::StateInputs;
use super::{Activation, Build, Error, Experts, Extras, FFN, Gating, Norm, Qkv, SHARED_EXPERT};
use crate::fit::compute::graph::{Glu, Id};

/// The graph of `jamba`.
pub fn jamba(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    let experts = b.swiglu_experts(Gating::Softmax, false);
    for il in 0..layers {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = if b.hp.n_head_kv(il) == 0 {
            b.mamba_layer(il, states, cur)?
        } else {
            let qkv = b.qkv(il, cur)?;
            b.attention(il, &inputs, qkv, Extras::default())?
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        let residual = b.g.add(x, cur);
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = if b.has(il, "ffn_gate_inp", "weight") {
            b.experts(il, cur, experts)?
        } else {
            b.ffn(il, cur, FFN, Activation::Silu)?
        };
        x = b.g.add(residual, cur);
    }
    b.normed_logits(x, Norm::Rms)
}

/// The graph of `falcon-h1`: every layer has attention and a Mamba 2 mixer side by side.
pub fn falcon_h1(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let pos = b.positions(1);
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        let Qkv { q, k, v } = b.qkv(il, cur)?;
        let q = b.g.rope(q, pos, None);
        let k = b.g.rope(k, pos, None);
        let attention = b.attention(il, &inputs, Qkv { q, k, v }, Extras::default())?;
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        let mixed = b.mamba2_layer(il, states, cur)?;
        let cur = b.g.add(attention, mixed);
        let mut residual = b.g.add(cur, x);
        if il + 1 == layers {
            residual = b.pick(residual, rows);
        }
        // The name of this weight has no suffix.
        let cur = b.bare_norm(il, "ffn_norm", residual)?;
        let cur = b.ffn(il, cur, FFN, Activation::Silu)?;
        x = b.g.add(cur, residual);
    }
    b.normed_logits(x, Norm::Rms)
}

/// The graph of `nemotron_h` and `nemotron_h_moe`: a layer is a Mamba 2 mixer, attention or a feed-forward network.
pub fn nemotron_h(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    for il in 0..b.hp.n_layer() {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = if b.hp.is_recurrent(il) {
            b.mamba2_layer(il, states, cur)?
        } else if b.hp.n_ff(il) == 0 {
            let qkv = b.qkv(il, cur)?;
            b.attention(il, &inputs, qkv, Extras::default())?
        } else if b.has(il, "ffn_gate_inp", "weight") {
            latent_experts(b, il, cur)?
        } else {
            b.ffn(il, cur, FFN, Activation::ReluSqr)?
        };
        x = b.g.add(cur, x);
    }
    b.hidden_and_logits(x, rows)
}

/// Experts that may work in a narrower space than the model, and a shared one that does not.
fn latent_experts(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let mut latent = x;
    if b.has(il, "ffn_latent_down", "weight") {
        latent = b.linear(il, "ffn_latent_down", x)?;
    }
    let logits = b.linear(il, "ffn_gate_inp", x)?;
    let normalize = b.hp.keys.flag("expert_weights_norm").unwrap_or(false);
    let experts = Experts {
        activation: Activation::ReluSqr,
        ..b.swiglu_experts(Gating::Sigmoid, normalize)
    };
    let mut routed = b.routed_experts(il, latent, logits, experts)?;
    if b.has(il, "ffn_latent_up", "weight") {
        routed = b.linear(il, "ffn_latent_up", routed)?;
    }
    let shared = b.ffn(il, x, SHARED_EXPERT, Activation::ReluSqr)?;
    Ok(b.g.add(routed, shared))
}

/// The graph of `granitehybrid`.
pub fn granite(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    // Positions are rotated unless the header says that the model was not trained with them.
    let rotates = b.hp.keys.flag("rope.scaling.finetuned").unwrap_or(true);
    let pos = rotates.then(|| b.positions(1));
    let residual_scale = b.is_set("residual_scale");
    let layers = b.hp.n_layer();
    let experts = b.swiglu_experts(Gating::Softmax, true);
    for il in 0..layers {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = if b.hp.is_recurrent(il) {
            b.mamba2_layer(il, states, cur)?
        } else {
            let Qkv { mut q, mut k, v } = b.qkv(il, cur)?;
            if let Some(pos) = pos {
                let factors = b.rope_factors(il);
                q = b.g.rope(q, pos, factors);
                k = b.g.rope(k, pos, factors);
            }
            b.attention(il, &inputs, Qkv { q, k, v }, Extras::default())?
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        if residual_scale {
            cur = b.g.scale(cur);
        }
        let residual = b.g.add(cur, x);
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = if b.has(il, "ffn_gate_inp", "weight") {
            let routed = b.experts(il, cur, experts)?;
            if b.has(il, "ffn_up_shexp", "weight") {
                let shared = b.ffn(il, cur, SHARED_EXPERT, Activation::Silu)?;
                b.g.add(routed, shared)
            } else {
                routed
            }
        } else {
            b.ffn(il, cur, FFN, Activation::Silu)?
        };
        if residual_scale {
            cur = b.g.scale(cur);
        }
        x = b.g.add(cur, residual);
    }
    let x = b.output_norm(x, Norm::Rms);
    let mut logits = b.logits(x)?;
    if b.is_set("logit_scale") {
        logits = b.g.scale(logits);
    }
    b.finish(logits);
    Ok(())
}

/// The graph of `lfm2` and `lfm2moe`: attention, or a short gated convolution.
pub fn lfm2(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let pos = b.positions(1);
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = if b.hp.is_recurrent(il) {
            short_convolution(b, il, states, cur)?
        } else {
            let Qkv { q, k, v } = b.qkv(il, cur)?;
            let q = b.norm(il, "attn_q_norm", q, Norm::Rms);
            let k = b.norm(il, "attn_k_norm", k, Norm::Rms);
            let q = b.g.rope(q, pos, None);
            let k = b.g.rope(k, pos, None);
            b.attention(il, &inputs, Qkv { q, k, v }, Extras::default())?
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        let residual = b.g.add(x, cur);
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = if (il as u64) < b.hp.n_layer_dense_lead {
            b.ffn(il, cur, FFN, Activation::Silu)?
        } else {
            let experts = b.swiglu_experts(b.gating(Gating::Softmax)?, true);
            b.experts(il, cur, experts)?
        };
        x = b.g.add(residual, cur);
    }
    // The norm before the output is called like that of the embeddings in older files.
    let name = if b.find_global("output_norm.weight").is_some() {
        "output_norm.weight"
    } else {
        "token_embd_norm.weight"
    };
    let weight = b.global(name)?;
    let x = b.norm_with(x, Some(weight), None, Norm::Rms, None);
    let logits = b.logits(x)?;
    b.finish(logits);
    Ok(())
}

fn short_convolution(
    b: &mut Build<'_>,
    il: usize,
    states: StateInputs,
    x: Id,
) -> Result<Id, Error> {
    let x = b.by_sequence(x);
    let bcx = b.linear(il, "shortconv.in_proj", x)?;
    let ([width, tokens, n, _], nb) = (b.g[bcx].ne, b.g[bcx].nb);
    let width = width / 3;
    let [gate_in, gate_out, x] = [0, 1, 2].map(|i| {
        b.g.view(bcx, &[width, tokens, n], &nb[1..3], i * width * nb[0])
    });
    let gated = b.g.mul(gate_in, x);
    let cache = b.state_caches(il)?.shift;
    let input = b.conv_input(states, cache, gated);
    let kernel = b.weight(il, "shortconv.conv", "weight")?;
    let y = b.g.ssm_conv(input, kernel);
    let y = b.g.mul(gate_out, y);
    let y = b.linear(il, "shortconv.out_proj", y)?;
    let width = b.g[y].ne[0];
    Ok(b.g.reshape(y, &[width, tokens * n]))
}

/// The graph of `plamo2`: norms before and after each part.
pub fn plamo2(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let pos = b.positions(1);
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = if b.hp.is_recurrent(il) {
            b.plamo2_mixer(il, states, cur)?
        } else {
            let Qkv { q, k, v } = b.qkv(il, cur)?;
            let q = b.norm(il, "attn_q_norm", q, Norm::Rms);
            let q = b.g.rope(q, pos, None);
            let k = b.norm(il, "attn_k_norm", k, Norm::Rms);
            let k = b.g.rope(k, pos, None);
            b.attention(il, &inputs, Qkv { q, k, v }, Extras::default())?
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        cur = b.bare_norm(il, "post_attention_norm", cur)?;
        let residual = b.g.add(cur, x);
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = b.ffn_halves(il, cur, FFN, Glu::Swiglu)?;
        cur = b.bare_norm(il, "post_ffw_norm", cur)?;
        x = b.g.add(cur, residual);
    }
    b.normed_logits(x, Norm::Rms)
}
