//! RWKV 6 and 7, and models that were converted to them (`rwkv6-base.cpp`, `rwkv7-base.cpp`).

use super::state::{StateCaches, StateInputs};
use super::{Activation, Build, Error, FFN, Norm};
use crate::fit::compute::graph::{Id, Op, Unary};

/// The graph of `rwkv6` and `rwkv7`: time mixing and channel mixing, both with a token shift.
pub fn rwkv(b: &mut Build<'_>) -> Result<(), Error> {
    let x = b.embeddings(false)?;
    let (weight, bias) = (
        b.find_global("token_embd_norm.weight"),
        b.find_global("token_embd_norm.bias"),
    );
    let mut x = b.norm_with(x, weight, bias, Norm::Layer, Some(0));
    let states = b.state_inputs();
    let rows = b.output_rows();
    let rescale = b.hp.keys.opt("rescale_every_n_layers")?.unwrap_or(0);
    let layers = b.hp.n_layer();
    let mut first_value = None;
    for il in 0..layers {
        x = b.by_sequence(x);
        let caches = b.state_caches(il)?;
        let [width, _, n, _] = b.g[x].ne;
        let shift = b.load_state(states, caches.shift);
        let shift = b.g.reshape(shift, &[width, 2, n]);
        let nb = b.g[shift].nb;
        let [attention_shift, ffn_shift] =
            [0, nb[1]].map(|at| b.g.view(shift, &[width, 1, n], &nb[1..3], at));

        let normed = b.norm(il, "attn_norm", x, Norm::Layer);
        let before = b.shifted(attention_shift, normed);
        let cur = match b.hp.arch() {
            "rwkv6" => time_mix_6(b, il, states, caches, normed, before)?,
            _ => time_mix_7(b, il, states, caches, normed, before, &mut first_value)?,
        };
        let residual = b.g.add(cur, x);
        let ffn_normed = b.norm(il, "attn_norm_2", residual, Norm::Layer);
        let before = b.shifted(ffn_shift, ffn_normed);
        let lasts = [normed, ffn_normed].map(|x| b.last_token(x));
        let shift = b.g.concat(lasts[0], lasts[1], 1);
        b.store_shift(shift, caches.shift);

        let mut parts =
            [residual, ffn_normed, before].map(|x| b.g.reshape(x, &[width, b.batch.tokens]));
        if il + 1 == layers {
            parts = parts.map(|x| b.pick(x, rows));
        }
        let [residual, cur, before] = parts;
        let cur = channel_mix(b, il, cur, before)?;
        x = b.g.add(cur, residual);
        if rescale > 0 && (il as u64 + 1).is_multiple_of(rescale) {
            x = b.g.scale(x);
        }
    }
    b.normed_logits(x, Norm::Layer)
}

/// The graph of `rwkv6qwen2` and `arwkv7`: time mixing in place of the attention of a transformer.
pub fn converted(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let states = b.state_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    let mut first_value = None;
    for il in 0..layers {
        x = b.by_sequence(x);
        let caches = b.state_caches(il)?;
        let [width, _, n, _] = b.g[x].ne;
        let shift = b.load_state(states, caches.shift);
        let shift = b.g.reshape(shift, &[width, 1, n]);
        let normed = b.norm(il, "attn_norm", x, Norm::Rms);
        let before = b.shifted(shift, normed);
        let mut cur = match b.hp.arch() {
            "rwkv6qwen2" => time_mix_6(b, il, states, caches, normed, before)?,
            _ => time_mix_7(b, il, states, caches, normed, before, &mut first_value)?,
        };
        let shift = b.last_token(normed);
        b.store_shift(shift, caches.shift);
        let mut residual = b.g.add(cur, x);
        residual = b.g.reshape(residual, &[width, b.batch.tokens]);
        if il + 1 == layers {
            residual = b.pick(residual, rows);
        }
        cur = b.norm(il, "ffn_norm", residual, Norm::Rms);
        cur = b.ffn(il, cur, FFN, Activation::Silu)?;
        x = b.g.add(cur, residual);
    }
    b.normed_logits(x, Norm::Rms)
}

impl Build<'_> {
    /// For each token the one before it; the last one of before comes first.
    fn shifted(&mut self, last: Id, x: Id) -> Id {
        let ([width, tokens, n, _], nb) = (self.g[x].ne, self.g[x].nb);
        let rest = self
            .g
            .view(x, &[width, tokens.saturating_sub(1), n], &nb[1..3], 0);
        self.g.concat(last, rest, 1)
    }

    fn last_token(&mut self, x: Id) -> Id {
        let ([width, tokens, n, _], nb) = (self.g[x].ne, self.g[x].nb);
        self.g.view(
            x,
            &[width, 1, n],
            &nb[1..3],
            tokens.saturating_sub(1) * nb[1],
        )
    }

    fn store_shift(&mut self, shift: Id, cache: Id) {
        let n = self.g[cache].elements();
        let shift = self.g.view(shift, &[n], &[], 0);
        self.store_state(shift, cache);
    }

    /// The product of two small matrices with `x`, `f` between them, and an offset.
    fn low_rank(
        &mut self,
        il: usize,
        [first, second, offset]: [&str; 3],
        f: Option<Unary>,
        x: Id,
    ) -> Result<Id, Error> {
        let mut y = self.product(il, first, x)?;
        if let Some(f) = f {
            y = self.g.unary(f, y);
        }
        let y = self.product(il, second, y)?;
        let offset = self.weight(il, offset, "weight")?;
        Ok(self.g.add(y, offset))
    }

    /// `x` interpolated with `change`, the difference to the token before.
    fn lerp(&mut self, il: usize, name: &str, change: Id, x: Id) -> Result<Id, Error> {
        let by = self.weight(il, name, "weight")?;
        let y = self.g.mul(change, by);
        Ok(self.g.add(y, x))
    }

    /// The norm of each head of the output, with weight and bias, as rows.
    fn head_norm(&mut self, il: usize, x: Id, heads: u64) -> Result<Id, Error> {
        let (width, n) = (self.hp.n_embd, self.batch.tokens);
        let y = self.g.reshape(x, &[width / heads.max(1), heads, n]);
        let y = self.g.norm(y);
        let y = self.g.reshape(y, &[width, n]);
        let weight = self.weight(il, "time_mix_ln", "weight")?;
        let y = self.g.mul(y, weight);
        let bias = self.weight(il, "time_mix_ln", "bias")?;
        Ok(self.g.add(y, bias))
    }

    /// The recurrence: its output as one row of values; the new states go to the cache.
    fn recurrence(&mut self, op: Op, of: &[Id], cache: Id) -> Id {
        let both = self.g.wkv(op, of);
        let outputs = self.hp.n_embd * self.batch.tokens;
        let y = self.g.view(both, &[outputs], &[], 0);
        let n = self.g[cache].elements();
        let state = self.g.view(both, &[n], &[], 4 * outputs);
        self.store_state(state, cache);
        y
    }

    fn head_size(&self) -> Result<u64, Error> {
        Ok(self.hp.keys.need_dim("wkv.head_size")?.max(1))
    }
}

fn channel_mix(b: &mut Build<'_>, il: usize, x: Id, before: Id) -> Result<Id, Error> {
    let change = b.g.sub(before, x);
    let k = b.lerp(il, "channel_mix_lerp_k", change, x)?;
    let k = b.product(il, "channel_mix_key", k)?;
    let k = b.activate(Activation::ReluSqr, k);
    if !b.has(il, "channel_mix_receptance", "weight") {
        return b.product(il, "channel_mix_value", k);
    }
    let r = b.lerp(il, "channel_mix_lerp_r", change, x)?;
    let r = b.product(il, "channel_mix_receptance", r)?;
    let r = b.g.unary(Unary::Sigmoid, r);
    let v = b.product(il, "channel_mix_value", k)?;
    Ok(b.g.mul(r, v))
}

fn time_mix_7(
    b: &mut Build<'_>,
    il: usize,
    states: StateInputs,
    caches: StateCaches,
    x: Id,
    before: Id,
    first_value: &mut Option<Id>,
) -> Result<Id, Error> {
    let (n, head) = (b.batch.tokens, b.head_size()?);
    let [width, tokens, sequences, _] = b.g[x].ne;
    let heads = width / head;
    let gated = b.has(il, "time_mix_g1", "weight") && b.has(il, "time_mix_g2", "weight");
    let change = b.g.sub(before, x);
    let change = b.g.repeat(
        change,
        &[width, tokens, sequences, if gated { 6 } else { 5 }],
    );
    let mixed = b.lerp(il, "time_mix_lerp_fused", change, x)?;
    let row = b.g[mixed].nb[1];
    let part = |b: &mut Build<'_>, i: u64| b.g.view(mixed, &[width, n], &[row], i * row * n);
    let [xr, xw, xk, xv, xa] = [0, 1, 2, 3, 4].map(|i| part(b, i));

    let r = b.product(il, "time_mix_receptance", xr)?;
    let w = b.low_rank(
        il,
        ["time_mix_w1", "time_mix_w2", "time_mix_w0"],
        Some(Unary::Tanh),
        xw,
    )?;
    let w = b.g.unary(Unary::Sigmoid, w);
    let w = b.g.scale(w);
    let w = b.g.unary(Unary::Exp, w);
    let k = b.product(il, "time_mix_key", xk)?;
    let mut v = b.product(il, "time_mix_value", xv)?;
    match *first_value {
        None => *first_value = Some(v),
        Some(first) => {
            let to_first = b.g.sub(first, v);
            let by = b.low_rank(il, ["time_mix_v1", "time_mix_v2", "time_mix_v0"], None, xv)?;
            let by = b.g.unary(Unary::Sigmoid, by);
            let residual = b.g.mul(to_first, by);
            v = b.g.add(v, residual);
        }
    }
    let gate = if gated {
        let xg = part(b, 5);
        let g = b.product(il, "time_mix_g1", xg)?;
        let g = b.g.unary(Unary::Sigmoid, g);
        Some(b.product(il, "time_mix_g2", g)?)
    } else {
        None
    };
    let a = b.low_rank(il, ["time_mix_a1", "time_mix_a2", "time_mix_a0"], None, xa)?;
    let a = b.g.unary(Unary::Sigmoid, a);
    let k_k = b.weight(il, "time_mix_k_k", "weight")?;
    let kk = b.g.mul(k, k_k);
    let kk = b.g.reshape(kk, &[head, heads, n]);
    let kk = b.g.l2_norm(kk);
    let k_a = b.weight(il, "time_mix_k_a", "weight")?;
    let ka = b.g.mul(k, k_a);
    let a_ka = b.g.mul(a, ka);
    let change = b.g.sub(a_ka, ka);
    let k = b.g.add(k, change);
    let [r, w, k, v, a] = [r, w, k, v, a].map(|x| b.g.reshape(x, &[head, heads, n]));
    let state = b.load_state(states, caches.state);
    let minus_kk = b.g.unary(Unary::Neg, kk);
    let kk_a = b.g.mul(kk, a);
    let y = b.recurrence(
        Op::RwkvWkv7,
        &[r, w, k, v, minus_kk, kk_a, state],
        caches.state,
    );
    let y = if b.has(il, "time_mix_ln", "weight") && b.has(il, "time_mix_ln", "bias") {
        b.head_norm(il, y, heads)?
    } else {
        b.g.reshape(y, &[width, n])
    };
    let kr = b.g.mul(k, r);
    let r_k = b.weight(il, "time_mix_r_k", "weight")?;
    let r_k = b.g.reshape(r_k, &[head, heads]);
    let rk = b.g.mul(kr, r_k);
    let rk = b.g.sum_rows(rk);
    let bonus = b.g.mul(v, rk);
    let bonus = b.g.reshape(bonus, &[width, n]);
    let mut y = b.g.add(y, bonus);
    if let Some(gate) = gate {
        y = b.g.mul(y, gate);
    }
    let y = b.product(il, "time_mix_output", y)?;
    Ok(b.g.reshape(y, &[width, tokens, sequences]))
}

fn time_mix_6(
    b: &mut Build<'_>,
    il: usize,
    states: StateInputs,
    caches: StateCaches,
    x: Id,
    before: Id,
) -> Result<Id, Error> {
    let (n, head) = (b.batch.tokens, b.head_size()?);
    let [width, tokens, sequences, _] = b.g[x].ne;
    let heads = width / head;
    // Converted models have linear attention in place of the recurrence.
    let first = b.find(il, "time_mix_first", "weight");
    let change = b.g.sub(before, x);
    let [change, x] = [change, x].map(|x| b.g.reshape(x, &[width, n]));
    let [xw, xk, xv, xr, xg] = mixed_inputs(b, il, change, x)?;

    let r = b.linear(il, "time_mix_receptance", xr)?;
    let k = b.linear(il, "time_mix_key", xk)?;
    let v = b.linear(il, "time_mix_value", xv)?;
    let gate = b.product(il, "time_mix_gate", xg)?;
    let gate = b.g.unary(
        if first.is_none() {
            Unary::Sigmoid
        } else {
            Unary::Silu
        },
        gate,
    );
    let kv_heads = b.hp.n_head_kv(il);
    let mut kv = [k, v];
    if kv_heads != 0 && kv_heads != heads {
        kv = kv.map(|x| {
            let x = b.g.reshape(x, &[head, 1, kv_heads, n]);
            b.g.repeat(x, &[head, heads / kv_heads, kv_heads, n])
        });
    }
    let [mut k, v, r] = [kv[0], kv[1], r].map(|x| b.g.reshape(x, &[head, heads, n]));
    let w = b.product(il, "time_mix_decay_w1", xw)?;
    let w = b.g.unary(Unary::Tanh, w);
    let w = b.product(il, "time_mix_decay_w2", w)?;
    let decay = b.weight(il, "time_mix_decay", "weight")?;
    let w = b.g.add(w, decay);
    let w = [Unary::Exp, Unary::Neg, Unary::Exp]
        .into_iter()
        .fold(w, |w, f| b.g.unary(f, w));
    let w = b.g.reshape(w, &[head, heads, n]);
    if first.is_none() {
        let kw = b.g.mul(k, w);
        k = b.g.sub(k, kw);
    }
    let state = b.load_state(states, caches.state);
    let y = match first {
        Some(first) => b.recurrence(Op::RwkvWkv6, &[k, v, r, first, w, state], caches.state),
        None => b.recurrence(Op::GatedLinearAttn, &[k, v, r, w, state], caches.state),
    };
    let y = match first {
        Some(_) => b.head_norm(il, y, heads)?,
        None => b.g.reshape(y, &[width, n]),
    };
    let y = b.g.mul(y, gate);
    let y = b.product(il, "time_mix_output", y)?;
    Ok(b.g.reshape(y, &[width, tokens, sequences]))
}

/// The five inputs of time mixing: each `x` moved towards the token before by an amount that depends on the data.
fn mixed_inputs(b: &mut Build<'_>, il: usize, change: Id, x: Id) -> Result<[Id; 5], Error> {
    let ([width, n, ..], parts) = (b.g[x].ne, [0, 1, 2, 3, 4]);
    let mixed = b.lerp(il, "time_mix_lerp_x", change, x)?;
    let mixed = b.product(il, "time_mix_w1", mixed)?;
    let mixed = b.g.unary(Unary::Tanh, mixed);
    let rank = b.g[mixed].ne[0] / 5;
    let mixed = b.g.reshape(mixed, &[rank, 1, 5, n]);
    let mixed = b.g.permute(mixed, [0, 1, 3, 2]);
    let mixed = b.g.cont(mixed);
    let w2 = b.weight(il, "time_mix_w2", "weight")?;
    let [w2_in, w2_out, ..] = b.g[w2].ne;
    let w2 = b.g.reshape(w2, &[w2_in, w2_out, 1, 5]);
    let mixed = b.g.mul_mat(w2, mixed);
    let view = |b: &mut Build<'_>, of: Id, i: u64| {
        let row = b.g[of].nb[1];
        b.g.view(of, &[width, n], &[row], 4 * i * width * n)
    };
    if let Some(fused) = b.find(il, "time_mix_lerp_fused", "weight") {
        let [change, x] = [change, x].map(|x| b.g.reshape(x, &[width, 1, n]));
        let by = b.g.add(mixed, fused);
        let moved = b.g.mul(by, change);
        let all = b.g.add(moved, x);
        return Ok(parts.map(|i| view(b, all, i)));
    }
    let views = parts.map(|i| view(b, mixed, i));
    let names = [
        "time_mix_lerp_w",
        "time_mix_lerp_k",
        "time_mix_lerp_v",
        "time_mix_lerp_r",
        "time_mix_lerp_g",
    ];
    let mut out = views;
    for (out, name) in out.iter_mut().zip(names) {
        let weight = b.weight(il, name, "weight")?;
        let by = b.g.add(*out, weight);
        let moved = b.g.mul(by, change);
        *out = b.g.add(moved, x);
    }
    Ok(out)
}
