//! T5: biases by relative position, and a decoder that attends to an encoder's output.

use super::{Activation, Build, Error, Extras, FFN, Norm, Qkv, SelfInputs};
use crate::fit::compute::graph::{F32, I32, Id};

/// The decoder.
pub fn decoder(b: &mut Build<'_>) -> Result<(), Error> {
    b.blocks = "dec.blk";
    let mut x = b.embeddings(false)?;
    let tokens = b.batch.tokens;
    let (width, length) = (b.hp.n_embd_inp, u64::from(b.hp.n_ctx_train));
    let encoded = b.g.input(F32, &[width, length]);
    let buckets = b.g.input(I32, &[b.setting.cache.cells, tokens]);
    let inputs = SelfInputs::Caches(b.attention_inputs());
    let cross_mask = b.mask_over(length);
    let rows = b.output_rows();
    let layers = b.hp.keys.opt("decoder_block_count")?;
    let layers = layers.map_or(b.hp.n_layer(), |n| usize::try_from(n).unwrap_or(usize::MAX));
    for il in 0..layers {
        let normed = b.norm(il, "attn_norm", x, Norm::Rms);
        let attended = self_attention(b, il, normed, buckets, &inputs)?;
        let mut middle = b.g.add(attended, x);
        let normed = b.norm(il, "cross_attn_norm", middle, Norm::Rms);
        let mut cur = cross_attention(b, il, normed, encoded, cross_mask)?;
        if il + 1 == layers {
            [cur, middle] = [cur, middle].map(|y| b.pick(y, rows));
        }
        let middle = b.g.add(cur, middle);
        x = network(b, il, middle)?;
    }
    let weight = b.global("dec.output_norm.weight")?;
    let normed = b.norm_with(x, Some(weight), None, Norm::Rms, None);
    let logits = b.logits(normed)?;
    b.finish(logits);
    Ok(())
}

/// The encoder: all there is of an encoder-only model.
pub fn encoder(b: &mut Build<'_>) -> Result<(), Error> {
    b.blocks = "enc.blk";
    let mut x = b.embeddings(false)?;
    let tokens = b.batch.tokens;
    let buckets = b.g.input(I32, &[tokens, tokens]);
    let inputs = b.batch_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let normed = b.norm(il, "attn_norm", x, Norm::Rms);
        let mut cur = self_attention(b, il, normed, buckets, &inputs)?;
        if il + 1 == layers {
            [cur, x] = [cur, x].map(|y| b.pick(y, rows));
        }
        let middle = b.g.add(cur, x);
        x = network(b, il, middle)?;
    }
    let weight = b.global("enc.output_norm.weight")?;
    let x = b.norm_with(x, Some(weight), None, Norm::Rms, None);
    b.finish(x);
    Ok(())
}

fn self_attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    buckets: Id,
    inputs: &SelfInputs,
) -> Result<Id, Error> {
    let qkv = b.qkv(il, x)?;
    let bias = position_bias(b, il, buckets)?;
    let attended = b.self_attend(
        il,
        inputs,
        qkv,
        Extras {
            bias: Some(bias),
            ..Extras::default()
        },
    )?;
    b.linear(il, "attn_o", attended)
}

/// Added to the logits of attention by the distance of key and query; most layers use the table of the first (`build_pos_bias`).
fn position_bias(b: &mut Build<'_>, il: usize, buckets: Id) -> Result<Id, Error> {
    let table = match b.find(il, "attn_rel_b", "weight") {
        Some(table) => table,
        None => b.weight(0, "attn_rel_b", "weight")?,
    };
    let [keys, queries, ..] = b.g[buckets].ne;
    let flat = b.g.reshape(buckets, &[keys * queries]);
    let rows = b.g.get_rows(table, flat);
    let heads = b.g[rows].ne[0];
    let by_head = b.g.reshape(rows, &[heads, keys, queries]);
    let by_head = b.g.permute(by_head, [2, 0, 1, 3]);
    Ok(b.g.cont(by_head))
}

/// Attention to the encoder's output, which no cache holds.
fn cross_attention(
    b: &mut Build<'_>,
    il: usize,
    x: Id,
    encoded: Id,
    mask: Id,
) -> Result<Id, Error> {
    let q = b.linear(il, "cross_attn_q", x)?;
    let k = b.linear(il, "cross_attn_k", encoded)?;
    let v = b.linear(il, "cross_attn_v", encoded)?;
    let (width_k, width_v) = (b.hp.head_k(il), b.hp.head_v(il));
    let (heads, heads_kv) = (b.hp.n_head(il), b.hp.n_head_kv(il));
    let length = b.g[encoded].ne[1];
    let qkv = Qkv {
        q: b.g.reshape(q, &[width_k, heads, b.batch.tokens]),
        k: b.g.reshape(k, &[width_k, heads_kv, length]),
        v: b.g.reshape(v, &[width_v, heads_kv, length]),
    };
    let attended = b.attend_in_batch(il, mask, qkv, Extras::default());
    b.linear(il, "cross_attn_o", attended)
}

fn network(b: &mut Build<'_>, il: usize, middle: Id) -> Result<Id, Error> {
    let normed = b.norm(il, "ffn_norm", middle, Norm::Rms);
    let gated = b.has(il, FFN.gate, "weight");
    let activation = if gated {
        Activation::Gelu
    } else {
        Activation::Relu
    };
    let cur = b.ffn(il, normed, FFN, activation)?;
    Ok(b.g.add(cur, middle))
}
