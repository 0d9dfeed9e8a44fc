//! The constructors of ggml that llama.cpp's graphs use, with ggml's shapes, strides and order of sources.

use super::graph::{F16, F32, Glu, Graph, I32, Id, Op, Unary, contiguous, extents};
use crate::gguf::GgmlType;

/// Matrices and rows.
impl Graph {
    /// `a` transposed times `b`; `a` is broadcast over the outer dimensions of `b`.
    pub fn mul_mat(&mut self, a: Id, b: Id) -> Id {
        let (rows, [_, n, n2, n3]) = (self[a].ne[1], self[b].ne);
        self.node(Op::MulMat, F32, &[rows, n, n2, n3], &[a, b])
    }

    /// For each column the product with those of the matrices `experts` that `ids` selects.
    pub fn mul_mat_id(&mut self, experts: Id, b: Id, ids: Id) -> Id {
        let ne = [self[experts].ne[1], self[ids].ne[0], self[b].ne[2]];
        self.node(Op::MulMatId, F32, &ne, &[experts, b, ids])
    }

    /// The rows of `a` that `rows` names.
    pub fn get_rows(&mut self, a: Id, rows: Id) -> Id {
        let ty = if self[a].ty == I32 { I32 } else { F32 };
        let (width, [n, n1, n2, _]) = (self[a].ne[0], self[rows].ne);
        self.node(Op::GetRows, ty, &[width, n, n1, n2], &[a, rows])
    }

    /// `to` with `rows` written at the places `at`; lies in `to`.
    pub fn set_rows(&mut self, to: Id, rows: Id, at: Id) -> Id {
        self.in_place_of(Op::SetRows, to, &[rows, at, to])
    }

    /// `from` written to `to`; lies in `to`.
    pub fn cpy(&mut self, from: Id, to: Id) -> Id {
        self.in_place_of(Op::Cpy, to, &[from, to])
    }

    /// A converted copy; it reads itself, as ggml has it.
    pub fn cast(&mut self, a: Id, ty: GgmlType) -> Id {
        let ne = self[a].ne;
        let cast = self.node(Op::Cpy, ty, &ne, &[a]);
        self.read_itself(cast);
        cast
    }

    fn in_place_of(&mut self, op: Op, to: Id, src: &[Id]) -> Id {
        let (ne, nb) = (self[to].ne, self[to].nb);
        self.node_in(op, to, ne, nb, 0, src)
    }
}

/// Element-wise operations: the shape and type of the first source, without its gaps.
impl Graph {
    fn like(&mut self, op: Op, a: Id, src: &[Id]) -> Id {
        let (ty, ne) = (self[a].ty, self[a].ne);
        self.node(op, ty, &ne, src)
    }

    /// Sum; `b` is broadcast.
    pub fn add(&mut self, a: Id, b: Id) -> Id {
        self.like(Op::Add, a, &[a, b])
    }

    /// Sum with the rows of `b` that `ids` selects.
    pub fn add_id(&mut self, a: Id, b: Id, ids: Id) -> Id {
        self.like(Op::AddId, a, &[a, b, ids])
    }

    /// Difference; `b` is broadcast.
    pub fn sub(&mut self, a: Id, b: Id) -> Id {
        self.like(Op::Sub, a, &[a, b])
    }

    /// Product; `b` is broadcast.
    pub fn mul(&mut self, a: Id, b: Id) -> Id {
        self.like(Op::Mul, a, &[a, b])
    }

    /// Quotient; `b` is broadcast.
    pub fn div(&mut self, a: Id, b: Id) -> Id {
        self.like(Op::Div, a, &[a, b])
    }

    /// Multiplied by a constant.
    pub fn scale(&mut self, a: Id) -> Id {
        self.like(Op::Scale, a, &[a])
    }

    /// Kept within bounds.
    pub fn clamp(&mut self, a: Id) -> Id {
        self.like(Op::Clamp, a, &[a])
    }

    /// The shape of `a` filled with a constant.
    pub fn fill(&mut self, a: Id) -> Id {
        self.like(Op::Fill, a, &[a])
    }

    /// Square.
    pub fn sqr(&mut self, a: Id) -> Id {
        self.like(Op::Sqr, a, &[a])
    }

    /// Square root.
    pub fn sqrt(&mut self, a: Id) -> Id {
        self.like(Op::Sqrt, a, &[a])
    }

    /// A function of one argument.
    pub fn unary(&mut self, f: Unary, a: Id) -> Id {
        self.like(Op::Unary(f), a, &[a])
    }

    /// A copy.
    pub fn dup(&mut self, a: Id) -> Id {
        self.like(Op::Dup, a, &[a])
    }

    /// Root mean square norm.
    pub fn rms_norm(&mut self, a: Id) -> Id {
        self.like(Op::RmsNorm, a, &[a])
    }

    /// Layer norm.
    pub fn norm(&mut self, a: Id) -> Id {
        self.like(Op::Norm, a, &[a])
    }

    /// Euclidean norm.
    pub fn l2_norm(&mut self, a: Id) -> Id {
        self.like(Op::L2Norm, a, &[a])
    }

    /// Norm over groups of channels.
    pub fn group_norm(&mut self, a: Id) -> Id {
        self.like(Op::GroupNorm, a, &[a])
    }

    /// Rotary positions, with frequency factors if the model has any.
    pub fn rope(&mut self, a: Id, pos: Id, factors: Option<Id>) -> Id {
        match factors {
            Some(factors) => self.like(Op::Rope, a, &[a, pos, factors]),
            None => self.like(Op::Rope, a, &[a, pos]),
        }
    }

    /// Softmax over rows, with a mask if there is one.
    pub fn soft_max(&mut self, a: Id, mask: Option<Id>) -> Id {
        match mask {
            Some(mask) => self.like(Op::SoftMax, a, &[a, mask]),
            None => self.like(Op::SoftMax, a, &[a]),
        }
    }

    /// A gated activation of two tensors.
    pub fn glu(&mut self, f: Glu, gate: Id, up: Id) -> Id {
        self.like(Op::Glu(f), gate, &[gate, up])
    }

    /// A gated activation of the two halves of each row.
    pub fn glu_halves(&mut self, f: Glu, a: Id) -> Id {
        let (ty, [n0, n1, n2, n3]) = (self[a].ty, self[a].ne);
        self.node(Op::Glu(f), ty, &[n0 / 2, n1, n2, n3], &[a])
    }
}

/// Views: the memory of the source with another shape.
impl Graph {
    /// The given extents, without gaps.
    pub fn reshape(&mut self, a: Id, ne: &[u64]) -> Id {
        let ne = extents(ne);
        let nb = contiguous(self[a].ty, ne);
        self.node_in(Op::Reshape, a, ne, nb, 0, &[a])
    }

    /// The given extents, the strides of all dimensions but the first, and the offset in bytes. A stride that is left out is
    /// that of a tensor without gaps.
    pub fn view(&mut self, a: Id, ne: &[u64], nb: &[u64], offset: u64) -> Id {
        let ne = extents(ne);
        let mut strides = contiguous(self[a].ty, ne);
        for i in 1..4 {
            strides[i] = match nb.get(i - 1) {
                Some(nb) => *nb,
                None if i == 1 => strides[1],
                None => strides[i - 1].saturating_mul(ne[i - 1]),
            };
        }
        self.node_in(Op::View, a, ne, strides, offset, &[a])
    }

    /// Dimension `i` of the source becomes dimension `axes[i]`.
    pub fn permute(&mut self, a: Id, axes: [usize; 4]) -> Id {
        let (from_ne, from_nb) = (self[a].ne, self[a].nb);
        let (mut ne, mut nb) = ([1; 4], [0; 4]);
        for (i, axis) in axes.into_iter().enumerate() {
            ne[axis] = from_ne[i];
            nb[axis] = from_nb[i];
        }
        self.node_in(Op::Permute, a, ne, nb, 0, &[a])
    }

    /// The first two dimensions exchanged.
    pub fn transpose(&mut self, a: Id) -> Id {
        let ([n0, n1, n2, n3], [b0, b1, b2, b3]) = (self[a].ne, self[a].nb);
        self.node_in(
            Op::Transpose,
            a,
            [n1, n0, n2, n3],
            [b1, b0, b2, b3],
            0,
            &[a],
        )
    }

    /// A copy without gaps.
    pub fn cont(&mut self, a: Id) -> Id {
        self.like(Op::Cont, a, &[a])
    }

    /// A copy without gaps, with other extents.
    pub fn cont_as(&mut self, a: Id, ne: &[u64]) -> Id {
        let ty = self[a].ty;
        self.node(Op::Cont, ty, ne, &[a])
    }
}

/// Operations that change the shape.
impl Graph {
    /// `a` and `b` one behind the other in dimension `dim`.
    pub fn concat(&mut self, a: Id, b: Id, dim: usize) -> Id {
        let (ty, mut ne) = (self[a].ty, self[a].ne);
        ne[dim] = ne[dim].saturating_add(self[b].ne[dim]);
        self.node(Op::Concat, ty, &ne, &[a, b])
    }

    /// Zeros behind the end of each dimension.
    pub fn pad(&mut self, a: Id, by: [u64; 4]) -> Id {
        let (ty, mut ne) = (self[a].ty, self[a].ne);
        for (ne, by) in ne.iter_mut().zip(by) {
            *ne = ne.saturating_add(by);
        }
        self.node(Op::Pad, ty, &ne, &[a])
    }

    /// Repeated to the given extents.
    pub fn repeat(&mut self, a: Id, ne: &[u64]) -> Id {
        let ty = self[a].ty;
        self.node(Op::Repeat, ty, ne, &[a])
    }

    /// Sum of each row.
    pub fn sum_rows(&mut self, a: Id) -> Id {
        let (ty, [_, n1, n2, n3]) = (self[a].ty, self[a].ne);
        self.node(Op::SumRows, ty, &[1, n1, n2, n3], &[a])
    }

    /// Mean of each row.
    pub fn mean(&mut self, a: Id) -> Id {
        let [_, n1, n2, n3] = self[a].ne;
        self.node(Op::Mean, F32, &[1, n1, n2, n3], &[a])
    }

    /// The order of the elements of each row.
    pub fn argsort(&mut self, a: Id) -> Id {
        let ne = self[a].ne;
        self.node(Op::Argsort, I32, &ne, &[a])
    }

    /// The numbers of the `k` largest elements of each row: a view of their order.
    pub fn argsort_top_k(&mut self, a: Id, k: u64) -> Id {
        let sorted = self.argsort(a);
        let ([_, n1, n2, n3], nb) = (self[sorted].ne, self[sorted].nb);
        self.view(sorted, &[k, n1, n2, n3], &nb[1..], 0)
    }

    /// Attention in one node. `q`, `k` and `v` have the width of a head first, then the position, then the head, then the stream.
    pub fn flash_attn_ext(&mut self, q: Id, k: Id, v: Id, mask: Option<Id>, alibi: bool) -> Id {
        let ([_, n, heads, streams], width) = (self[q].ne, self[v].ne[0]);
        let ne = [width, heads, n, streams];
        let op = Op::FlashAttnExt { alibi };
        match mask {
            Some(mask) => self.node(op, F32, &ne, &[q, k, v, mask]),
            None => self.node(op, F32, &ne, &[q, k, v]),
        }
    }

    /// Attention sinks for a softmax or a flash attention node that has a mask.
    pub fn add_sinks(&mut self, node: Id, sinks: Option<Id>) {
        if let Some(sinks) = sinks {
            self.add_source(node, sinks);
        }
    }

    /// As half precision, if it is single precision: what flash attention needs of keys and values that come from no cache.
    pub fn as_half(&mut self, a: Id) -> Id {
        if self[a].ty == F32 {
            self.cast(a, F16)
        } else {
            a
        }
    }
}
