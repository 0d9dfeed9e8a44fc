//! What CUDA asks the allocator to keep alive so that it can fuse nodes: `ggml_backend_cuda_graph_optimize`.
//!
//! A node that would be read no more stays until a later node is computed. Only mixture-of-experts graphs have such groups: a
//! shared expert beside the routed ones, the selection of experts, and their weighted sum.

use std::ops::Range;

use super::graph::{F32, Glu, Graph, Id, Op, Tensor, Unary, is_quantized};

/// Experts in a weighted sum that is fused, at most.
const MAX_REDUCED: u64 = 15;

/// What is kept until a node is computed, by that node's number.
pub type Kept = Vec<Vec<Id>>;

/// Adds what CUDA keeps alive within one split, `range` of the order. May reorder nodes within it.
pub fn keep_alive(g: &mut Graph, range: Range<usize>, kept: &mut Kept) {
    shared_experts(g, range.clone(), kept);
    let mut at = range.start;
    while at < range.end {
        let split = Nodes {
            g,
            nodes: &g.nodes[at..range.end],
        };
        if let Some(sum) = split.weighted_sum() {
            keep(kept, sum.until, &sum.keep);
            at += sum.len - 1;
        }
        // llama.cpp looks at the last node of the sum again, which is none of those below.
        let split = Nodes {
            g,
            nodes: &g.nodes[at..range.end],
        };
        let len = split.selection();
        if let (1.., Some(until)) = (len, g.nodes.get(at + len)) {
            for id in &g.nodes[at..at + len] {
                keep(kept, *until, &[*id]);
                keep(kept, *until, g[*id].src());
            }
            at += len - 1;
        }
        at += 1;
    }
}

fn keep(kept: &mut Kept, until: Id, ids: &[Id]) {
    let Some(list) = kept.get_mut(until.index()) else {
        return;
    };
    for id in ids {
        if !list.contains(id) {
            list.push(*id);
        }
    }
}

/// Moves the three nodes of a shared expert behind those of the routed ones, and keeps their input and the selection.
fn shared_experts(g: &mut Graph, range: Range<usize>, kept: &mut Kept) {
    let mut i = range.start;
    while i + 5 < range.end {
        if g[g.nodes[i]].op == Op::MulMatId
            && let Some(j) = find_shared(g, i, range.end)
        {
            g.nodes[i + 3..j + 3].rotate_right(3);
            let up = g[g.nodes[i + 2]].src()[1];
            let until = g.nodes[i + 5];
            let sources: Vec<Id> = g[up].src()[1..3].to_vec();
            keep(kept, until, &sources);
            i += 5;
        }
        i += 1;
    }
}

fn find_shared(g: &Graph, routed: usize, end: usize) -> Option<usize> {
    let op = |i: usize| g[g.nodes[i]].op;
    for j in routed + 3..end.saturating_sub(2) {
        if op(j) == Op::MulMatId && op(j + 1) == Op::MulMatId {
            return None;
        }
        if op(j) == Op::MulMat && is_shared_expert(g, routed, j) {
            return Some(j);
        }
    }
    None
}

/// Gate and up of a gated product: their nodes, if `glu` multiplies exactly the two before it.
fn gated(g: &Graph, at: usize, op: Op) -> Option<(Id, Id)> {
    let [a, b, glu] = [g.nodes[at], g.nodes[at + 1], g.nodes[at + 2]];
    let [gate, up] = *g[glu].src() else {
        return None;
    };
    let known = [Glu::Swiglu, Glu::Geglu, Glu::SwigluOai, Glu::SwigluClamp];
    let fuses = matches!(g[glu].op, Op::Glu(f) if known.contains(&f));
    let pair = (gate == a && up == b) || (gate == b && up == a);
    let [gate_weight, up_weight] = [g[gate].src().first()?, g[up].src().first()?].map(|id| &g[*id]);
    let same = gate_weight.same_layout(up_weight) && g[gate].src()[1..] == g[up].src()[1..];
    let unread = [a, b].iter().all(|id| g.uses(*id) == 1 && !g[*id].output);
    (fuses && pair && same && unread && g[a].op == op && g[b].op == op).then_some((gate, up))
}

/// Whether the nodes at `shared` are a shared expert of the same kind as the routed ones at `routed`
/// (`ggml_cuda_match_shared_expert`).
fn is_shared_expert(g: &Graph, routed: usize, shared: usize) -> bool {
    let (Some((_, up)), Some((shared_gate, shared_up))) =
        (gated(g, routed, Op::MulMatId), gated(g, shared, Op::MulMat))
    else {
        return false;
    };
    let tensor = |id: Id, i: usize| &g[g[id].src()[i]];
    let (weight, input) = (tensor(up, 0), tensor(up, 1));
    let shared_input = g[shared_up].src()[1];
    let is_matrix = |t: &Tensor| t.ne[2] == 1 && t.ne[3] == 1;
    let (products, shared_weight) = (
        [routed + 2, shared + 2].map(|i| &g[g.nodes[i]]),
        tensor(shared_up, 0),
    );
    weight.home.is_some()
        && is_quantized(weight.ty)
        && input.op == Op::Reshape
        && input.src().first() == Some(&shared_input)
        && input.ne[1] == 1
        && input.ne[3] == 1
        && input.is_contiguous()
        && g[shared_input].is_contiguous()
        && is_matrix(&g[shared_input])
        && weight.ty == shared_weight.ty
        && weight.ne[..2] == shared_weight.ne[..2]
        && weight.nb[1] == shared_weight.nb[1]
        && weight.ne[3] == 1
        && is_matrix(shared_weight)
        && [shared_weight, tensor(shared_gate, 0)]
            .iter()
            .all(|w| w.is_contiguous() && w.op == Op::None)
        && products[0].op == products[1].op
}

/// The rest of a split from some node on.
struct Nodes<'a> {
    g: &'a Graph,
    nodes: &'a [Id],
}

/// The nodes of `experts * weights`, summed over the experts.
struct WeightedSum {
    keep: Vec<Id>,
    until: Id,
    len: usize,
}

impl Nodes<'_> {
    fn get(&self, i: usize) -> Option<&Tensor> {
        self.nodes.get(i).map(|id| &self.g[*id])
    }

    fn is(&self, i: usize, op: Op) -> bool {
        self.get(i).is_some_and(|t| t.op == op)
    }

    /// Whether source `source` of node `i` is node `of`.
    fn reads(&self, i: usize, source: usize, of: usize) -> bool {
        self.get(i)
            .is_some_and(|t| t.src().get(source) == self.nodes.get(of))
    }

    /// Whether the first `len` nodes are read by each other only, but for those in `outputs` (`ggml_can_fuse_subgraph`).
    fn is_closed(&self, len: usize, outputs: &[usize]) -> bool {
        let Some(group) = self.nodes.get(..len) else {
            return false;
        };
        group.iter().enumerate().all(|(i, id)| {
            if outputs.contains(&i) {
                return true;
            }
            let t = &self.g[*id];
            let sources = group[i + 1..].iter().flat_map(|later| self.g[*later].src());
            let inside = t.view.is_none_or(|view| {
                group.contains(&view) || self.g[view].home.is_some_and(|home| home.weights)
            });
            !t.output
                && inside
                && sources.filter(|source| *source == id).count() == self.g.uses(*id) as usize
        })
    }

    /// The number of nodes of a selection of experts that starts here; 0 if none does (`ggml_cuda_topk_moe_fusion`).
    fn selection(&self) -> usize {
        let probabilities = match self.get(0).map(|t| t.op) {
            Some(Op::SoftMax) => 0,
            Some(Op::Unary(Unary::Sigmoid)) => 0,
            Some(Op::Unary(Unary::Softplus)) if self.is(1, Op::Sqrt) && self.reads(1, 0, 0) => 1,
            _ => return 0,
        };
        let mut i = probabilities + 1;
        let reshaped = i;
        if !(self.is(i, Op::Reshape) && self.reads(i, 0, probabilities)) {
            return 0;
        }
        i += 1;
        let biased = self.is(i, Op::Add) && self.reads(i, 0, probabilities);
        i += usize::from(biased);
        let scores = if biased { i - 1 } else { probabilities };
        if !(self.is(i, Op::Argsort) && self.reads(i, 0, scores)) {
            return 0;
        }
        let ids = i + 1;
        if !(self.is(ids, Op::View) && self.reads(ids, 0, i)) {
            return 0;
        }
        i += 2;
        if !(self.is(i, Op::GetRows) && self.reads(i, 0, reshaped) && self.reads(i, 1, ids)) {
            return 0;
        }
        i += 1;
        if self.is_normalized(i) {
            i += 5;
        }
        if self.is(i, Op::Scale) && self.reads(i, 0, i - 1) {
            i += 1;
        }
        if self.is_closed(i, &[ids, i - 1]) && self.selects(ids, i - 1) {
            i
        } else {
            0
        }
    }

    /// Whether weights are divided by their sum from node `i` on.
    fn is_normalized(&self, i: usize) -> bool {
        let ops = [Op::Reshape, Op::SumRows, Op::Clamp];
        let chain = |(k, op)| self.is(i + k, op) && self.reads(i + k, 0, i + k - 1);
        ops.into_iter().enumerate().all(chain)
            && self.is(i + 3, Op::Div)
            && self.reads(i + 3, 1, i + 2)
            && self.reads(i + 3, 0, i)
            && self.is(i + 4, Op::Reshape)
            && self.reads(i + 4, 0, i + 3)
    }

    /// Whether the kernel knows the number of experts and the layout (`ggml_cuda_should_use_topk_moe`).
    fn selects(&self, ids: usize, weights: usize) -> bool {
        let (Some(gate), Some(ids), Some(weights)) =
            (self.get(0), self.get(ids), self.get(weights))
        else {
            return false;
        };
        let experts = ids.nb[1] / ids.nb[0];
        let logits = gate.src().first().map(|id| &self.g[*id]);
        ((experts.is_power_of_two() && experts <= 512) || matches!(experts, 288 | 576))
            && weights.is_contiguous()
            && logits.is_some_and(Tensor::is_contiguous)
            && gate.src().len() == 1
    }

    /// The weighted sum of experts that starts here (`ggml_cuda_match_moe_weighted_reduction`).
    fn weighted_sum(&self) -> Option<WeightedSum> {
        let first = self.factors(0)?;
        let (keep, muls) = match self.factors(1) {
            // Experts scaled by a factor of their own before the router's weight.
            Some((experts, weights)) if experts == self.nodes[0] => {
                (vec![first.0, weights, first.1], 2)
            }
            _ => (vec![first.0, first.1], 1),
        };
        let weighted_id = self.nodes[muls - 1];
        let weighted = &self.g[weighted_id];
        let used = weighted.ne[1];
        if !(2..=MAX_REDUCED).contains(&used) {
            return None;
        }
        let used = used as usize;
        let len = 2 * used + muls - 1;
        let (mut views, mut previous, mut adds): (Vec<Id>, _, _) = (Vec::new(), None, 0);
        for id in self.nodes.get(muls..len)? {
            let t = &self.g[*id];
            if t.op == Op::View {
                if views.len() == used || !is_expert(t, weighted_id, weighted, views.len() as u64) {
                    return None;
                }
                views.push(*id);
            } else {
                if t.op != Op::Add || adds + 1 >= views.len() {
                    return None;
                }
                let left = previous.unwrap_or(views[0]);
                if t.src() != [left, views[adds + 1]] {
                    return None;
                }
                previous = Some(*id);
                adds += 1;
            }
        }
        let until = previous?;
        let complete = views.len() == used && adds + 1 == used && self.g[until].is_contiguous();
        (complete && self.is_closed(len, &[len - 1])).then_some(WeightedSum { keep, until, len })
    }

    /// The two factors of a product of all experts with one weight each, the experts first.
    fn factors(&self, i: usize) -> Option<(Id, Id)> {
        let mul = self.get(i)?;
        if mul.op != Op::Mul || mul.ty != F32 || !mul.is_contiguous() {
            return None;
        }
        let [a, b] = *mul.src() else {
            return None;
        };
        let dense = |t: &Tensor| t.ty == F32 && t.is_contiguous();
        let is_experts = |id: Id| dense(&self.g[id]) && self.g[id].ne == mul.ne;
        let is_weights = |id: Id| {
            dense(&self.g[id]) && self.g[id].ne[0] == 1 && self.g[id].ne[1..] == mul.ne[1..]
        };
        if is_experts(a) && is_weights(b) {
            Some((a, b))
        } else if is_experts(b) && is_weights(a) {
            Some((b, a))
        } else {
            None
        }
    }
}

/// Whether `t` is the output of expert number `n` within `weighted`.
fn is_expert(t: &Tensor, weighted_id: Id, weighted: &Tensor, n: u64) -> bool {
    t.view == Some(weighted_id)
        && t.src().first() == Some(&weighted_id)
        && t.ne == [weighted.ne[0], weighted.ne[2] * weighted.ne[3], 1, 1]
        && t.nb[1] == weighted.nb[2]
        && t.offset == n * weighted.nb[1]
}
