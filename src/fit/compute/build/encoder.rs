//! Encoders: attention over the batch itself, without a cache, and hidden states as output.

use super::{Activation, Build, Error, Experts, Extras, FFN, Gating, Norm, SelfInputs};
use crate::fit::compute::graph::{Glu, Id};

/// BERT and its relatives: norms behind the residual sums, and none before attention.
pub fn bert(b: &mut Build<'_>) -> Result<(), Error> {
    let arch = b.hp.arch();
    let positions = b.positions(1);
    let mut x = b.embeddings(false)?;
    if let Some(types) = b.find_global("token_types.weight") {
        let width = b.hp.n_embd;
        let first = b.g.view(types, &[width], &[], 0);
        x = b.g.add(x, first);
    }
    if arch == "bert" {
        let table = b.global("position_embd.weight")?;
        let learned = b.g.get_rows(table, positions);
        x = b.g.add(learned, x);
    }
    x = b.embedding_norm(x, Norm::Layer);
    let inputs = b.self_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut qkv = b.qkv(il, x)?;
        qkv = b.row_norms(il, qkv, Norm::Layer);
        if matches!(arch, "nomic-bert" | "nomic-bert-moe" | "jina-bert-v3") {
            qkv.q = b.g.rope(qkv.q, positions, None);
            qkv.k = b.g.rope(qkv.k, positions, None);
        }
        let attended = b.self_attend(il, &inputs, qkv, Extras::default())?;
        let mut cur = b.linear(il, "attn_output", attended)?;
        if il + 1 == layers {
            [cur, x] = [cur, x].map(|y| b.pick(y, rows));
        }
        cur = b.g.add(cur, x);
        cur = b.norm(il, "attn_output_norm", cur, Norm::Layer);
        if b.has(il, "attn_norm_2", "weight") {
            cur = b.g.add(cur, x);
            cur = b.norm(il, "attn_norm_2", cur, Norm::Layer);
        }
        let network = bert_network(b, il, cur)?;
        x = b.g.add(network, cur);
        x = b.norm(il, "layer_output_norm", x, Norm::Layer);
    }
    b.finish(x);
    Ok(())
}

fn bert_network(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    if b.has(il, "ffn_up_exps", "weight") {
        let experts = Experts {
            activation: Activation::Gelu,
            ..b.swiglu_experts(Gating::Softmax, false)
        };
        return b.experts(il, x, experts);
    }
    match b.hp.arch() {
        "nomic-bert" => b.ffn(il, x, FFN, Activation::Silu),
        "jina-bert-v2" if !b.has(il, FFN.gate, "weight") => {
            let up = b.weight(il, FFN.up, "weight")?;
            match b.g[up].ne[1] == b.hp.n_ff(0) {
                true => b.ffn(il, x, FFN, Activation::Gelu),
                false => b.ffn_halves(il, x, FFN, Glu::Geglu),
            }
        }
        _ => b.ffn(il, x, FFN, Activation::Gelu),
    }
}

/// What encoders with norms before attention and network differ in.
struct Style {
    norm: Norm,
    /// Norms of queries and keys, and norms behind attention and network (EmbeddingGemma).
    gemma: bool,
    /// The gate is the first half of the up matrix.
    halves: Option<Glu>,
    output_norm: &'static str,
}

/// Encoders with norms before attention and network.
pub fn pre_norm(b: &mut Build<'_>) -> Result<(), Error> {
    let rms = Style {
        norm: Norm::Rms,
        gemma: false,
        halves: None,
        output_norm: "output_norm",
    };
    let style = match b.hp.arch() {
        "gemma-embedding" => Style { gemma: true, ..rms },
        "modern-bert" => Style {
            norm: Norm::Layer,
            halves: Some(Glu::Geglu),
            ..rms
        },
        "neo-bert" => Style {
            halves: Some(Glu::Swiglu),
            output_norm: "enc.output_norm",
            ..rms
        },
        _ => rms,
    };
    let mut x = b.embeddings(style.gemma)?;
    if style.norm == Norm::Layer {
        x = b.embedding_norm(x, Norm::Layer);
    }
    let positions = b.positions(1);
    let inputs = b.self_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let has_norm = style.norm == Norm::Rms || b.has(il, "attn_norm", "weight");
        let normed = if has_norm {
            b.norm(il, "attn_norm", x, style.norm)
        } else {
            x
        };
        let mut cur = attention(b, il, normed, positions, &inputs, &style)?;
        if il + 1 == layers {
            [cur, x] = [cur, x].map(|y| b.pick(y, rows));
        }
        if style.gemma {
            cur = b.norm(il, "post_attention_norm", cur, Norm::Rms);
        }
        let middle = b.g.add(cur, x);
        let normed = b.norm(il, "ffn_norm", middle, style.norm);
        let mut cur = match style.halves {
            Some(glu) => b.ffn_halves(il, normed, FFN, glu)?,
            None if style.gemma => b.ffn(il, normed, FFN, Activation::Gelu)?,
            None => b.ffn(il, normed, FFN, Activation::Silu)?,
        };
        if style.gemma {
            cur = b.norm(il, "post_ffw_norm", cur, Norm::Rms);
        }
        x = b.g.add(cur, middle);
    }
    let weight = b.global(&format!("{}.weight", style.output_norm))?;
    let x = b.norm_with(x, Some(weight), None, style.norm, None);
    b.finish(x);
    Ok(())
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    positions: Id,
    inputs: &SelfInputs,
    style: &Style,
) -> Result<Id, Error> {
    let mut qkv = b.qkv(il, x)?;
    if style.gemma {
        qkv.q = b.norm(il, "attn_q_norm", qkv.q, Norm::Rms);
        qkv.k = b.norm(il, "attn_k_norm", qkv.k, Norm::Rms);
    }
    qkv.q = b.g.rope(qkv.q, positions, None);
    qkv.k = b.g.rope(qkv.k, positions, None);
    if style.gemma {
        qkv.q = b.g.scale(qkv.q);
    }
    let attended = b.self_attend(il, inputs, qkv, Extras::default())?;
    b.linear(il, "attn_output", attended)
}
