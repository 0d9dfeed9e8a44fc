//! Transformers with one attention and one feed-forward network per layer, one after the other: LLaMA, GPT and their relatives,
//! with or without experts and sliding windows.

use super::deepstack::Deepstack;
use super::style::{Input, Network, Pick, Positions, QkNorm, Rotated, Style, style};
use super::{Activation, Build, Error, Experts, Extras, FFN, Norm, Qkv, SHARED_EXPERT, SelfInputs};
use crate::fit::compute::graph::{F32, Glu, Id, Unary};

/// Inputs that all layers share.
struct Inputs {
    positions: Id,
    /// Factors by position that queries are multiplied with.
    temperature: Option<Id>,
    attention: SelfInputs,
    /// Layers whose queries and keys are rotated.
    rotated: Vec<bool>,
}

/// A layer's states: what it reads, what its network reads before the norm, and the logits of a router that reads the former.
#[derive(Clone, Copy)]
struct Stream {
    input: Id,
    middle: Id,
    router_logits: Option<Id>,
}

/// Builds the graph.
pub fn build(b: &mut Build<'_>) -> Result<(), Error> {
    let style = style(b.hp).ok_or_else(|| Error::Unknown(b.hp.arch().to_owned()))?;
    let mut x = embeddings(b, &style)?;
    let embedded = b.input_embeddings.unwrap_or(x);
    let inputs = inputs(b, &style)?;
    if style.positions == Positions::Learned
        && let Some(table) = b.find_global("position_embd.weight")
    {
        let learned = b.g.get_rows(table, inputs.positions);
        x = b.g.add(x, learned);
    }
    let deepstack = Deepstack::of(b)?;
    let residual_scale = is_scaled(b, "residual_scale");
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        x = deepstack.before(b, il, x, embedded);
        let picks = il + 1 == layers && style.pick == Pick::InLastLayer;
        let Some(next) = layer(
            b,
            il,
            x,
            &inputs,
            &style,
            picks.then_some(rows),
            residual_scale,
        )?
        else {
            continue;
        };
        x = deepstack.after(b, il, next, embedded);
        x = between_loops(b, il, x);
    }
    finish(b, x, rows, &style)
}

fn is_scaled(b: &Build<'_>, key: &str) -> bool {
    let default = if b.hp.arch() == "minicpm" { 1.0 } else { 0.0 };
    b.hp.keys.float(key).unwrap_or(default) != 0.0
}

fn embeddings(b: &mut Build<'_>, style: &Style) -> Result<Id, Error> {
    let x = b.embeddings(style.input == Input::TokensScaled)?;
    let x = match style.input {
        Input::Scaled => b.g.scale(x),
        Input::Normed => b.g.rms_norm(x),
        Input::Plain | Input::TokensScaled => x,
    };
    Ok(match b.find_global("token_embd_norm.weight") {
        Some(_) => b.embedding_norm(x, style.norm),
        None => x,
    })
}

fn inputs(b: &mut Build<'_>, style: &Style) -> Result<Inputs, Error> {
    let tempered =
        style.tempered || is_scaled(b, "attention.temperature_scale") && b.hp.arch() == "mistral3";
    let (tokens, layers) = (b.batch.tokens, b.hp.n_layer());
    let rule = match style.positions {
        Positions::Rotary(rule) => Some(rule),
        Positions::Learned | Positions::None => None,
    };
    let listed = b.hp.keys.per_layer("attention.rope_pattern", layers)?;
    let rotated = |il: usize| match rule {
        None => false,
        Some(Rotated::All) => true,
        Some(Rotated::ButLastOf(n)) => !(il + 1).is_multiple_of(n),
        Some(Rotated::ButFirstOf(n)) => !il.is_multiple_of(n),
        Some(Rotated::Windows) => b.hp.is_swa(il),
        Some(Rotated::Listed) => listed.as_ref().is_none_or(|list| list.get(il) != Some(&0)),
    };
    let rotated = (0..layers).map(rotated).collect();
    Ok(Inputs {
        positions: b.positions(positions_per_token(b)),
        temperature: tempered.then(|| b.g.input(F32, &[1, 1, tokens])),
        attention: b.self_inputs(),
        rotated,
    })
}

/// Positions of a token: with sections of the rotation one for each of time, height, width and one more (`n_pos_per_embd`).
fn positions_per_token(b: &Build<'_>) -> u64 {
    let sections = match b.hp.arch() {
        "qwen2vl" | "qwen3vl" | "qwen3vlmoe" | "paddleocr" => true,
        "glm4" | "glm4moe" | "hunyuan_vl" => {
            let sections = b.hp.keys.ints("rope.dimension_sections");
            sections.is_some_and(|s| s.len() > 1 && s[..2].iter().all(|&n| n > 0))
        }
        _ => false,
    };
    if sections { 4 } else { 1 }
}

/// A layer; nothing for one without network, whose result llama.cpp drops.
fn layer(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    inputs: &Inputs,
    style: &Style,
    rows: Option<Id>,
    residual_scale: bool,
) -> Result<Option<Id>, Error> {
    let mut residual = x;
    let mut router_logits = match style.network {
        Network::RoutedByInput => {
            let router = b.weight(il, "ffn_gate_inp", "weight")?;
            Some(b.g.mul_mat(router, x))
        }
        _ => None,
    };
    let normed = if style.pre_norms && b.hp.n_head(il) > 0 {
        b.norm(il, "attn_norm", x, style.norm)
    } else {
        x
    };
    let attended = match (b.hp.n_head(il), b.hp.n_head_kv(il)) {
        (0, _) => None,
        (_, 0) => Some(b.linear(il, "attn_output", normed)?),
        _ => Some(attention(b, il, normed, inputs, style)?),
    };
    let post_norm = |b: &mut Build<'_>, y: Id, which: usize| match style.post_norms {
        Some(names) => post_norm(b, il, names[which], y, style),
        None => y,
    };
    let mut cur = attended.unwrap_or(x);
    if style.norms_all_rows {
        cur = post_norm(b, cur, 0);
    }
    if let Some(rows) = rows {
        cur = b.pick(cur, rows);
        residual = b.pick(residual, rows);
        router_logits = router_logits.map(|logits| b.pick(logits, rows));
    }
    if !b.has(il, FFN.up, "weight") && !b.has(il, "ffn_gate_inp", "weight") {
        return Ok(None);
    }
    if !style.norms_all_rows {
        cur = post_norm(b, cur, 0);
    }
    if residual_scale {
        cur = b.g.scale(cur);
    }
    let middle = match attended {
        None => cur,
        Some(_) if style.input_first => b.g.add(residual, cur),
        Some(_) => b.g.add(cur, residual),
    };
    let normed = ffn_norm(b, il, middle, normed, rows, style);
    let stream = Stream {
        input: residual,
        middle,
        router_logits,
    };
    let mut cur = network(b, il, normed, stream, style)?;
    cur = post_norm(b, cur, 1);
    if residual_scale {
        cur = b.g.scale(cur);
    }
    Ok(Some(match style.network {
        Network::ExpertsOnInput => cur,
        _ if style.residual_first => b.g.add(middle, cur),
        _ => b.g.add(cur, middle),
    }))
}

/// A norm behind attention or network. Older files of Grok name the second one otherwise.
fn post_norm(b: &mut Build<'_>, il: usize, name: &'static str, x: Id, style: &Style) -> Id {
    let name = if b.has(il, name, "weight") {
        name
    } else {
        "post_ffw_norm"
    };
    b.norm(il, name, x, style.norm)
}

/// What the network reads; StableLM without a norm of its own reads what attention reads.
fn ffn_norm(
    b: &mut Build<'_>,
    il: usize,
    middle: Id,
    attention_in: Id,
    rows: Option<Id>,
    style: &Style,
) -> Id {
    if !style.pre_norms {
        return middle;
    }
    if b.hp.arch() == "stablelm" && !b.has(il, style.ffn_norm, "weight") {
        return rows.map_or(attention_in, |rows| b.pick(attention_in, rows));
    }
    b.norm(il, style.ffn_norm, middle, style.norm)
}

fn attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    inputs: &Inputs,
    style: &Style,
) -> Result<Id, Error> {
    let mut qkv = if style.qk_norm == QkNorm::Rows {
        let flat = b.flat_qkv(il, x)?;
        let flat = qk_norm(b, il, flat, style);
        b.by_heads(il, flat)
    } else {
        b.qkv(il, x)?
    };
    match style.qk_norm {
        QkNorm::BeforeRope => qkv = qk_norm(b, il, qkv, style),
        QkNorm::RejoinedRows if b.has(il, "attn_q_norm", "weight") => {
            qkv = b.row_norms(il, qkv, style.norm);
        }
        _ => {}
    }
    let rotated = inputs.rotated[il];
    if rotated {
        let factors = b.rope_factors(il);
        qkv.q = b.g.rope(qkv.q, inputs.positions, factors);
        qkv.k = b.g.rope(qkv.k, inputs.positions, factors);
    }
    match style.qk_norm {
        QkNorm::AfterRope => qkv = qk_norm(b, il, qkv, style),
        QkNorm::Plain if rotated => {
            qkv.q = b.g.rms_norm(qkv.q);
            qkv.k = b.g.rms_norm(qkv.k);
        }
        _ => {}
    }
    if style.scaled_queries {
        qkv.q = b.g.scale(qkv.q);
    }
    if let Some(temperature) = inputs.temperature
        && !(style.tempered && rotated)
    {
        qkv.q = b.g.mul(qkv.q, temperature);
    }
    let sinks = b.find(il, "attn_sinks", "weight");
    let extras = Extras {
        sinks,
        ..Extras::default()
    };
    let mut cur = b.self_attend(il, &inputs.attention, qkv, extras)?;
    if let Some(function) = style.gate {
        cur = gated(b, il, cur, x, function)?;
    }
    if b.has(il, "attn_sub_norm", "weight") {
        cur = b.norm(il, "attn_sub_norm", cur, style.norm);
    }
    cur = b.linear(il, "attn_output", cur)?;
    let values = b.hp.keys.float("attention.value_scale").unwrap_or(1.0);
    Ok(if values == 1.0 || b.hp.arch() != "mimo2" {
        cur
    } else {
        b.g.scale(cur)
    })
}

/// The result of attention times a gate that is made from its input: for each value, or for each head.
fn gated(b: &mut Build<'_>, il: usize, cur: Id, x: Id, function: Unary) -> Result<Id, Error> {
    let Some(weight) = b.find(il, "attn_gate", "weight") else {
        return Ok(cur);
    };
    let gate = b.g.mul_mat(weight, x);
    let gate = b.g.unary(function, gate);
    let (heads, [width, n, ..]) = (b.hp.n_head(il), b.g[cur].ne);
    if b.g[gate].ne[0] != heads {
        return Ok(b.g.mul(cur, gate));
    }
    let by_head = b.g.reshape(cur, &[width / heads, heads, n]);
    let gate = b.g.reshape(gate, &[1, heads, n]);
    let gated = b.g.mul(by_head, gate);
    Ok(b.g.reshape(gated, &[width, n]))
}

/// Norms of queries and keys, if the layer has them.
fn qk_norm(b: &mut Build<'_>, il: usize, mut qkv: Qkv, style: &Style) -> Qkv {
    if b.has(il, "attn_q_norm", "weight") {
        qkv.q = b.norm(il, "attn_q_norm", qkv.q, style.norm);
    }
    if b.has(il, "attn_k_norm", "weight") {
        qkv.k = b.norm(il, "attn_k_norm", qkv.k, style.norm);
    }
    qkv
}

/// The network of a layer: experts where there is a router, with the shared one where there is one.
fn network(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    stream: Stream,
    style: &Style,
) -> Result<Id, Error> {
    match style.network {
        Network::Halves => return b.ffn_halves(il, x, FFN, Glu::Swiglu),
        Network::SubNormed => return sub_normed(b, il, x, style),
        _ if !b.has(il, "ffn_gate_inp", "weight") => return dense(b, il, x, style),
        _ => {}
    }
    let activation = match style.activation {
        Activation::Silu => match b.silu(il, "swiglu_clamp_exp") {
            Activation::BoundedSilu if b.hp.arch() == "maple" => Activation::SwigluClamp,
            silu => silu,
        },
        other => other,
    };
    let mut experts = Experts {
        activation,
        weight_before: style.weighted_input,
        ..b.swiglu_experts(style.gating, style.normalized_experts)
    };
    experts.scale &= !style.unscaled_experts;
    if let Some(logits) = stream.router_logits {
        return b.routed_experts(il, x, logits, experts);
    }
    match style.network {
        Network::DenseAndExperts => {
            let routed = b.experts(il, x, experts)?;
            if !b.has(il, FFN.up, "weight") {
                return Ok(routed);
            }
            let dense = b.ffn(il, x, FFN, style.activation)?;
            let sum = b.g.add(dense, routed);
            return Ok(b.g.scale(sum));
        }
        Network::ExpertsOnInput => {
            let dense = b.ffn(il, x, FFN, style.activation)?;
            let sum = b.g.add(dense, stream.middle);
            let normed = b.norm(il, "ffn_norm_exps", stream.input, style.norm);
            let routed = b.experts(il, normed, experts)?;
            return Ok(b.g.add(routed, sum));
        }
        _ => {}
    }
    let routed = b.experts(il, x, experts)?;
    if !b.has(il, SHARED_EXPERT.up, "weight") {
        return Ok(routed);
    }
    let mut shared = if b.has(il, SHARED_EXPERT.gate, "weight") {
        b.ffn(il, x, SHARED_EXPERT, b.silu(il, "swiglu_clamp_shexp"))?
    } else {
        b.ffn_halves(il, x, SHARED_EXPERT, Glu::Swiglu)?
    };
    if style.gated_shared_expert {
        let gate = shared_gate(b, il, x)?;
        shared = b.g.mul(shared, gate);
    }
    Ok(b.g.add(routed, shared))
}

fn dense(b: &mut Build<'_>, il: usize, x: Id, style: &Style) -> Result<Id, Error> {
    let activation = match style.activation {
        Activation::Silu => b.silu(il, "swiglu_clamp_shexp"),
        other => other,
    };
    // MPT may divide what is behind the activation.
    let Some(divisor) = b.find(il, "ffn", "act.scales") else {
        return b.ffn(il, x, FFN, activation);
    };
    let up = b.ffn_linear(il, FFN.up, x)?;
    let hidden = b.activate(activation, up);
    let hidden = b.g.div(hidden, divisor);
    b.ffn_linear(il, FFN.down, hidden)
}

/// A gated network with a norm before its last matrix (BitNet).
fn sub_normed(b: &mut Build<'_>, il: usize, x: Id, style: &Style) -> Result<Id, Error> {
    let up = b.ffn_linear(il, FFN.up, x)?;
    let gate = b.ffn_linear(il, FFN.gate, x)?;
    let hidden = b.g.glu(Glu::Swiglu, gate, up);
    let normed = b.norm(il, "ffn_sub_norm", hidden, style.norm);
    b.ffn_linear(il, FFN.down, normed)
}

/// The sigmoid gate of a shared expert, made from SiLU and a division (Qwen 2).
fn shared_gate(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    let weight = b.weight(il, "ffn_gate_inp_shexp", "weight")?;
    let logit = b.g.mul_mat(weight, x);
    let silu = b.g.unary(Unary::Silu, logit);
    Ok(b.g.div(silu, logit))
}

/// Nanbeige runs its layers several times, with a norm in between.
fn between_loops(b: &mut Build<'_>, il: usize, x: Id) -> Id {
    let end = (il + 1).is_multiple_of(b.blocks_in_file) && il + 1 < b.hp.n_layer();
    if !end || b.hp.keys.flag("skip_loop_final_norm") == Some(true) {
        return x;
    }
    let weight = b.find_global("output_norm.weight");
    b.norm_with(x, weight, None, Norm::Rms, Some(il))
}

fn finish(b: &mut Build<'_>, mut x: Id, rows: Id, style: &Style) -> Result<(), Error> {
    if style.pick == Pick::BeforeNorm {
        b.g[x].output = true;
        x = b.pick(x, rows);
    }
    let mut normed = b.output_norm(x, style.norm);
    if style.pick == Pick::AfterNorm {
        b.g[normed].output = true;
        normed = b.pick(normed, rows);
    }
    let mut logits = b.logits(normed)?;
    if style.logits.scaled {
        logits = b.g.scale(logits);
    }
    if style.logits.capped {
        logits = b.soft_cap(logits);
    }
    if let Some(bias) = b.find_global("output.bias") {
        logits = b.g.add(logits, bias);
    }
    b.finish(logits);
    Ok(())
}
