//! Transformers with one attention and one feed-forward network per layer, one after the other: LLaMA and its relatives, with
//! or without experts and sliding windows.

use super::{
    Activation, AttentionInputs, Build, Error, Experts, Extras, FFN, Gating, Norm, Qkv,
    SHARED_EXPERT,
};
use crate::arch::Hparams;
use crate::fit::compute::graph::{Glu, Id, Unary};

/// How embeddings are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// Not, or as the key `embedding_scale` says.
    Plain,
    /// All by a constant.
    Scaled,
    /// Those of tokens by a constant.
    TokensScaled,
}

/// Where norms of queries and keys stand, if the model has any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QkNorm {
    /// On heads, before positions.
    BeforeRope,
    /// On heads, after positions.
    AfterRope,
    /// On whole rows.
    Rows,
}

/// What an architecture has that its tensors do not tell.
#[derive(Debug, Clone, Copy)]
struct Style {
    input: Input,
    qk_norm: QkNorm,
    /// Every so many layers one has no positions (0: all have).
    no_rope_step: usize,
    /// Queries are scaled by a node of its own.
    scaled_queries: bool,
    /// The norm before the network.
    ffn_norm: &'static str,
    /// Norms behind attention and network, before the residual is added.
    post_norms: bool,
    activation: Activation,
    gating: Gating,
    normalized_experts: bool,
    /// The shared expert has a gate.
    gated_shared_expert: bool,
    /// The network's result is the second operand of the residual sum.
    residual_first: bool,
    /// Output rows are picked behind the last layer rather than within it, and its result is an output.
    picks_at_end: bool,
    /// Logits are squashed.
    capped_logits: bool,
    /// Logits are scaled.
    scaled_logits: bool,
}

const LLAMA: Style = Style {
    input: Input::Plain,
    qk_norm: QkNorm::BeforeRope,
    no_rope_step: 0,
    scaled_queries: false,
    ffn_norm: "ffn_norm",
    post_norms: false,
    activation: Activation::Silu,
    gating: Gating::Softmax,
    normalized_experts: true,
    gated_shared_expert: false,
    residual_first: false,
    picks_at_end: false,
    capped_logits: false,
    scaled_logits: false,
};

const GEMMA: Style = Style {
    input: Input::Scaled,
    scaled_queries: true,
    activation: Activation::Gelu,
    ..LLAMA
};

fn style(hp: &Hparams) -> Option<Style> {
    let gating = |default: Gating| {
        let raw = hp.keys.opt("expert_gating_func").ok().flatten();
        raw.and_then(Gating::from_raw).unwrap_or(default)
    };
    let capped = hp.keys.float("final_logit_softcapping").unwrap_or(0.0) != 0.0;
    Some(match hp.arch() {
        "llama" | "mistral3" | "qwen2" | "qwen3" | "qwen3moe" | "internlm2" | "ernie4_5"
        | "ernie4_5-moe" => LLAMA,
        "arcee" => Style {
            activation: Activation::ReluSqr,
            ..LLAMA
        },
        "deepseek" => Style {
            normalized_experts: false,
            ..LLAMA
        },
        "dots1" => Style {
            normalized_experts: hp.keys.flag("expert_weights_norm").unwrap_or(false),
            gating: gating(Gating::Softmax),
            ..LLAMA
        },
        "gemma" => GEMMA,
        "gemma2" => Style {
            post_norms: true,
            capped_logits: true,
            ..GEMMA
        },
        "gemma3" => Style {
            input: Input::TokensScaled,
            post_norms: true,
            capped_logits: capped,
            ..GEMMA
        },
        "gpt-oss" => Style {
            ffn_norm: "post_attention_norm",
            activation: Activation::SwigluOai,
            gating: Gating::SoftmaxOfSelected,
            normalized_experts: false,
            picks_at_end: true,
            ..LLAMA
        },
        "granite" | "granitemoe" => Style {
            scaled_logits: true,
            ..LLAMA
        },
        "hunyuan-dense" => Style {
            qk_norm: QkNorm::AfterRope,
            ..LLAMA
        },
        "minimax-m2" => Style {
            qk_norm: QkNorm::Rows,
            gating: gating(Gating::Sigmoid),
            ..LLAMA
        },
        "olmoe" => Style {
            qk_norm: QkNorm::Rows,
            normalized_experts: false,
            ..LLAMA
        },
        "phi3" => Style {
            scaled_queries: true,
            residual_first: true,
            ..LLAMA
        },
        "qwen2moe" => Style {
            normalized_experts: false,
            gated_shared_expert: true,
            ..LLAMA
        },
        "seed_oss" => Style {
            ffn_norm: "post_attention_norm",
            ..LLAMA
        },
        "smollm3" => Style {
            no_rope_step: 4,
            ..LLAMA
        },
        _ => return None,
    })
}

/// Whether this family has the architecture.
pub fn knows(arch: &str) -> bool {
    matches!(
        arch,
        "arcee"
            | "deepseek"
            | "dots1"
            | "ernie4_5"
            | "ernie4_5-moe"
            | "gemma"
            | "gemma2"
            | "gemma3"
            | "gpt-oss"
            | "granite"
            | "granitemoe"
            | "hunyuan-dense"
            | "internlm2"
            | "llama"
            | "minimax-m2"
            | "mistral3"
            | "olmoe"
            | "phi3"
            | "qwen2"
            | "qwen2moe"
            | "qwen3"
            | "qwen3moe"
            | "seed_oss"
            | "smollm3"
    )
}

/// Inputs that all layers share.
struct Inputs {
    positions: Id,
    temperature: Option<Id>,
    attention: AttentionInputs,
}

/// Builds the graph.
pub fn build(b: &mut Build<'_>) -> Result<(), Error> {
    let style = style(b.hp).ok_or_else(|| Error::Unknown(b.hp.arch().to_owned()))?;
    let residual_scale = b.hp.keys.float("residual_scale").unwrap_or(0.0) != 0.0;
    let mut x = b.embeddings(style.input == Input::TokensScaled)?;
    if style.input == Input::Scaled {
        x = b.g.scale(x);
    }
    let inputs = Inputs {
        positions: b.positions(1),
        temperature: temperature(b),
        attention: b.attention_inputs(),
    };
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut residual = x;
        let normed = b.norm(il, "attn_norm", x, Norm::Rms);
        let mut cur = attention(b, il, normed, &inputs, style)?;
        if il + 1 == layers && !style.picks_at_end {
            cur = b.pick(cur, rows);
            residual = b.pick(residual, rows);
        }
        if style.post_norms {
            cur = b.norm(il, "post_attention_norm", cur, Norm::Rms);
        }
        if residual_scale {
            cur = b.g.scale(cur);
        }
        let middle = b.g.add(cur, residual);
        let normed = b.norm(il, style.ffn_norm, middle, Norm::Rms);
        let mut cur = network(b, il, normed, style)?;
        if style.post_norms {
            cur = b.norm(il, "post_ffw_norm", cur, Norm::Rms);
        }
        if residual_scale {
            cur = b.g.scale(cur);
        }
        x = if style.residual_first {
            b.g.add(middle, cur)
        } else {
            b.g.add(cur, middle)
        };
    }
    if style.picks_at_end {
        b.g[x].output = true;
        x = b.pick(x, rows);
    }
    let normed = b.output_norm(x, Norm::Rms);
    let mut logits = b.logits(normed)?;
    if style.capped_logits {
        logits = b.soft_cap(logits);
    }
    if style.scaled_logits {
        logits = b.g.scale(logits);
    }
    if let Some(bias) = b.find_global("output.bias") {
        logits = b.g.add(logits, bias);
    }
    b.finish(logits);
    Ok(())
}

/// Factors by position that queries are multiplied with (Mistral 3).
fn temperature(b: &mut Build<'_>) -> Option<Id> {
    let scale =
        b.hp.keys
            .float("attention.temperature_scale")
            .unwrap_or(0.0);
    let tokens = b.batch.tokens;
    (scale != 0.0).then(|| b.g.input(crate::fit::compute::graph::F32, &[1, 1, tokens]))
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    inputs: &Inputs,
    style: Style,
) -> Result<Id, Error> {
    let mut qkv = if style.qk_norm == QkNorm::Rows {
        let flat = b.flat_qkv(il, x)?;
        let flat = qk_norm(b, il, flat);
        b.by_heads(il, flat)
    } else {
        b.qkv(il, x)?
    };
    if style.qk_norm == QkNorm::BeforeRope {
        qkv = qk_norm(b, il, qkv);
    }
    if rotates(b.hp, il, style) {
        let factors = b.rope_factors(il);
        qkv.q = b.g.rope(qkv.q, inputs.positions, factors);
        qkv.k = b.g.rope(qkv.k, inputs.positions, factors);
    }
    if style.qk_norm == QkNorm::AfterRope {
        qkv = qk_norm(b, il, qkv);
    }
    if style.scaled_queries {
        qkv.q = b.g.scale(qkv.q);
    }
    if let Some(temperature) = inputs.temperature {
        qkv.q = b.g.mul(qkv.q, temperature);
    }
    let sinks = b.find(il, "attn_sinks", "weight");
    b.attention(
        il,
        &inputs.attention,
        qkv,
        Extras {
            sinks,
            ..Extras::default()
        },
    )
}

/// Norms of queries and keys, if the layer has them.
fn qk_norm(b: &mut Build<'_>, il: usize, mut qkv: Qkv) -> Qkv {
    if b.has(il, "attn_q_norm", "weight") {
        qkv.q = b.norm(il, "attn_q_norm", qkv.q, Norm::Rms);
    }
    if b.has(il, "attn_k_norm", "weight") {
        qkv.k = b.norm(il, "attn_k_norm", qkv.k, Norm::Rms);
    }
    qkv
}

fn rotates(hp: &Hparams, il: usize, style: Style) -> bool {
    let skipped = style.no_rope_step > 0 && (il + 1).is_multiple_of(style.no_rope_step);
    let none = hp.arch() == "granite" && hp.keys.flag("rope.scaling.finetuned") == Some(false);
    !skipped && !none
}

/// The network of a layer: experts where there is a router, with the shared one where there is one.
fn network(b: &mut Build<'_>, il: usize, x: Id, style: Style) -> Result<Id, Error> {
    if !b.has(il, "ffn_gate_inp", "weight") {
        return match b.hp.arch() {
            "phi3" => b.ffn_halves(il, x, FFN, Glu::Swiglu),
            _ => b.ffn(il, x, FFN, style.activation),
        };
    }
    let scale = b.hp.keys.float("expert_weights_scale").unwrap_or(0.0);
    let experts = Experts {
        activation: style.activation,
        gating: style.gating,
        normalize: style.normalized_experts,
        scale: scale != 0.0 && scale != 1.0,
        weight_before: false,
    };
    let routed = b.experts(il, x, experts)?;
    if !b.has(il, SHARED_EXPERT.up, "weight") {
        return Ok(routed);
    }
    let mut shared = b.ffn(il, x, SHARED_EXPERT, Activation::Silu)?;
    if style.gated_shared_expert {
        let gate = gate(b, il, x)?;
        shared = b.g.mul(shared, gate);
    }
    Ok(b.g.add(routed, shared))
}

/// The sigmoid gate of a shared expert, made from SiLU and a division (Qwen 2).
fn gate(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let weight = b.weight(il, "ffn_gate_inp_shexp", "weight")?;
    let logit = b.g.mul_mat(weight, x);
    let silu = b.g.unary(Unary::Silu, logit);
    Ok(b.g.div(silu, logit))
}
