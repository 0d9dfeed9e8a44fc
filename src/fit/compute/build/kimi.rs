//! Kimi Delta Attention, alternating with latent attention (`kimi-linear.cpp`).

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
            delta_attention(b, il, states, cur)?
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

/// The gated delta rule with a decay for each channel of a key.
fn delta_attention(b: &mut Build<'_>, il: usize, states: StateInputs, x: Id) -> Result<Id, Error> {
    let (n, tokens, all) = (b.batch.sequences, b.tokens_per_sequence(), b.batch.tokens);
    let heads = b.hp.n_head(0);
    let caches = b.state_caches(il)?;
    let old = b.load_state(states, caches.shift);
    let [q, k, v] = convolved(b, il, x, old, caches.shift)?;

    let decay = b.product(il, "ssm_f_a", x)?;
    let decay = b.product(il, "ssm_f_b", decay)?;
    let bias = b.weight(il, "ssm_dt", "bias")?;
    let decay = b.g.add(decay, bias);
    let decay = b.g.unary(Unary::Softplus, decay);
    let width = b.g[decay].ne[0].checked_div(heads).unwrap_or(0);
    let decay = b.g.reshape(decay, &[width, heads, all]);
    let a = b.bare(il, "ssm_a")?;
    let a = b.g.reshape(a, &[1, heads, 1]);
    let decay = b.g.mul(decay, a);
    let decay = b.g.reshape(decay, &[width, heads, tokens, n]);
    let beta = b.product(il, "ssm_beta", x)?;
    let beta = b.g.reshape(beta, &[1, heads, tokens, n]);
    let beta = b.g.unary(Unary::Sigmoid, beta);
    let state = b.load_state(states, caches.state);
    let state = b.g.reshape(state, &[width, width, heads, n]);
    let [q, k] = [q, k].map(|x| b.unit_norm(x));
    let y = b.delta_rule([q, k, v, decay, beta, state], caches.state);
    let y = b.g.cont(y);

    let gate = b.product(il, "ssm_g_a", x)?;
    let gate = b.product(il, "ssm_g_b", gate)?;
    let gate = b.g.reshape(gate, &[width, heads, all]);
    let y = b.g.reshape(y, &[width, heads, all]);
    let y = b.norm(il, "ssm_norm", y, Norm::Rms);
    let gate = b.g.unary(Unary::Sigmoid, gate);
    let y = b.g.mul(y, gate);
    let y = b.g.cont_as(y, &[width * heads, all]);
    b.linear(il, "attn_output", y)
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
