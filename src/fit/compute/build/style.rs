//! What the architectures of [`super::decoder`] have that their tensors do not tell.

use super::{Activation, Gating, Norm};
use crate::arch::Hparams;
use crate::fit::compute::graph::Unary;

/// How embeddings are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// As they are, or scaled as the key `embedding_scale` says.
    Plain,
    /// All scaled by a constant.
    Scaled,
    /// Those of tokens scaled by a constant.
    TokensScaled,
    /// Normed, without a weight.
    Normed,
}

/// How attention knows positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// Queries and keys are rotated, in the layers that [`Rotated`] says.
    Rotary(Rotated),
    /// A table of embeddings, if the model has it.
    Learned,
    /// Not from the graph: by slopes on the logits, or not at all.
    None,
}

/// Layers whose queries and keys are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotated {
    /// All.
    All,
    /// All but the last of so many.
    ButLastOf(usize),
    /// All but the first of so many.
    ButFirstOf(usize),
    /// Those with a window.
    Windows,
    /// Those that the key `attention.rope_pattern` names; all, if there is none.
    Listed,
}

/// Where norms of queries and keys stand, if the model has any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// On heads, before positions.
    BeforeRope,
    /// On heads, after positions.
    AfterRope,
    /// On heads, after positions, without a weight.
    Plain,
    /// On whole rows.
    Rows,
    /// On whole rows, after a split into heads.
    RejoinedRows,
}

/// What the network of a layer is, where it is not the usual one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Dense, or experts and a shared one beside them.
    Usual,
    /// Dense; the up matrix holds the gate too.
    Halves,
    /// Dense, with a norm before the last matrix.
    SubNormed,
    /// Experts that are chosen by what the layer reads.
    RoutedByInput,
    /// A dense network beside experts, scaled (Grok).
    DenseAndExperts,
    /// A dense network, then experts that read what the layer reads (Arctic).
    ExpertsOnInput,
}

/// Where the rows that are output are picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// Within the last layer.
    InLastLayer,
    /// Behind the last layer, whose result is an output.
    BeforeNorm,
    /// Behind the norm of the output, whose result is an output.
    AfterNorm,
}

/// How logits are treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Logits {
    /// Multiplied by a constant.
    pub scaled: bool,
    /// Then squashed.
    pub capped: bool,
}

/// What an architecture has that its tensors do not tell.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Embeddings.
    pub input: Input,
    /// The norms of the residual stream.
    pub norm: Norm,
    /// There are norms before attention and network.
    pub pre_norms: bool,
    /// The norm before the network.
    pub ffn_norm: &'static str,
    /// The norms behind attention and network, before the residual is added.
    pub post_norms: Option<[&'static str; 2]>,
    /// The norm behind attention is on all rows, in the last layer too.
    pub norms_all_rows: bool,
    /// Positions.
    pub positions: Positions,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Queries are scaled by a node of its own.
    pub scaled_queries: bool,
    /// Queries of layers without rotary positions are multiplied by factors by position.
    pub tempered: bool,
    /// The result of attention is multiplied by this function of the gate `attn_gate`.
    pub gate: Option<Unary>,
    /// The input is the first operand of the sum with attention.
    pub input_first: bool,
    /// The network.
    pub network: Network,
    /// Its activation.
    pub activation: Activation,
    /// How experts are chosen.
    pub gating: Gating,
    /// Weights of experts are divided by their sum.
    pub normalized_experts: bool,
    /// Weights of experts are never scaled.
    pub unscaled_experts: bool,
    /// The input of experts is weighted.
    pub weighted_input: bool,
    /// The shared expert has a gate.
    pub gated_shared_expert: bool,
    /// The network's result is the second operand of the residual sum.
    pub residual_first: bool,
    /// Output rows.
    pub pick: Pick,
    /// Logits.
    pub logits: Logits,
}

const ROTARY: Positions = Positions::Rotary(Rotated::All);
const GEMMA_NORMS: Option<[&str; 2]> = Some(["post_attention_norm", "post_ffw_norm"]);

const LLAMA: Style = Style {
    input: Input::Plain,
    norm: Norm::Rms,
    pre_norms: true,
    ffn_norm: "ffn_norm",
    post_norms: None,
    norms_all_rows: false,
    positions: ROTARY,
    qk_norm: QkNorm::BeforeRope,
    scaled_queries: false,
    tempered: false,
    gate: None,
    input_first: false,
    network: Network::Usual,
    activation: Activation::Silu,
    gating: Gating::Softmax,
    normalized_experts: true,
    unscaled_experts: false,
    weighted_input: false,
    gated_shared_expert: false,
    residual_first: false,
    pick: Pick::InLastLayer,
    logits: Logits {
        scaled: false,
        capped: false,
    },
};

const GEMMA: Style = Style {
    input: Input::Scaled,
    scaled_queries: true,
    activation: Activation::Gelu,
    ..LLAMA
};

/// Layer norms and GELU: GPT-2 and its relatives.
const GPT: Style = Style {
    norm: Norm::Layer,
    activation: Activation::Gelu,
    ..LLAMA
};

const SCALED: Logits = Logits {
    scaled: true,
    capped: false,
};

/// The style of a model's architecture, if it is of this family.
pub fn style(hp: &Hparams) -> Option<Style> {
    mixture(hp).or_else(|| dense(hp))
}

fn is_capped(hp: &Hparams) -> bool {
    hp.keys.float("final_logit_softcapping").unwrap_or(0.0) != 0.0
}

/// Rotary positions in layers with a window only; in all, if there is no window.
fn in_windows(hp: &Hparams) -> Positions {
    Positions::Rotary(match hp.window {
        Some(_) => Rotated::Windows,
        None => Rotated::All,
    })
}

fn dense(hp: &Hparams) -> Option<Style> {
    Some(match hp.arch() {
        "llama" | "llama-embed" | "mistral3" | "qwen" | "qwen2" | "qwen2vl" | "qwen3"
        | "qwen3vl" | "internlm2" | "ernie4_5" | "paddleocr" | "xverse" | "exaone"
        | "pangu-embedded" | "deci" | "dream" | "llada" | "nanbeige" => LLAMA,
        "apertus" => Style {
            activation: Activation::Xielu,
            ..LLAMA
        },
        "arcee" => Style {
            activation: Activation::ReluSqr,
            ..LLAMA
        },
        "baichuan" if hp.n_layer() == 32 => LLAMA,
        "baichuan" | "refact" => Style {
            positions: Positions::None,
            ..LLAMA
        },
        "bitnet" => Style {
            network: Network::SubNormed,
            ..LLAMA
        },
        "bloom" => Style {
            positions: Positions::None,
            ..GPT
        },
        "chatglm" => Style {
            network: Network::Halves,
            ..LLAMA
        },
        "codeshell" | "gptneox" | "pockettts" | "starcoder2" => GPT,
        "exaone4" => Style {
            pre_norms: false,
            post_norms: GEMMA_NORMS,
            positions: in_windows(hp),
            ..LLAMA
        },
        "gemma" => GEMMA,
        "gemma2" => Style {
            post_norms: GEMMA_NORMS,
            logits: Logits {
                scaled: false,
                capped: true,
            },
            ..GEMMA
        },
        "gemma3" => Style {
            input: Input::TokensScaled,
            post_norms: GEMMA_NORMS,
            logits: Logits {
                scaled: false,
                capped: is_capped(hp),
            },
            ..GEMMA
        },
        "glm4" => Style {
            post_norms: GEMMA_NORMS,
            network: Network::Halves,
            ..LLAMA
        },
        "gpt2" | "mpt" | "starcoder" => Style {
            positions: Positions::Learned,
            qk_norm: QkNorm::RejoinedRows,
            ..GPT
        },
        "granite" | "granite_swa" | "granitemoe" | "minicpm" => {
            let none =
                hp.arch() == "granite" && hp.keys.flag("rope.scaling.finetuned") == Some(false);
            Style {
                positions: if none {
                    Positions::None
                } else {
                    Positions::Rotary(Rotated::Listed)
                },
                logits: SCALED,
                ..LLAMA
            }
        }
        "hunyuan-dense" | "hunyuan_vl" | "maincoder" => Style {
            qk_norm: QkNorm::AfterRope,
            ..LLAMA
        },
        "jais" => Style {
            positions: Positions::None,
            activation: Activation::Silu,
            ..GPT
        },
        "jais2" | "nemotron" => Style {
            activation: Activation::ReluSqr,
            ..GPT
        },
        "muse-glimmer" => Style {
            input: Input::Normed,
            post_norms: GEMMA_NORMS,
            norms_all_rows: true,
            positions: in_windows(hp),
            gate: Some(Unary::Sigmoid),
            logits: Logits {
                scaled: true,
                capped: is_capped(hp),
            },
            ..LLAMA
        },
        "olmo" | "orion" | "stablelm" => Style {
            norm: Norm::Layer,
            ..LLAMA
        },
        "olmo2" => Style {
            pre_norms: false,
            post_norms: GEMMA_NORMS,
            qk_norm: QkNorm::Rows,
            ..LLAMA
        },
        "openelm" => Style {
            input_first: true,
            ..LLAMA
        },
        "phi3" => Style {
            network: Network::Halves,
            scaled_queries: true,
            residual_first: true,
            ..LLAMA
        },
        "plamo3" => Style {
            post_norms: GEMMA_NORMS,
            network: Network::Halves,
            ..LLAMA
        },
        "seed_oss" => Style {
            ffn_norm: "post_attention_norm",
            ..LLAMA
        },
        "smollm3" => Style {
            positions: Positions::Rotary(Rotated::ButLastOf(4)),
            ..LLAMA
        },
        "spark2_5" => Style {
            gate: Some(Unary::Sigmoid),
            activation: Activation::Gelu,
            ..LLAMA
        },
        _ => return None,
    })
}

fn mixture(hp: &Hparams) -> Option<Style> {
    let gating = |default: Gating| {
        let raw = hp.keys.opt("expert_gating_func").ok().flatten();
        raw.and_then(Gating::from_raw).unwrap_or(default)
    };
    let normalized = || hp.keys.flag("expert_weights_norm").unwrap_or(false);
    // Routers with a sigmoid, unless the header says otherwise.
    let sigmoid = || Style {
        gating: gating(Gating::Sigmoid),
        normalized_experts: normalized(),
        ..LLAMA
    };
    Some(match hp.arch() {
        "ernie4_5-moe" | "mellum" | "qwen3moe" | "qwen3vlmoe" | "rnd1" => LLAMA,
        "afmoe" => Style {
            input: Input::Scaled,
            post_norms: GEMMA_NORMS,
            norms_all_rows: true,
            positions: Positions::Rotary(Rotated::ButLastOf(4)),
            gate: Some(Unary::Sigmoid),
            ..sigmoid()
        },
        "arctic" => Style {
            network: Network::ExpertsOnInput,
            ..LLAMA
        },
        "bailingmoe" => Style {
            normalized_experts: normalized(),
            ..LLAMA
        },
        "bailingmoe2" | "deepseek2-ocr" | "dots1" => Style {
            gating: gating(Gating::Softmax),
            normalized_experts: normalized(),
            ..LLAMA
        },
        "dbrx" => Style {
            norm: Norm::Layer,
            ffn_norm: "attn_output_norm",
            ..LLAMA
        },
        "deepseek" | "llada-moe" => Style {
            normalized_experts: false,
            ..LLAMA
        },
        "exaone-moe" => Style {
            positions: in_windows(hp),
            ..sigmoid()
        },
        "glm4moe" => Style {
            ffn_norm: "post_attention_norm",
            ..sigmoid()
        },
        "gpt-oss" => Style {
            ffn_norm: "post_attention_norm",
            activation: Activation::SwigluOai,
            gating: Gating::SoftmaxOfSelected,
            normalized_experts: false,
            pick: Pick::BeforeNorm,
            ..LLAMA
        },
        "grok" => Style {
            post_norms: Some(["attn_output_norm", "layer_output_norm"]),
            network: Network::DenseAndExperts,
            activation: Activation::Gelu,
            logits: Logits {
                scaled: true,
                capped: is_capped(hp),
            },
            ..LLAMA
        },
        "hunyuan-moe" => Style {
            qk_norm: QkNorm::AfterRope,
            ..LLAMA
        },
        "hy_v3" => Style {
            pick: Pick::AfterNorm,
            ..sigmoid()
        },
        "laguna" => Style {
            gate: Some(Unary::Softplus),
            ..sigmoid()
        },
        "llama4" => {
            let step = if hp.window.is_some() { 4 } else { hp.n_layer() };
            Style {
                positions: Positions::Rotary(Rotated::ButLastOf(step)),
                qk_norm: if hp.n_expert == 128 {
                    QkNorm::BeforeRope
                } else {
                    QkNorm::Plain
                },
                tempered: true,
                gating: Gating::Sigmoid,
                normalized_experts: false,
                weighted_input: true,
                ..LLAMA
            }
        }
        "maple" => Style {
            positions: in_windows(hp),
            unscaled_experts: true,
            ..LLAMA
        },
        "mimo2" => Style {
            gating: Gating::Sigmoid,
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
        "phimoe" => Style {
            scaled_queries: true,
            residual_first: true,
            ..LLAMA
        },
        "qwen2moe" => Style {
            normalized_experts: false,
            gated_shared_expert: true,
            ..LLAMA
        },
        "smallthinker" => Style {
            positions: Positions::Rotary(match hp.window {
                Some(_) => Rotated::ButFirstOf(4),
                None => Rotated::All,
            }),
            network: Network::RoutedByInput,
            activation: Activation::Relu,
            gating: gating(Gating::Softmax),
            ..LLAMA
        },
        "step35" => Style {
            gate: Some(Unary::Sigmoid),
            pick: Pick::BeforeNorm,
            ..sigmoid()
        },
        _ => return None,
    })
}
