//! Decoders whose attention and feed-forward network read the same input, and whose results are summed with it.

use super::{Activation, AttentionInputs, Build, Error, Extras, FFN, Gating, Norm, SHARED_EXPERT};
use crate::arch::Hparams;
use crate::fit::compute::graph::Id;

/// A layer's three summands: attention, network, input.
#[derive(Debug, Clone, Copy)]
struct Parts {
    attention: Id,
    network: Id,
    input: Id,
}

/// What differs between the architectures of the family.
struct Style {
    norm: Norm,
    activation: Activation,
    /// The first sum, and what is added to it.
    sum: fn(&mut Build<'_>, Parts) -> Id,
    /// The network has a norm of its own.
    own_norm: bool,
    /// Queries are scaled before attention.
    scales_queries: bool,
    /// Rotary positions in layers with a window only.
    rope_in_windows: bool,
}

impl Style {
    fn of(b: &Build<'_>) -> Option<Style> {
        let style = |norm, activation, sum| Style {
            norm,
            activation,
            sum,
            own_norm: false,
            scales_queries: false,
            rope_in_windows: false,
        };
        let rms_norm =
            b.hp.keys
                .float("attention.layer_norm_rms_epsilon")
                .unwrap_or(0.0)
                != 0.0;
        Some(match b.hp.arch() {
            "falcon" => style(Norm::Layer, Activation::Gelu, network_first),
            "plamo" => style(Norm::Rms, Activation::Silu, network_first),
            "phi2" => Style {
                scales_queries: true,
                ..style(Norm::Layer, Activation::Gelu, attention_first)
            },
            "gptneox" => Style {
                own_norm: true,
                ..style(Norm::Layer, Activation::Gelu, attention_last)
            },
            "command-r" => style(Norm::Layer, Activation::Silu, attention_last),
            "cohere2" => Style {
                rope_in_windows: true,
                ..style(Norm::Layer, Activation::Silu, attention_last)
            },
            "cohere2moe" => Style {
                rope_in_windows: true,
                ..style(
                    if rms_norm { Norm::Rms } else { Norm::Layer },
                    Activation::Silu,
                    attention_last,
                )
            },
            _ => return None,
        })
    }
}

fn network_first(b: &mut Build<'_>, parts: Parts) -> Id {
    let sum = b.g.add(parts.network, parts.attention);
    b.g.add(sum, parts.input)
}

fn attention_first(b: &mut Build<'_>, parts: Parts) -> Id {
    let sum = b.g.add(parts.attention, parts.network);
    b.g.add(sum, parts.input)
}

fn attention_last(b: &mut Build<'_>, parts: Parts) -> Id {
    let sum = b.g.add(parts.network, parts.input);
    b.g.add(sum, parts.attention)
}

/// Whether this family has the model: GPT-NeoX is in it as far as its header says so.
pub fn knows(hp: &Hparams) -> bool {
    match hp.arch() {
        "falcon" | "plamo" | "phi2" | "command-r" | "cohere2" | "cohere2moe" => true,
        "gptneox" => hp.keys.flag("use_parallel_residual").unwrap_or(true),
        _ => false,
    }
}

/// Builds the graph.
pub fn build(b: &mut Build<'_>) -> Result<(), Error> {
    let style = Style::of(b).ok_or_else(|| Error::Unknown(b.hp.arch().to_owned()))?;
    let mut x = b.embeddings(false)?;
    let positions = b.positions(1);
    let inputs = b.attention_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut normed = b.norm(il, "attn_norm", x, style.norm);
        // Falcon 40B norms the input of attention and of the network apart.
        let attention_in = match b.has(il, "attn_norm_2", "weight") {
            true => b.norm(il, "attn_norm_2", x, style.norm),
            false => normed,
        };
        let mut attention = attention(b, il, attention_in, positions, &inputs, &style)?;
        if il + 1 == layers && !picks_at_end(b) {
            [attention, x, normed] = [attention, x, normed].map(|y| b.pick(y, rows));
        }
        if style.own_norm {
            normed = b.norm(il, "ffn_norm", x, style.norm);
        }
        let network = network(b, il, normed, &style)?;
        x = (style.sum)(
            b,
            Parts {
                attention,
                network,
                input: x,
            },
        );
    }
    let mut normed = b.output_norm(x, style.norm);
    if picks_at_end(b) {
        b.g[normed].output = true;
        normed = b.pick(normed, rows);
    }
    let mut logits = b.logits(normed)?;
    if let Some(bias) = b.find_global("output.bias") {
        logits = b.g.add(logits, bias);
    }
    if b.hp.keys.float("logit_scale").unwrap_or(0.0) != 0.0 {
        logits = b.g.scale(logits);
    }
    b.finish(logits);
    Ok(())
}

/// All rows go through the last layer where they are the input of a draft head.
fn picks_at_end(b: &Build<'_>) -> bool {
    b.hp.arch() == "cohere2moe"
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    positions: Id,
    inputs: &AttentionInputs,
    style: &Style,
) -> Result<Id, Error> {
    let mut qkv = b.qkv(il, x)?;
    if b.has(il, "attn_q_norm", "weight") {
        qkv.q = b.norm(il, "attn_q_norm", qkv.q, style.norm);
    }
    if b.has(il, "attn_k_norm", "weight") {
        qkv.k = b.norm(il, "attn_k_norm", qkv.k, style.norm);
    }
    let dense_lead = b.hp.arch() == "cohere2moe" && (il as u64) < b.hp.n_layer_dense_lead;
    if !style.rope_in_windows || b.hp.is_swa(il) || dense_lead {
        let factors = if style.rope_in_windows {
            b.rope_factors(il)
        } else {
            None
        };
        qkv.q = b.g.rope(qkv.q, positions, factors);
        qkv.k = b.g.rope(qkv.k, positions, factors);
    }
    if style.scales_queries {
        qkv.q = b.g.scale(qkv.q);
    }
    b.attention(il, inputs, qkv, Extras::default())
}

/// The network, or experts with a shared one (Command A's mixture).
fn network(b: &mut Build<'_>, il: usize, x: Id, style: &Style) -> Result<Id, Error> {
    if !b.has(il, "ffn_gate_inp", "weight") {
        return b.ffn(il, x, FFN, style.activation);
    }
    let gating = b.gating(Gating::Sigmoid)?;
    let normalize = b.hp.keys.flag("expert_weights_norm").unwrap_or(false);
    let routed = b.experts(il, x, b.swiglu_experts(gating, normalize))?;
    if !b.has(il, SHARED_EXPERT.up, "weight") {
        return Ok(routed);
    }
    let shared = b.ffn(il, x, SHARED_EXPERT, style.activation)?;
    let sum = b.g.add(routed, shared);
    Ok(b.g.scale(sum))
}
