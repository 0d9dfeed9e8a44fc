//! Feed-forward networks: plain, gated, and mixtures of experts (`build_ffn`, `build_moe_ffn`).

use super::{Build, Error};
use crate::fit::compute::graph::{Glu, Id, Op, Unary};

/// The activation of a network (`llm_ffn_op_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// SiLU; gated: SwiGLU.
    Silu,
    /// GELU; gated: GeGLU.
    Gelu,
    /// ReLU; gated: ReGLU.
    Relu,
    /// The square of ReLU; never gated.
    ReluSqr,
    /// Gated with the clamped sigmoid of gpt-oss.
    SwigluOai,
    /// SwiGLU within bounds, in one node.
    SwigluClamp,
    /// SwiGLU within bounds, in several nodes; only gated.
    BoundedSilu,
    /// xIELU; never gated.
    Xielu,
}

impl Activation {
    /// The node that gates with it, if it is one.
    fn glu(self) -> Option<Glu> {
        Some(match self {
            Activation::Silu => Glu::Swiglu,
            Activation::Gelu => Glu::Geglu,
            Activation::Relu | Activation::ReluSqr => Glu::Reglu,
            Activation::SwigluOai => Glu::SwigluOai,
            Activation::SwigluClamp => Glu::SwigluClamp,
            Activation::BoundedSilu | Activation::Xielu => return None,
        })
    }
}

/// The names of a network's matrices, without `.weight`.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// Into the hidden width.
    pub up: &'static str,
    /// Into the hidden width, for the gate.
    pub gate: &'static str,
    /// Back.
    pub down: &'static str,
}

/// The network of a layer.
pub const FFN: Names = Names {
    up: "ffn_up",
    gate: "ffn_gate",
    down: "ffn_down",
};
/// The expert that every token goes through.
pub const SHARED_EXPERT: Names = Names {
    up: "ffn_up_shexp",
    gate: "ffn_gate_shexp",
    down: "ffn_down_shexp",
};

/// How router logits become probabilities (`llama_expert_gating_func_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Softmax over the selected ones.
    SoftmaxOfSelected,
    /// Square root of softplus.
    SqrtSoftplus,
}

impl Gating {
    /// The gating that a header's `expert_gating_func` stands for.
    pub fn from_raw(raw: u64) -> Option<Gating> {
        Some(match raw {
            1 => Gating::Softmax,
            2 => Gating::Sigmoid,
            3 => Gating::SoftmaxOfSelected,
            4 => Gating::SqrtSoftplus,
            _ => return None,
        })
    }
}

/// Whether an architecture applies the scales that belong to the matrices of its networks (NVFP4): all load them, not all
/// hand them to `build_ffn` and `build_moe_ffn`.
fn applies_scale(arch: &str, name: &str) -> bool {
    let (experts, shared) = (name.ends_with("_exps"), name.ends_with("_shexp"));
    match arch {
        "cohere2moe" | "deepseek32" | "glm-dsa" | "hy_v3" | "nemotron_h" | "nemotron_h_moe" => true,
        "gemma4" | "llama" | "llama-embed" | "mistral3" => !shared,
        "bitnet" | "cohere2" | "nanbeige" | "qwen3" | "qwen35" => !experts && !shared,
        "qwen35moe" | "qwen3next" => experts || shared,
        "mellum" | "qwen3moe" => experts,
        _ => false,
    }
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    /// Activation within an expert.
    pub activation: Activation,
    /// Router probabilities.
    pub gating: Gating,
    /// Weights of the selected experts are divided by their sum.
    pub normalize: bool,
    /// Weights are multiplied by a constant.
    pub scale: bool,
    /// The input is weighted rather than the output (Llama 4).
    pub weight_before: bool,
}

impl Build<'_> {
    /// The usual mixture of experts: SwiGLU, and weights scaled as the header says.
    pub fn swiglu_experts(&self, gating: Gating, normalize: bool) -> Experts {
        let scale = self.hp.keys.float("expert_weights_scale").unwrap_or(0.0);
        Experts {
            activation: Activation::Silu,
            gating,
            normalize,
            scale: scale != 0.0 && scale != 1.0,
            weight_before: false,
        }
    }

    /// SiLU, within bounds in the layers that have one in the list `key`.
    pub fn silu(&self, il: usize, key: &str) -> Activation {
        let bound = self.hp.keys.floats(key).and_then(|bounds| bounds.get(il));
        if bound.is_some_and(|&bound| bound > 1e-6) {
            Activation::BoundedSilu
        } else {
            Activation::Silu
        }
    }

    /// The gating that the header names.
    pub fn gating(&self, default: Gating) -> Result<Gating, Error> {
        let raw = self.hp.keys.opt("expert_gating_func")?;
        Ok(raw.and_then(Gating::from_raw).unwrap_or(default))
    }

    /// Networks without gate, with a gate of their own, or with both halves in one matrix: as the tensors of the layer say.
    pub fn ffn(
        &mut self,
        il: usize,
        x: Id,
        names: Names,
        activation: Activation,
    ) -> Result<Id, Error> {
        let up = self.ffn_linear(il, names.up, x)?;
        let hidden = if self.has(il, names.gate, "weight") {
            let gate = self.ffn_linear(il, names.gate, x)?;
            self.gate(activation, gate, up)
        } else {
            self.activate(activation, up)
        };
        self.ffn_linear(il, names.down, hidden)
    }

    /// A network whose up matrix holds the gate too (`LLM_FFN_SWIGLU` and its like).
    pub fn ffn_halves(&mut self, il: usize, x: Id, names: Names, glu: Glu) -> Result<Id, Error> {
        let up = self.ffn_linear(il, names.up, x)?;
        let hidden = self.g.glu_halves(glu, up);
        self.ffn_linear(il, names.down, hidden)
    }

    /// A matrix with its bias and its scale, in the order of a feed-forward network.
    pub fn ffn_linear(&mut self, il: usize, name: &str, x: Id) -> Result<Id, Error> {
        let weight = self.weight(il, name, "weight")?;
        let mut y = self.g.mul_mat(weight, x);
        if let Some(bias) = self.find(il, name, "bias") {
            y = self.g.add(y, bias);
        }
        if applies_scale(self.hp.arch(), name)
            && let Some(scale) = self.find(il, name, "scale")
        {
            y = self.g.mul(y, scale);
        }
        Ok(y)
    }

    /// A gated activation.
    fn gate(&mut self, activation: Activation, gate: Id, up: Id) -> Id {
        if let Some(glu) = activation.glu() {
            return self.g.glu(glu, gate, up);
        }
        let up = self.g.clamp(up);
        let gate = self.activate(activation, gate);
        let gate = self.g.clamp(gate);
        self.g.mul(gate, up)
    }

    /// An activation that is not gated.
    pub fn activate(&mut self, activation: Activation, x: Id) -> Id {
        match activation {
            Activation::Silu
            | Activation::SwigluOai
            | Activation::SwigluClamp
            | Activation::BoundedSilu => self.g.unary(Unary::Silu, x),
            Activation::Xielu => self.g.unary(Unary::Xielu, x),
            Activation::Gelu => self.g.unary(Unary::Gelu, x),
            Activation::Relu => self.g.unary(Unary::Relu, x),
            Activation::ReluSqr => {
                let relu = self.g.unary(Unary::Relu, x);
                self.g.sqr(relu)
            }
        }
    }

    /// Routed experts, summed; the router reads `x`.
    pub fn experts(&mut self, il: usize, x: Id, experts: Experts) -> Result<Id, Error> {
        let router = self.weight(il, "ffn_gate_inp", "weight")?;
        let mut logits = self.g.mul_mat(router, x);
        if let Some(bias) = self.find(il, "ffn_gate_inp", "bias") {
            logits = self.g.add(logits, bias);
        }
        self.routed_experts(il, x, logits, experts)
    }

    /// Routed experts, summed, for router logits that are computed already.
    pub fn routed_experts(
        &mut self,
        il: usize,
        x: Id,
        logits: Id,
        experts: Experts,
    ) -> Result<Id, Error> {
        let (ids, weights) = self.select_experts(il, logits, experts)?;
        self.g.expand(weights);
        let [n_embd, n, ..] = self.g[x].ne;
        let used = self.g[ids].ne[0];
        let mut x = self.g.reshape(x, &[n_embd, 1, n]);
        if experts.weight_before {
            let repeated = self.g.repeat(x, &[n_embd, used, n]);
            x = self.g.mul(repeated, weights);
        }
        let hidden = self.expert_hidden(il, x, ids, experts.activation)?;
        let mut out = self.expert_linear(il, "ffn_down_exps", hidden, ids)?;
        if self.hp.arch() == "mistral4" && self.g[out].op == Op::MulMatId {
            // Its activations exceed the range of half precision.
            self.g[out].op = Op::MulMatIdF32;
        }
        if !experts.weight_before {
            out = self.g.mul(out, weights);
        }
        self.g.expand(out);
        Ok(self.sum_experts(out))
    }

    fn expert_hidden(
        &mut self,
        il: usize,
        x: Id,
        ids: Id,
        activation: Activation,
    ) -> Result<Id, Error> {
        if self.has(il, "ffn_gate_up_exps", "weight") {
            let both = self.expert_linear(il, "ffn_gate_up_exps", x, ids)?;
            let ([n, used, tokens, _], nb) = (self.g[both].ne, self.g[both].nb);
            let half = [n / 2, used, tokens];
            let gate = self.g.view(both, &half, &nb[1..3], 0);
            let up = self.g.view(both, &half, &nb[1..3], n / 2 * nb[0]);
            return Ok(self.gate(activation, gate, up));
        }
        let up = self.expert_linear(il, "ffn_up_exps", x, ids)?;
        if !self.has(il, "ffn_gate_exps", "weight") {
            return Ok(self.activate(activation, up));
        }
        let gate = self.expert_linear(il, "ffn_gate_exps", x, ids)?;
        Ok(self.gate(activation, gate, up))
    }

    /// The matrices of the selected experts, with their scales and biases.
    fn expert_linear(&mut self, il: usize, name: &str, x: Id, ids: Id) -> Result<Id, Error> {
        let weight = self.weight(il, name, "weight")?;
        let mut y = self.g.mul_mat_id(weight, x, ids);
        if applies_scale(self.hp.arch(), name)
            && let Some(scale) = self.find(il, name, "scale")
        {
            let (experts, n) = (self.g[scale].ne[0], self.g[x].ne[2]);
            let mut scales = self.g.reshape(scale, &[1, experts, 1]);
            scales = self.g.repeat(scales, &[1, experts, n]);
            scales = self.g.get_rows(scales, ids);
            y = self.g.mul(y, scales);
        }
        if let Some(bias) = self.find(il, name, "bias") {
            y = self.g.add_id(y, bias, ids);
        }
        Ok(y)
    }

    /// The selected experts of each token, and their weights.
    fn select_experts(
        &mut self,
        il: usize,
        logits: Id,
        experts: Experts,
    ) -> Result<(Id, Id), Error> {
        let used = self.hp.n_expert_used(il);
        let [n_expert, n, ..] = self.g[logits].ne;
        let probabilities = match experts.gating {
            Gating::Softmax => self.g.soft_max(logits, None),
            Gating::Sigmoid => self.g.unary(Unary::Sigmoid, logits),
            Gating::SoftmaxOfSelected => logits,
            Gating::SqrtSoftplus => {
                let softplus = self.g.unary(Unary::Softplus, logits);
                self.g.sqrt(softplus)
            }
        };
        let mut scores = probabilities;
        // Hunyuan 3 names it without an ending.
        let bias = match self.hp.arch() {
            "hy_v3" => self.find_global(&format!("blk.{il}.exp_probs_b")),
            _ => self.find(il, "exp_probs_b", "bias"),
        };
        if let Some(bias) = bias {
            scores = self.g.add(probabilities, bias);
        }
        if experts.weight_before {
            scores = logits;
        }
        let groups = self.hp.keys.opt_dim("expert_group_count")?.unwrap_or(0);
        if groups > 1 {
            let used = self
                .hp
                .keys
                .opt_dim("expert_group_used_count")?
                .unwrap_or(0);
            scores = self.mask_groups(scores, groups, used);
        }
        let ids = self.g.argsort_top_k(scores, used);
        let rows = self.g.reshape(probabilities, &[1, n_expert, n]);
        let mut weights = self.g.get_rows(rows, ids);
        if experts.gating == Gating::SoftmaxOfSelected {
            weights = self.g.reshape(weights, &[used, n]);
            weights = self.g.soft_max(weights, None);
            weights = self.g.reshape(weights, &[1, used, n]);
        }
        if experts.normalize {
            weights = self.g.reshape(weights, &[used, n]);
            let mut sum = self.g.sum_rows(weights);
            sum = self.g.clamp(sum);
            weights = self.g.div(weights, sum);
            weights = self.g.reshape(weights, &[1, used, n]);
        }
        if experts.scale {
            weights = self.g.scale(weights);
        }
        Ok((ids, weights))
    }

    /// Scores of experts in groups that are not selected become minus infinity (DeepSeek V3).
    fn mask_groups(&mut self, scores: Id, groups: u64, groups_used: u64) -> Id {
        let [n_expert, n, ..] = self.g[scores].ne;
        let per_group = n_expert / groups;
        let grouped = self.g.reshape(scores, &[per_group, groups, n]);
        let best = self.g.argsort_top_k(grouped, 2);
        let columns = self.g.reshape(grouped, &[1, per_group, groups, n]);
        let mut group_scores = self.g.get_rows(columns, best);
        group_scores = self.g.reshape(group_scores, &[2, groups, n]);
        group_scores = self.g.sum_rows(group_scores);
        group_scores = self.g.reshape(group_scores, &[groups, n]);
        let selected = self.g.argsort_top_k(group_scores, groups_used);
        let rows = self.g.get_rows(grouped, selected);
        let masked = self.g.fill(grouped);
        let scores = self.g.set_rows(masked, rows, selected);
        self.g.reshape(scores, &[n_expert, n])
    }

    /// The sum over experts of `[width, experts, tokens]`.
    fn sum_experts(&mut self, out: Id) -> Id {
        let ([width, used, n, _], nb) = (self.g[out].ne, self.g[out].nb);
        let views: Vec<Id> = (0..used)
            .map(|i| {
                let view = self
                    .g
                    .view(out, &[width, n], &[nb[2]], i.saturating_mul(nb[1]));
                self.g.expand(view);
                view
            })
            .collect();
        let Some((first, rest)) = views.split_first() else {
            return out;
        };
        let mut sum = *first;
        for view in rest {
            sum = self.g.add(sum, *view);
            self.g.expand(sum);
        }
        if used == 1 { self.g.cont(sum) } else { sum }
    }
}
