//! Linear attention by the gated delta rule, alternating with gated softmax attention (`delta-net-base.cpp`, `qwen3next.cpp`,
//! `qwen35.cpp`).

use super::state::StateInputs;
use super::{
    Activation, AttentionInputs, Build, Error, Extras, FFN, Gating, Norm, Qkv, SHARED_EXPERT,
};
use crate::fit::compute::graph::{Id, Unary};

/// How the two generations of models differ.
#[derive(Debug, Clone, Copy)]
struct Style {
    /// Numbers that say where a token is: four with M-RoPE.
    positions: u64,
    /// One matrix for the step size and the decay, interleaved by heads; query heads are repeated to as many as value heads.
    interleaved: bool,
}

/// The graph of `qwen3next`.
pub fn qwen3_next(b: &mut Build<'_>) -> Result<(), Error> {
    build(
        b,
        Style {
            positions: 1,
            interleaved: true,
        },
    )
}

/// The graph of `qwen35` and `qwen35moe`.
pub fn qwen3_5(b: &mut Build<'_>) -> Result<(), Error> {
    build(
        b,
        Style {
            positions: 4,
            interleaved: false,
        },
    )
}

fn build(b: &mut Build<'_>, style: Style) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.attention_inputs();
    let pos = b.positions(style.positions);
    let rows = b.output_rows();
    for il in 0..b.hp.n_layer() {
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        b.g.expand(cur);
        let cur = if b.hp.is_recurrent(il) {
            linear_attention(b, il, states, cur, style)?
        } else {
            gated_attention(b, il, &inputs, cur, pos)?
        };
        let residual = b.g.add(cur, x);
        let cur = b.norm(il, "post_attention_norm", residual, Norm::Rms);
        let cur = feed_forward(b, il, cur)?;
        x = b.g.add(cur, residual);
    }
    b.hidden_and_logits(x, rows)
}

/// Routed experts with a gated shared one, or a dense network.
fn feed_forward(b: &mut Build<'_>, il: usize, x: Id) -> Result<Id, Error> {
    if !b.has(il, "ffn_gate_inp", "weight") {
        return b.ffn(il, x, FFN, Activation::Silu);
    }
    let experts = b.swiglu_experts(Gating::Softmax, true);
    let routed = b.experts(il, x, experts)?;
    if !b.has(il, "ffn_up_shexp", "weight") {
        return Ok(routed);
    }
    let shared = b.ffn(il, x, SHARED_EXPERT, Activation::Silu)?;
    let gate = b.linear(il, "ffn_gate_inp_shexp", x)?;
    let gate = b.g.unary(Unary::Sigmoid, gate);
    let shared = b.g.mul(shared, gate);
    Ok(b.g.add(routed, shared))
}

/// Softmax attention whose output is gated; the query matrix gives each head's query and its gate side by side.
fn gated_attention(
    b: &mut Build<'_>,
    il: usize,
    inputs: &AttentionInputs,
    x: Id,
    pos: Id,
) -> Result<Id, Error> {
    let (n, heads, heads_kv, width) = (
        b.batch.tokens,
        b.hp.n_head(il),
        b.hp.n_head_kv(il),
        b.hp.head_k(il),
    );
    let Qkv { q, k, v } = b.flat_parts(
        il,
        x,
        [2 * width * heads, width * heads_kv, width * heads_kv],
    )?;
    let q = b.g.reshape(q, &[2 * width, heads, n]);
    let nb = b.g[q].nb;
    let gate = b.g.view(q, &[width, heads, n], &nb[1..3], width * nb[0]);
    let q = b.g.view(q, &[width, heads, n], &nb[1..3], 0);
    let q = b.norm(il, "attn_q_norm", q, Norm::Rms);
    let k = b.g.reshape(k, &[width, heads_kv, n]);
    let k = b.norm(il, "attn_k_norm", k, Norm::Rms);
    let v = b.g.reshape(v, &[width, heads_kv, n]);
    let q = b.g.rope(q, pos, None);
    let k = b.g.rope(k, pos, None);
    let attention = b.attend(il, inputs, Qkv { q, k, v }, Extras::default())?;
    let gate = b.g.cont_as(gate, &[width * heads, n]);
    let gate = b.g.unary(Unary::Sigmoid, gate);
    let gated = b.g.mul(attention, gate);
    b.linear(il, "attn_output", gated)
}

/// The inputs of the delta rule, per head and token.
struct Rule {
    /// Queries, keys and values before the convolution, and what gates the output.
    mixed: Id,
    gate: Id,
    /// Step size.
    beta: Id,
    /// Decay.
    alpha: Id,
}

fn linear_attention(
    b: &mut Build<'_>,
    il: usize,
    states: StateInputs,
    x: Id,
    style: Style,
) -> Result<Id, Error> {
    let ssm = b.hp.ssm;
    let (k_heads, v_heads, k_width) = (ssm.n_group, ssm.dt_rank, ssm.d_state);
    let v_width = ssm.d_inner.checked_div(v_heads).unwrap_or(0);
    let (tokens, n) = (b.tokens_per_sequence(), b.batch.sequences);
    let rule = if style.interleaved {
        interleaved(b, il, x)?
    } else {
        separate(b, il, x)?
    };
    let bias = b.weight(il, "ssm_dt", "bias")?;
    let alpha = b.g.add(rule.alpha, bias);
    let alpha = b.g.unary(Unary::Softplus, alpha);
    let a = b.bare(il, "ssm_a")?;
    let decay = b.g.mul(alpha, a);
    let beta = b.g.reshape(rule.beta, &[1, v_heads, tokens, n]);
    let decay = b.g.reshape(decay, &[1, v_heads, tokens, n]);

    let caches = b.state_caches(il)?;
    let input = b.conv_input(states, caches.shift, rule.mixed);
    let state = b.load_state(states, caches.state);
    let state = b.g.reshape(state, &[v_width, v_width, v_heads, n]);
    let kernel = b.weight(il, "ssm_conv1d", "weight")?;
    let conv = b.g.ssm_conv(input, kernel);
    let conv = b.g.unary(Unary::Silu, conv);
    let (row, keys) = (
        4 * (2 * k_width * k_heads + v_width * v_heads),
        4 * k_width * k_heads,
    );
    let mut part = |width: u64, heads: u64, offset: u64| {
        b.g.view(
            conv,
            &[width, heads, tokens, n],
            &[4 * width, row, row * tokens],
            offset,
        )
    };
    let q = part(k_width, k_heads, 0);
    let k = part(k_width, k_heads, keys);
    let v = part(v_width, v_heads, 2 * keys);
    let mut qk = [q, k].map(|x| b.unit_norm(x));
    if style.interleaved && k_heads != v_heads {
        qk = qk.map(|x| {
            let x = b.g.reshape(x, &[k_width, 1, k_heads, tokens * n]);
            let x =
                b.g.repeat(x, &[k_width, v_heads / k_heads.max(1), k_heads, tokens * n]);
            b.g.reshape(x, &[k_width, v_heads, tokens, n])
        });
    }
    let [q, k] = qk;
    let y = b.delta_rule([q, k, v, decay, beta, state], caches.state);
    let gate = b.g.reshape(rule.gate, &[v_width, v_heads, tokens, n]);
    let y = b.norm(il, "ssm_norm", y, Norm::Rms);
    let gate = b.g.unary(Unary::Silu, gate);
    let y = b.g.mul(y, gate);
    let y = b.g.reshape(y, &[v_width * v_heads, tokens, n]);
    let y = b.linear(il, "ssm_out", y)?;
    let width = b.g[y].ne[0];
    Ok(b.g.reshape(y, &[width, tokens * n]))
}

/// Matrices of their own for step size and decay (Qwen 3.5).
fn separate(b: &mut Build<'_>, il: usize, x: Id) -> Result<Rule, Error> {
    let (tokens, n, heads) = (b.tokens_per_sequence(), b.batch.sequences, b.hp.ssm.dt_rank);
    let mixed = b.linear(il, "attn_qkv", x)?;
    let mixed = b.by_sequence(mixed);
    let gate = b.linear(il, "attn_gate", x)?;
    let beta = b.linear(il, "ssm_beta", x)?;
    let beta = b.g.reshape(beta, &[1, heads, tokens, n]);
    let beta = b.g.unary(Unary::Sigmoid, beta);
    let alpha = b.linear(il, "ssm_alpha", x)?;
    let alpha = b.g.reshape(alpha, &[heads, tokens, n]);
    Ok(Rule {
        mixed,
        gate,
        beta,
        alpha,
    })
}

/// One matrix for step size and decay, and in older files one for all else, both by key heads (Qwen3-Next).
fn interleaved(b: &mut Build<'_>, il: usize, x: Id) -> Result<Rule, Error> {
    let ssm = b.hp.ssm;
    let (k_heads, k_width, tokens, n) = (
        ssm.n_group,
        ssm.d_state,
        b.tokens_per_sequence(),
        b.batch.sequences,
    );
    let per_key = ssm.dt_rank.checked_div(k_heads).unwrap_or(0);
    let values = ssm.d_inner.checked_div(k_heads).unwrap_or(0);
    let (mixed, gate) = if b.has(il, "attn_qkv", "weight") {
        let mixed = b.linear(il, "attn_qkv", x)?;
        (b.by_sequence(mixed), b.linear(il, "attn_gate", x)?)
    } else {
        let all = b.linear(il, "ssm_in", x)?;
        let all =
            b.g.reshape(all, &[2 * (k_width + values), k_heads, tokens, n]);
        let nb = b.g[all].nb;
        let mut offset = 0;
        let [q, k, v, gate] = [k_width, k_width, values, values].map(|width| {
            let view =
                b.g.view(all, &[width, k_heads, tokens, n], &nb[1..], offset * nb[0]);
            offset += width;
            view
        });
        let gate = b.g.cont(gate);
        let [q, k, v] = [q, k, v].map(|x| {
            let width = b.g[x].ne[0] * k_heads;
            b.g.cont_as(x, &[width, tokens, n])
        });
        let qk = b.g.concat(q, k, 0);
        (b.g.concat(qk, v, 0), gate)
    };
    let both = b.linear(il, "ssm_ba", x)?;
    let both = b.g.reshape(both, &[2 * per_key, k_heads, tokens, n]);
    let nb = b.g[both].nb;
    let beta = b.g.view(both, &[per_key, k_heads, tokens, n], &nb[1..], 0);
    let alpha = b.g.view(
        both,
        &[per_key, k_heads, tokens, n],
        &nb[1..],
        per_key * nb[0],
    );
    let beta = b.g.cont(beta);
    let beta = b.g.unary(Unary::Sigmoid, beta);
    let alpha = b.g.cont_as(alpha, &[per_key * k_heads, tokens, n]);
    Ok(Rule {
        mixed,
        gate,
        beta,
        alpha,
    })
}

impl Build<'_> {
    /// Vectors of length one (`build_gdn_l2_norm`).
    pub fn unit_norm(&mut self, x: Id) -> Id {
        let x = self.g.rms_norm(x);
        self.g.scale(x)
    }

    /// The gated delta rule over the tokens of each sequence; the new states go to the cache.
    pub fn delta_rule(&mut self, of: [Id; 6], cache: Id) -> Id {
        let [width, heads, tokens, n] = self.g[of[2]].ne;
        let both = self.g.gated_delta_net(of);
        let y = self.g.view(both, &[width, heads, tokens, n], &[], 0);
        let state = self.g.view(
            both,
            &[width, width, heads, n],
            &[],
            4 * width * heads * tokens * n,
        );
        self.store_state(state, cache);
        y
    }
}
