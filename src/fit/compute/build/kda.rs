//! Kimi Delta Attention, alternating with latent attention (`kimi-linear.cpp`, `bailingmoe3.cpp`).

use super::latent::LatentInputs;
use super::state::StateInputs;
use super::{AttentionInputs, Build, Error, Extras, Norm};
use crate::fit::compute::graph::{Id, Unary};

enum Inputs {
    Latent(LatentInputs),
    Full(AttentionInputs),
}

/// The graph of `kimi-linear`. No layer has positions.
pub fn kimi_linear(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = if b.hp.is_mla() {
        Inputs::Latent(b.latent_inputs())
    } else {
        Inputs::Full(b.attention_inputs())
    };
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        b.g.expand(cur);
        let mut cur = if b.hp.is_recurrent(il) {
            delta_attention(b, il, states, cur, Decay::Softplus)?
        } else {
            let q = b.query(il, cur)?;
            let latent = b.compress(il, cur, None)?;
            match &inputs {
                Inputs::Latent(inputs) => {
                    let (q, k, v) = b.absorbed(il, q, latent, None)?;
                    b.latent_attention(il, *inputs, [q, k, v], None)?
                }
                Inputs::Full(inputs) => {
                    let qkv = b.decompressed(il, q, latent, None)?;
                    b.attention(il, inputs, qkv, Extras::default())?
                }
            }
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        let residual = b.g.add(cur, x);
        let cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        let cur = b.shared_and_routed(il, cur, true)?;
        x = b.g.add(cur, residual);
    }
    b.normed_logits(x, Norm::Rms)
}

/// The graph of `bailingmoe3`: latent attention has positions and gated heads.
pub fn bailing(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let inputs = b.latent_inputs();
    let sections = b.hp.keys.per_layer("rope.dimension_sections", 4)?;
    let multi = sections.is_some_and(|sections| sections.iter().any(|&n| n > 0));
    let pos = b.positions(if multi { 4 } else { 1 });
    let rows = b.output_rows();
    let normalize = b.hp.keys.flag("expert_weights_norm").unwrap_or(false);
    for il in 0..b.hp.n_layer() {
        let cur = b.norm(il, "attn_norm", x, Norm::Rms);
        let cur = if b.hp.is_recurrent(il) {
            delta_attention(b, il, states, cur, Decay::Bounded)?
        } else {
            gated_latent_attention(b, il, inputs, cur, pos)?
        };
        let residual = b.g.add(cur, x);
        let cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        let cur = b.shared_and_routed(il, cur, normalize)?;
        x = b.g.add(cur, residual);
    }
    b.hidden_and_logits(x, rows)
}

fn gated_latent_attention(
    b: &mut Build<'_>,
    il: usize,
    inputs: LatentInputs,
    x: Id,
    pos: Id,
) -> Result<Id, Error> {
    let (n, heads) = (b.batch.tokens, b.hp.n_head(0));
    let compressed = b.compressed_query(il, x)?;
    let q = b.query(il, compressed)?;
    let latent = b.compress(il, x, Some((pos, None)))?;
    let (q, k, v) = b.absorbed(il, q, latent, Some(pos))?;
    let y = b.attend_latent(il, inputs, [q, k, v], None)?;
    let gate = b.product(il, "attn_gate", x)?;
    let gate = b.g.reshape(gate, &[1, heads, n]);
    let gate = b.g.unary(Unary::Sigmoid, gate);
    let width = b.g[y].ne[0];
    let y =
        b.g.reshape(y, &[width.checked_div(heads).unwrap_or(0), heads, n]);
    let y = b.g.mul(y, gate);
    let y = b.g.cont_as(y, &[width, n]);
    b.product(il, "attn_output", y)
}

/// How the decay of a state is made from the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decay {
    /// Softplus, times a factor of each head.
    Softplus,
    /// Sigmoid of the product with a factor of each head, times a bound.
    Bounded,
}

/// The gated delta rule with a decay for each channel of a key.
fn delta_attention(
    b: &mut Build<'_>,
    il: usize,
    states: StateInputs,
    x: Id,
    kind: Decay,
) -> Result<Id, Error> {
    let (n, tokens, all) = (b.batch.sequences, b.tokens_per_sequence(), b.batch.tokens);
    let heads = b.hp.n_head(0);
    let caches = b.state_caches(il)?;
    let old = b.load_state(states, caches.shift);
    let [q, k, v] = convolved(b, il, x, old, caches.shift)?;

    let decay = one_or_two(b, il, ["ssm_f_a", "ssm_f_b"], x)?;
    let bias = b.weight(il, "ssm_dt", "bias")?;
    let mut decay = b.g.add(decay, bias);
    if kind == Decay::Softplus {
        decay = b.g.unary(Unary::Softplus, decay);
    }
    let width = b.g[decay].ne[0].checked_div(heads).unwrap_or(0);
    let decay = b.g.reshape(decay, &[width, heads, all]);
    let a = b.bare(il, "ssm_a")?;
    let a = b.g.reshape(a, &[1, heads, 1]);
    let mut decay = b.g.mul(decay, a);
    if kind == Decay::Bounded {
        decay = b.g.unary(Unary::Sigmoid, decay);
        decay = b.g.scale(decay);
    }
    let decay = b.g.reshape(decay, &[width, heads, tokens, n]);
    let beta = b.product(il, "ssm_beta", x)?;
    let beta = b.g.reshape(beta, &[1, heads, tokens, n]);
    let beta = b.g.unary(Unary::Sigmoid, beta);
    let state = b.load_state(states, caches.state);
    let state = b.g.reshape(state, &[width, width, heads, n]);
    let [q, k] = [q, k].map(|x| b.unit_norm(x));
    let y = b.delta_rule([q, k, v, decay, beta, state], caches.state);
    let y = b.g.cont(y);

    let gate = one_or_two(b, il, ["ssm_g_a", "ssm_g_b"], x)?;
    let gate = b.g.reshape(gate, &[width, heads, all]);
    let y = b.g.reshape(y, &[width, heads, all]);
    let y = b.norm(il, "ssm_norm", y, Norm::Rms);
    let gate = b.g.unary(Unary::Sigmoid, gate);
    let y = b.g.mul(y, gate);
    let y = b.g.cont_as(y, &[width * heads, all]);
    b.linear(il, "attn_output", y)
}

/// The product with a matrix, or with one of low rank that is kept as two.
fn one_or_two(
    b: &mut Build<'_>,
    il: usize,
    [first, second]: [&str; 2],
    x: Id,
) -> Result<Id, Error> {
    let y = b.product(il, first, x)?;
    if b.has(il, second, "weight") {
        b.product(il, second, y)
    } else {
        Ok(y)
    }
}

/// Queries, keys and values, `[width, heads, tokens, sequences]`, each convolved over time. The cache has what each has seen last,
/// one behind the other.
fn convolved(b: &mut Build<'_>, il: usize, x: Id, old: Id, cache: Id) -> Result<[Id; 3], Error> {
    let (n, tokens, all, heads) = (
        b.batch.sequences,
        b.tokens_per_sequence(),
        b.batch.tokens,
        b.hp.n_head(0),
    );
    let row = b.g[old].nb[1];
    let mut inputs = [None; 3];
    if b.has(il, "attn_qkv", "weight") {
        let qkv = b.product(il, "attn_qkv", x)?;
        let ([width, ..], nb) = (b.g[qkv].ne, b.g[qkv].nb);
        for (i, input) in (0..).zip(&mut inputs) {
            let part =
                b.g.view(qkv, &[width / 3, all], &[nb[1]], i * (width / 3) * nb[0]);
            *input = Some(b.g.cont(part));
        }
    }
    let names = [
        ("attn_q", "ssm_conv1d_q"),
        ("attn_k", "ssm_conv1d_k"),
        ("attn_v", "ssm_conv1d_v"),
    ];
    let mut out = [x; 3];
    for (i, (((matrix, kernel), input), out)) in
        (0..).zip(names.into_iter().zip(inputs).zip(&mut out))
    {
        let input = match input {
            Some(input) => input,
            None => b.product(il, matrix, x)?,
        };
        let channels = b.g[input].ne[0];
        let before = row / 12 / channels.max(1);
        let (ne, nb, offset) = (
            [before, channels, n],
            [4 * before, row],
            4 * i * before * channels,
        );
        let old = b.g.view(old, &ne, &nb, offset);
        let to = b.g.view(cache, &ne, &nb, offset);
        let input = b.by_sequence(input);
        let columns = b.append_columns(old, input, to);
        let kernel = b.weight(il, kernel, "weight")?;
        let kernel = b.g.reshape(kernel, &[before + 1, channels]);
        let y = b.g.ssm_conv(columns, kernel);
        let y = b.g.reshape(y, &[channels, all]);
        let y = b.g.unary(Unary::Silu, y);
        *out = b.g.reshape(
            y,
            &[channels.checked_div(heads).unwrap_or(0), heads, tokens, n],
        );
    }
    Ok(out)
}
