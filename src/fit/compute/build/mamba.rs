//! State space models: Mamba, Mamba 2 (`mamba-base.cpp`).

use super::state::StateInputs;
use super::{Build, Error, Norm};
use crate::fit::compute::graph::{Glu, Id, Unary};

/// The graph of `mamba` and `mamba2`.
pub fn mamba(b: &mut Build<'_>) -> Result<(), Error> {
    let mut x = b.embeddings(false)?;
    let inputs = b.state_inputs();
    let rows = b.output_rows();
    let layers = b.hp.n_layer();
    for il in 0..layers {
        let mut cur = b.norm(il, "attn_norm", x, Norm::Rms);
        cur = match b.hp.arch() {
            "mamba2" => b.mamba2_layer(il, inputs, cur)?,
            _ => b.mamba_layer(il, inputs, cur)?,
        };
        if il + 1 == layers {
            cur = b.pick(cur, rows);
            x = b.pick(x, rows);
        }
        x = b.g.add(cur, x);
    }
    b.normed_logits(x, Norm::Rms)
}

impl Build<'_> {
    /// A Mamba mixer: every channel is a head of its own.
    pub fn mamba_layer(&mut self, il: usize, inputs: StateInputs, x: Id) -> Result<Id, Error> {
        let ssm = self.hp.ssm;
        let (d_inner, d_state, n) = (ssm.d_inner, ssm.d_state, self.batch.sequences);
        let caches = self.state_caches(il)?;
        let x = self.by_sequence(x);
        let xz = self.linear(il, "ssm_in", x)?;
        let ([_, tokens, ..], nb) = (self.g[xz].ne, self.g[xz].nb);
        let x = self.g.view(xz, &[d_inner, tokens, n], &nb[1..3], 0);
        let z = self
            .g
            .view(xz, &[d_inner, tokens, n], &nb[1..3], d_inner * nb[0]);
        let conv = self.conv_input(inputs, caches.shift, x);
        let x = self.conv_activated(il, conv)?;

        let x_db = self.linear(il, "ssm_x", x)?;
        let nb = self.g[x_db].nb;
        let mut dt = self.g.view(x_db, &[ssm.dt_rank, tokens, n], &nb[1..3], 0);
        let part = [d_state, 1, tokens, n];
        let strides = [d_state * nb[0], nb[1], nb[2]];
        let mut b = self.g.view(x_db, &part, &strides, ssm.dt_rank * nb[0]);
        let mut c = self
            .g
            .view(x_db, &part, &strides, (ssm.dt_rank + d_state) * nb[0]);
        if self.hp.keys.flag("ssm.dt_b_c_rms").unwrap_or(false)
            || self.has(il, "ssm_dt_norm", "weight")
        {
            dt = self.norm(il, "ssm_dt_norm", dt, Norm::Rms);
            b = self.norm(il, "ssm_b_norm", b, Norm::Rms);
            c = self.norm(il, "ssm_c_norm", c, Norm::Rms);
        } else {
            dt = self.g.cont(dt);
        }
        let dt = self.linear(il, "ssm_dt", dt)?;
        let heads = self.g.reshape(x, &[1, d_inner, tokens, n]);
        let a = self.bare(il, "ssm_a")?;
        let y = self.scan_state(inputs, caches.state, |this, states, ids| {
            let states = this.g.reshape(states, &[d_state, 1, d_inner, n]);
            this.g.ssm_scan([states, heads, dt, a, b, c, ids])
        });
        let nb = self.g[heads].nb;
        self.store_scanned(y, heads, caches.state);
        let y = self.g.view(y, &[d_inner, tokens, n], &nb[2..4], 0);
        let d = self.bare(il, "ssm_d")?;
        let y = self.skip_and_gate(y, x, z, d);
        let out = self.linear(il, "ssm_out", y)?;
        let width = self.g[out].ne[0];
        Ok(self.g.reshape(out, &[width, tokens * n]))
    }

    /// A Mamba 2 mixer: heads of several channels share a decay.
    pub fn mamba2_layer(&mut self, il: usize, inputs: StateInputs, x: Id) -> Result<Id, Error> {
        let ssm = self.hp.ssm;
        let (d_inner, d_state, heads, groups) =
            (ssm.d_inner, ssm.d_state, ssm.dt_rank, ssm.n_group);
        let (n, tokens) = (self.batch.sequences, self.tokens_per_sequence());
        let head = d_inner.checked_div(heads).unwrap_or(0);
        let channels = d_inner + 2 * groups * d_state;
        let caches = self.state_caches(il)?;
        let zx = self.linear(il, "ssm_in", x)?;
        let zx = self.by_sequence(zx);
        let nb = self.g[zx].nb;
        let z = self.g.view(
            zx,
            &[head, heads, tokens, n],
            &[head * nb[0], nb[1], nb[2]],
            0,
        );
        let xbc = self
            .g
            .view(zx, &[channels, tokens, n], &nb[1..3], d_inner * nb[0]);
        let dt = self.g.view(
            zx,
            &[heads, tokens, n],
            &nb[1..3],
            (d_inner + channels) * nb[0],
        );
        let conv = self.conv_input(inputs, caches.shift, xbc);
        let xbc = self.conv_activated(il, conv)?;
        let nb = self.g[xbc].nb;
        let x = self.g.view(
            xbc,
            &[head, heads, tokens, n],
            &[head * nb[0], nb[1], nb[2]],
            0,
        );
        let (part, strides) = (
            [d_state, groups, tokens, n],
            [d_state * nb[0], nb[1], nb[2]],
        );
        let b = self.g.view(xbc, &part, &strides, d_inner * nb[0]);
        let c = self
            .g
            .view(xbc, &part, &strides, (d_inner + groups * d_state) * nb[0]);
        let dt = self.g.cont(dt);
        let bias = self.weight(il, "ssm_dt", "bias")?;
        let dt = self.g.add(dt, bias);
        let a = self.bare(il, "ssm_a")?;
        let y = self.scan_state(inputs, caches.state, |this, states, ids| {
            let states = this.g.reshape(states, &[d_state, head, heads, n]);
            this.g.ssm_scan([states, x, dt, a, b, c, ids])
        });
        self.store_scanned(y, x, caches.state);
        let y = self.g.view(y, &[head, heads, tokens, n], &[], 0);
        let d = self.bare(il, "ssm_d")?;
        let mut y = self.skip_and_gate(y, x, z, d);
        if self.has(il, "ssm_norm", "weight") {
            y = self
                .g
                .reshape(y, &[d_inner / groups.max(1), groups, tokens, n]);
            y = self.norm(il, "ssm_norm", y, Norm::Rms);
        }
        let y = self.g.reshape(y, &[d_inner, tokens * n]);
        self.linear(il, "ssm_out", y)
    }

    /// The mixer of PLaMo 2: heads as in Mamba 2, without groups, and B, C and the time step from a second matrix.
    pub fn plamo2_mixer(&mut self, il: usize, inputs: StateInputs, x: Id) -> Result<Id, Error> {
        let ssm = self.hp.ssm;
        let (d_inner, d_state, heads) = (ssm.d_inner, ssm.d_state, ssm.dt_rank);
        let (n, tokens) = (self.batch.sequences, self.tokens_per_sequence());
        let head = d_inner.checked_div(heads).unwrap_or(0);
        let caches = self.state_caches(il)?;
        let x = self.by_sequence(x);
        let zx = self.linear(il, "ssm_in", x)?;
        let zx = self.g.permute(zx, [0, 2, 1, 3]);
        let zx = self.g.cont_as(zx, &[2 * head, heads, tokens, n]);
        let nb = self.g[zx].nb;
        let x = self
            .g
            .view(zx, &[head, heads, tokens, n], &nb[1..], head * nb[0]);
        let x = self.g.cont_as(x, &[d_inner, tokens, n]);
        let z = self.g.view(zx, &[head, heads, tokens, n], &nb[1..], 0);
        let conv = self.conv_input(inputs, caches.shift, x);
        let x = self.conv_activated(il, conv)?;

        let bcdt = self.linear(il, "ssm_x", x)?;
        let nb = self.g[bcdt].nb;
        let dt_width = self.g[bcdt].ne[0].saturating_sub(2 * d_state);
        let mut part = |width: u64, offset: u64| {
            self.g
                .view(bcdt, &[width, tokens, n], &nb[1..3], offset * nb[0])
        };
        let (b, c, dt) = (
            part(d_state, 0),
            part(d_state, d_state),
            part(dt_width, 2 * d_state),
        );
        let b = self.bare_norm(il, "ssm_b_norm", b)?;
        let c = self.bare_norm(il, "ssm_c_norm", c)?;
        let dt = self.bare_norm(il, "ssm_dt_norm", dt)?;
        let dt = self.linear(il, "ssm_dt", dt)?;
        let a = self.bare(il, "ssm_a")?;
        let a = self.g.reshape(a, &[1, heads]);
        let x = self.g.view(x, &[head, heads, tokens, n], &[], 0);
        let [b, c] = [b, c].map(|x| {
            let nb = self.g[x].nb;
            self.g.view(
                x,
                &[d_state, 1, tokens, n],
                &[d_state * nb[0], nb[1], nb[2]],
                0,
            )
        });
        let y = self.scan_state(inputs, caches.state, |this, states, ids| {
            let states = this.g.reshape(states, &[d_state, head, heads, n]);
            this.g.ssm_scan([states, x, dt, a, b, c, ids])
        });
        self.store_scanned(y, x, caches.state);
        let y = self.g.view(y, &[head, heads, tokens, n], &[], 0);
        let d = self.bare(il, "ssm_d")?;
        let d = self.g.reshape(d, &[1, heads]);
        let y = self.skip_and_gate(y, x, z, d);
        let y = self.g.view(y, &[d_inner, tokens, n], &[], 0);
        let out = self.linear(il, "ssm_out", y)?;
        let width = self.g[out].ne[0];
        Ok(self.g.reshape(out, &[width, tokens * n]))
    }

    /// The convolution over time with its bias, activated.
    fn conv_activated(&mut self, il: usize, input: Id) -> Result<Id, Error> {
        let kernel = self.weight(il, "ssm_conv1d", "weight")?;
        let mut x = self.g.ssm_conv(input, kernel);
        if let Some(bias) = self.find(il, "ssm_conv1d", "bias") {
            x = self.g.add(x, bias);
        }
        Ok(self.g.unary(Unary::Silu, x))
    }

    /// The new states lie behind the output of a scan, which has the shape of `x`.
    fn store_scanned(&mut self, scanned: Id, x: Id, cache: Id) {
        let offset = self.g[x].elements() * 4;
        let n = self.g[cache].elements();
        let new = self.g.view(scanned, &[n], &[], offset);
        self.store_state(new, cache);
    }

    /// The input passes by the scan, and `z` gates the sum.
    fn skip_and_gate(&mut self, y: Id, x: Id, z: Id, d: Id) -> Id {
        let skipped = self.g.mul(x, d);
        let y = self.g.add(y, skipped);
        let z = self.g.cont(z);
        self.g.glu(Glu::Swiglu, z, y)
    }
}
