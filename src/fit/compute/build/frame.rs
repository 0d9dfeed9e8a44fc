//! What all graphs share: the token input, norms, matrices with bias and scale, and the output.

use super::{Build, Error};
use crate::fit::compute::graph::{F32, I32, I64, Id, Unary};

/// The kind of a norm (`llm_norm_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// Mean and variance.
    Layer,
    /// Root mean square.
    Rms,
}

impl Build<'_> {
    /// The embeddings of the batch (`build_inp_embd`). `scaled` if rows of tokens are multiplied by a factor, those of images not.
    ///
    /// Tokens, embeddings, or both can come in; all three ways are in the graph.
    pub fn embeddings(&mut self, scaled: bool) -> Result<Id, Error> {
        let (n, width, width_in) = (self.batch.tokens, self.hp.n_embd, self.hp.n_embd_inp);
        let table = self.global("token_embd.weight")?;
        let tokens = self.g.input(I32, &[n]);
        let embeddings = self.g.input(F32, &[width_in, n]);
        let by_token = self.embed(table, tokens);
        self.g.expand(by_token);
        self.g.expand(embeddings);
        if mixes(self.hp.arch()) {
            let mixed_tokens = self.g.input(I32, &[n]);
            let slots = self.g.input(I64, &[n]);
            let mixed = self.g.input(F32, &[width_in, n]);
            let copy = self.g.dup(mixed);
            let rows = self.embed(table, mixed_tokens);
            let mixed = self.g.set_rows(copy, rows, slots);
            self.g.expand(mixed);
        }
        let mut x = by_token;
        if width_in != width {
            let nb = self.g[x].nb[1];
            x = self.g.view(x, &[width, n], &[nb], 0);
        }
        self.input_embeddings = Some(x);
        let default = f64::from(u8::from(matches!(self.hp.arch(), "grok" | "minicpm")));
        let constant = self.hp.keys.float("embedding_scale").unwrap_or(default) != 0.0;
        let token_rows = scaled || (constant && width_in != width);
        if constant && width_in == width {
            x = self.g.scale(x);
        }
        if token_rows {
            let factors = self.g.input(F32, &[1, n]);
            if !self.g[x].is_contiguous() {
                x = self.g.cont(x);
            }
            x = self.g.mul(x, factors);
        }
        self.g.expand(x);
        Ok(x)
    }

    fn embed(&mut self, table: Id, tokens: Id) -> Id {
        let rows = self.g.get_rows(table, tokens);
        match self.hp.n_embd_inp - self.hp.n_embd {
            0 => rows,
            more => self.g.pad(rows, [more, 0, 0, 0]),
        }
    }

    /// Positions of the tokens, `per_token` numbers each.
    pub fn positions(&mut self, per_token: u64) -> Id {
        self.g
            .input(I32, &[self.batch.tokens.saturating_mul(per_token)])
    }

    /// The rows that are output.
    pub fn output_rows(&mut self) -> Id {
        self.g.input(I32, &[self.batch.outputs])
    }

    /// A norm with its weight and bias, if the model has them, called `name` in layer `il`.
    pub fn norm(&mut self, il: usize, name: &str, x: Id, kind: Norm) -> Id {
        let weight = self.find(il, name, "weight");
        let bias = self.find(il, name, "bias");
        self.norm_with(x, weight, bias, kind, Some(il))
    }

    /// The norm of embeddings, if the model has one.
    pub fn embedding_norm(&mut self, x: Id, kind: Norm) -> Id {
        let weight = self.find_global("token_embd_norm.weight");
        let bias = self.find_global("token_embd_norm.bias");
        self.norm_with(x, weight, bias, kind, Some(0))
    }

    /// The norm before the output.
    pub fn output_norm(&mut self, x: Id, kind: Norm) -> Id {
        let weight = self.find_global("output_norm.weight");
        let bias = self.find_global("output_norm.bias");
        self.norm_with(x, weight, bias, kind, None)
    }

    /// A norm with the given weight and bias (`build_norm`).
    pub fn norm_with(
        &mut self,
        x: Id,
        weight: Option<Id>,
        bias: Option<Id>,
        kind: Norm,
        il: Option<usize>,
    ) -> Id {
        let mut y = match kind {
            Norm::Layer => self.g.norm(x),
            Norm::Rms => self.g.rms_norm(x),
        };
        if weight.or(bias).is_some()
            && let Some(il) = il
        {
            self.g.norms.push((y, il));
        }
        if let Some(weight) = weight {
            y = self.g.mul(y, weight);
        }
        if let Some(bias) = bias {
            y = self.g.add(y, bias);
        }
        y
    }

    /// A tensor of a layer whose name has no suffix.
    pub fn bare(&mut self, il: usize, name: &str) -> Result<Id, Error> {
        self.global(&format!("blk.{il}.{name}"))
    }

    /// A root mean square norm whose weight's name has no suffix.
    pub fn bare_norm(&mut self, il: usize, name: &str, x: Id) -> Result<Id, Error> {
        let weight = self.bare(il, name)?;
        Ok(self.norm_with(x, Some(weight), None, Norm::Rms, Some(il)))
    }

    /// Whether a factor is in the header and not zero.
    pub fn is_set(&self, key: &str) -> bool {
        self.hp.keys.float(key).is_some_and(|x| x != 0.0)
    }

    /// The matrix `name` of a layer with its scale and bias, if it has them, in the order of an attention.
    pub fn linear(&mut self, il: usize, name: &str, x: Id) -> Result<Id, Error> {
        let weight = self.weight(il, name, "weight")?;
        let mut y = self.g.mul_mat(weight, x);
        if let Some(scale) = self.find(il, name, "scale") {
            y = self.g.mul(y, scale);
        }
        if let Some(bias) = self.find(il, name, "bias") {
            y = self.g.add(y, bias);
        }
        Ok(y)
    }

    /// `of` times the matrix `name` of a layer, whatever scale and bias it has.
    pub fn product(&mut self, il: usize, name: &str, of: Id) -> Result<Id, Error> {
        let matrix = self.weight(il, name, "weight")?;
        Ok(self.g.mul_mat(matrix, of))
    }

    /// The rows of `x` that are output.
    pub fn pick(&mut self, x: Id, rows: Id) -> Id {
        self.g.get_rows(x, rows)
    }

    /// Logits from normed hidden states: the output matrix with its scale (`build_lora_mm(model.output, …)`).
    pub fn logits(&mut self, x: Id) -> Result<Id, Error> {
        self.g[x].output = true;
        let matrix = self.output_matrix()?;
        let y = self.g.mul_mat(matrix, x);
        Ok(match self.find_global("output.scale") {
            Some(scale) => self.g.mul(y, scale),
            None => y,
        })
    }

    /// Squashed by a hyperbolic tangent.
    pub fn soft_cap(&mut self, x: Id) -> Id {
        let scaled = self.g.scale(x);
        let squashed = self.g.unary(Unary::Tanh, scaled);
        self.g.scale(squashed)
    }

    /// The norm before the output, and logits: the end of most graphs.
    pub fn normed_logits(&mut self, x: Id, kind: Norm) -> Result<(), Error> {
        let x = self.output_norm(x, kind);
        let logits = self.logits(x)?;
        self.finish(logits);
        Ok(())
    }

    /// The same where a draft model may read the normed hidden states of all tokens: rows are picked behind the norm.
    pub fn hidden_and_logits(&mut self, x: Id, rows: Id) -> Result<(), Error> {
        let x = self.output_norm(x, Norm::Rms);
        self.g[x].output = true;
        let x = self.pick(x, rows);
        self.classified(x);
        let logits = self.logits(x)?;
        self.finish(logits);
        Ok(())
    }

    /// The projection of the output embeddings, if the model has one.
    fn classified(&mut self, x: Id) {
        if let Some(matrix) = self.find_global("cls.output.weight") {
            let mut y = self.g.mul_mat(matrix, x);
            if let Some(bias) = self.find_global("cls.output.bias") {
                y = self.g.add(y, bias);
            }
            self.finish(y);
        }
    }

    /// The end of a graph.
    pub fn finish(&mut self, x: Id) {
        self.g[x].output = true;
        self.g.expand(x);
    }
}

/// Whether a batch can have tokens and embeddings (`llm_arch_supports_mixed_batch`).
fn mixes(arch: &str) -> bool {
    !matches!(
        arch,
        "cogvlm" | "deepseek4" | "graniteswitch" | "eagle3" | "dflash" | "gemma4-assistant"
    )
}
