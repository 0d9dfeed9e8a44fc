//! The graph that llama.cpp hands to its scheduler: tensors with shapes and strides but no data.
//!
//! A tensor is what `ggml_tensor` is, less its contents. What decides about memory is kept exactly as ggml has it: strides (a copy
//! keeps those of its source), the root of a view, the order of sources, and how often a node is used. Sizes saturate: what is
//! beyond 2^64 bytes is larger than any device all the same.

use crate::gguf::GgmlType;

/// Element types that a graph makes itself.
pub const F32: GgmlType = GgmlType(0);
/// Half precision: masks, and caches by default.
pub const F16: GgmlType = GgmlType(1);
/// Token numbers, positions, selected experts.
pub const I32: GgmlType = GgmlType(26);
/// Rows of a cache that are written.
pub const I64: GgmlType = GgmlType(27);
/// Brain float.
pub const BF16: GgmlType = GgmlType(30);

/// Sources that a node can have (`GGML_MAX_SRC`).
pub const MAX_SRC: usize = 10;

/// A tensor of a [`Graph`], by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(super) u32);

impl Id {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a buffer lives and a node runs, in the scheduler's order of priority: the devices, then the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Backend(pub u8);

impl Backend {
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Element-wise functions of one argument (`ggml_unary_op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are ggml's own")]
pub enum Unary {
    Abs,
    Exp,
    Gelu,
    Neg,
    Relu,
    Sigmoid,
    Silu,
    Softplus,
    Tanh,
    Xielu,
}

/// Gated activations (`ggml_glu_op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are ggml's own")]
pub enum Glu {
    Reglu,
    Geglu,
    Swiglu,
    SwigluOai,
    SwigluClamp,
}

/// What a node computes (`ggml_op`), as far as memory depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are ggml's own")]
pub enum Op {
    None,
    Add,
    AddId,
    Argsort,
    Clamp,
    Concat,
    Cont,
    Cpy,
    Cumsum,
    Diag,
    Div,
    Dup,
    Fill,
    FlashAttnExt {
        alibi: bool,
    },
    GatedDeltaNet,
    GatedLinearAttn,
    GetRows,
    Glu(Glu),
    GroupNorm,
    L2Norm,
    LightningIndexer,
    Mean,
    Mul,
    MulMat,
    MulMatId,
    /// The same with the activations in single precision, which CUDA has not.
    MulMatIdF32,
    Norm,
    Pad,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    RwkvWkv6,
    RwkvWkv7,
    Scale,
    SetRows,
    SoftMax,
    SolveTri,
    Sqr,
    Sqrt,
    SsmConv,
    SsmScan,
    Sub,
    SumRows,
    TopK,
    Transpose,
    Tri,
    Unary(Unary),
    View,
}

impl Op {
    /// An operation that computes nothing: its result lies in its source (`ggml_is_view_op`).
    pub fn is_view(self) -> bool {
        matches!(self, Op::View | Op::Reshape | Op::Permute | Op::Transpose)
    }

    /// Whether the result may take the memory of a source that nobody else reads (`ggml_op_can_inplace`).
    pub fn can_inplace(self) -> bool {
        matches!(
            self,
            Op::Add
                | Op::AddId
                | Op::Sub
                | Op::Mul
                | Op::Div
                | Op::Sqr
                | Op::Sqrt
                | Op::Unary(_)
                | Op::Scale
                | Op::Fill
                | Op::Rope
                | Op::RmsNorm
                | Op::Clamp
                | Op::SoftMax
        )
    }
}

/// A buffer outside the graph: of weights, or of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// Whose memory it is.
    pub backend: Backend,
    /// Weights draw the nodes that read them to their backend; a cache only those that write to it.
    pub weights: bool,
}

/// One tensor.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The operation; `None` for a leaf.
    pub op: Op,
    /// Element type.
    pub ty: GgmlType,
    /// Extents, innermost first.
    pub ne: [u64; 4],
    /// Strides in bytes.
    pub nb: [u64; 4],
    /// The tensor whose memory this one lies in; never itself a view.
    pub view: Option<Id>,
    /// Offset into the memory of `view`, in bytes.
    pub offset: u64,
    /// Set from outside before the graph runs.
    pub input: bool,
    /// Read from outside after the graph ran: never freed, never reused.
    pub output: bool,
    /// The buffer, if it is not the graph's own.
    pub home: Option<Home>,
    src: [Id; MAX_SRC],
    n_src: u8,
}

/// (values, bytes) of a block; a type that llama.cpp does not know counts as single bytes.
fn block(ty: GgmlType) -> (u64, u64) {
    ty.block().unwrap_or((1, 1))
}

/// Whether values are stored in blocks with a scale (`ggml_is_quantized`).
pub fn is_quantized(ty: GgmlType) -> bool {
    block(ty).0 > 1
}

/// Bytes of `n` values in a row (`ggml_row_size`).
pub fn row_size(ty: GgmlType, n: u64) -> u64 {
    let (values, bytes) = block(ty);
    n.saturating_mul(bytes) / values
}

/// Strides of a tensor without gaps.
pub(super) fn contiguous(ty: GgmlType, ne: [u64; 4]) -> [u64; 4] {
    let nb1 = row_size(ty, ne[0]);
    let nb2 = nb1.saturating_mul(ne[1]);
    [block(ty).1, nb1, nb2, nb2.saturating_mul(ne[2])]
}

/// Four extents from up to four; what is not given is 1.
pub(super) fn extents(ne: &[u64]) -> [u64; 4] {
    let mut out = [1; 4];
    for (out, ne) in out.iter_mut().zip(ne) {
        *out = *ne;
    }
    out
}

impl Tensor {
    /// The sources in order.
    pub fn src(&self) -> &[Id] {
        &self.src[..usize::from(self.n_src)]
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.ne.iter().fold(1, |n, ne| n.saturating_mul(*ne))
    }

    /// The number of rows (`ggml_nrows`).
    pub fn rows(&self) -> u64 {
        self.ne[1..].iter().fold(1, |n, ne| n.saturating_mul(*ne))
    }

    /// Bytes from the first element to the last, gaps included (`ggml_nbytes`).
    pub fn bytes(&self) -> u64 {
        if self.ne.contains(&0) {
            return 0;
        }
        let (values, bytes) = block(self.ty);
        let (first, from) = if values == 1 {
            (bytes, 0)
        } else {
            (self.ne[0].saturating_mul(self.nb[0]) / values, 1)
        };
        (from..4).fold(first, |sum, i| {
            sum.saturating_add((self.ne[i] - 1).saturating_mul(self.nb[i]))
        })
    }

    /// Whether there are no gaps and no permutation from dimension `dim` on (`ggml_is_contiguous_n`): dimensions up to `dim` are free.
    pub fn is_contiguous_from(&self, dim: usize) -> bool {
        let (values, bytes) = block(self.ty);
        if self.ne[0] != values && self.nb[0] != bytes {
            return false;
        }
        let mut next = row_size(self.ty, self.ne[0]);
        for i in 1..4 {
            if i > dim {
                if self.ne[i] != 1 && self.nb[i] != next {
                    return false;
                }
                next = next.saturating_mul(self.ne[i]);
            } else {
                next = self.ne[i].saturating_mul(self.nb[i]);
            }
        }
        true
    }

    /// Whether there are no gaps and no permutation (`ggml_is_contiguous`).
    pub fn is_contiguous(&self) -> bool {
        self.is_contiguous_from(0)
    }

    /// Same type, extents and strides (`ggml_are_same_layout`).
    pub fn same_layout(&self, other: &Tensor) -> bool {
        self.ty == other.ty && self.ne == other.ne && self.nb == other.nb
    }

    /// A leaf or node of its own.
    fn new(op: Op, ty: GgmlType, ne: [u64; 4], src: &[Id]) -> Tensor {
        let mut sources = [Id(0); MAX_SRC];
        let n = src.len().min(MAX_SRC);
        sources[..n].copy_from_slice(&src[..n]);
        Tensor {
            op,
            ty,
            ne,
            nb: contiguous(ty, ne),
            view: None,
            offset: 0,
            input: false,
            output: false,
            home: None,
            src: sources,
            n_src: n as u8,
        }
    }
}

/// Tensors, and the order in which those that were asked for are computed.
#[derive(Debug, Default)]
pub struct Graph {
    tensors: Vec<Tensor>,
    visited: Vec<bool>,
    uses: Vec<u32>,
    /// Nodes that are being visited, and their next source; kept for its memory.
    stack: Vec<(Id, usize)>,
    /// Leaves in the order in which they were met.
    pub leafs: Vec<Id>,
    /// Nodes in the order of computation.
    pub nodes: Vec<Id>,
    /// Norms before their weight, by layer: llama.cpp binds them to the layer's device.
    pub norms: Vec<(Id, usize)>,
    /// Nodes of fused operations by layer: llama.cpp gives an operation up where one is not on its layer's device.
    pub fused: Vec<(Fused, Id, usize)>,
}

/// An operation that llama.cpp uses only if every layer's device has it (`llm_fused_op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// Flash attention.
    FlashAttention,
    /// Gated delta net, one token at a time.
    DeltaNetAutoregressive,
    /// Gated delta net in chunks.
    DeltaNetChunked,
    /// The indexer of sparse attention.
    LightningIndexer,
}

impl std::ops::Index<Id> for Graph {
    type Output = Tensor;

    fn index(&self, id: Id) -> &Tensor {
        &self.tensors[id.index()]
    }
}

impl std::ops::IndexMut<Id> for Graph {
    fn index_mut(&mut self, id: Id) -> &mut Tensor {
        &mut self.tensors[id.index()]
    }
}

impl Graph {
    /// A graph with room for so many tensors.
    pub fn with_capacity(n: usize) -> Graph {
        Graph {
            tensors: Vec::with_capacity(n),
            visited: Vec::with_capacity(n),
            uses: Vec::with_capacity(n),
            ..Graph::default()
        }
    }

    /// The number of tensors, in the order or not.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The sum of the sizes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors
            .iter()
            .fold(0, |sum, t| sum.saturating_add(t.bytes()))
    }

    /// How often nodes of the order read this one, when it was built.
    pub fn uses(&self, id: Id) -> u32 {
        self.uses.get(id.index()).copied().unwrap_or(0)
    }

    /// The tensor whose memory this one lies in; itself, if it has its own.
    pub fn root(&self, id: Id) -> Id {
        self[id].view.unwrap_or(id)
    }

    fn push(&mut self, tensor: Tensor) -> Id {
        // A graph of 2^32 tensors would take 600 GB: not reached.
        let id = Id(self.tensors.len() as u32);
        self.tensors.push(tensor);
        self.visited.push(false);
        self.uses.push(0);
        id
    }

    /// A leaf without buffer.
    pub fn leaf(&mut self, ty: GgmlType, ne: &[u64]) -> Id {
        self.push(Tensor::new(Op::None, ty, extents(ne), &[]))
    }

    /// A leaf that is set before the graph runs.
    pub fn input(&mut self, ty: GgmlType, ne: &[u64]) -> Id {
        let id = self.leaf(ty, ne);
        self[id].input = true;
        id
    }

    /// A leaf in a buffer outside the graph.
    pub fn external(&mut self, ty: GgmlType, ne: &[u64], home: Home) -> Id {
        let id = self.leaf(ty, ne);
        self[id].home = Some(home);
        id
    }

    /// A node with memory of its own.
    pub fn node(&mut self, op: Op, ty: GgmlType, ne: &[u64], src: &[Id]) -> Id {
        self.push(Tensor::new(op, ty, extents(ne), src))
    }

    /// A node whose result lies in the memory of `of`, `offset` bytes behind its start, with the given extents and strides.
    pub fn node_in(
        &mut self,
        op: Op,
        of: Id,
        ne: [u64; 4],
        nb: [u64; 4],
        offset: u64,
        src: &[Id],
    ) -> Id {
        let base = &self[of];
        let (root, offset) = (base.view.unwrap_or(of), base.offset.saturating_add(offset));
        let mut tensor = Tensor::new(op, base.ty, ne, src);
        tensor.nb = nb;
        tensor.view = Some(root);
        tensor.offset = offset;
        self.push(tensor)
    }

    /// A node that reads itself too, as a cast does (`ggml_cast`).
    pub(super) fn read_itself(&mut self, id: Id) {
        let tensor = &mut self[id];
        let n = usize::from(tensor.n_src);
        if n < MAX_SRC {
            tensor.src[n] = id;
            tensor.n_src += 1;
        }
    }

    /// Adds a source to a node (attention sinks).
    pub(super) fn add_source(&mut self, id: Id, source: Id) {
        let tensor = &mut self[id];
        let n = usize::from(tensor.n_src);
        if n < MAX_SRC {
            tensor.src[n] = source;
            tensor.n_src += 1;
        }
    }

    /// Replaces source number `i` of a node.
    pub(super) fn set_source(&mut self, id: Id, i: usize, source: Id) {
        self[id].src[i] = source;
    }

    /// A tensor of the same type, extents and strides with memory of its own (`ggml_dup_tensor_layout`).
    pub(super) fn copy_of(&mut self, id: Id) -> Id {
        let (ty, ne, nb) = (self[id].ty, self[id].ne, self[id].nb);
        let copy = self.leaf(ty, &ne);
        self[copy].nb = nb;
        copy
    }

    /// Appends a tensor and all that it needs to the order: depth first, sources left to right (`ggml_build_forward_expand`).
    pub fn expand(&mut self, id: Id) {
        if self.visited[id.index()] {
            return;
        }
        self.visited[id.index()] = true;
        let mut stack = std::mem::take(&mut self.stack);
        stack.push((id, 0));
        while let Some((id, next)) = stack.pop() {
            if let Some(&source) = self[id].src().get(next) {
                stack.push((id, next + 1));
                self.uses[source.index()] += 1;
                if !self.visited[source.index()] {
                    self.visited[source.index()] = true;
                    stack.push((source, 0));
                }
            } else if self[id].op == Op::None {
                self.leafs.push(id);
            } else {
                self.nodes.push(id);
            }
        }
        self.stack = stack;
    }
}
