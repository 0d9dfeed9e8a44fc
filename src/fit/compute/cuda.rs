//! What decides on the CUDA backend: which operations it takes, whether it takes them from the host, and how much it allocates.
//!
//! From `ggml-cuda.cu` and `fattn.cu`, for devices with tensor cores of Turing or newer. Older ones differ in speed, not in memory.

use super::graph::{BF16, F16, F32, Graph, I32, I64, Id, Op, Tensor, is_quantized, row_size};
use crate::gguf::GgmlType;

/// Rows of a quantized matrix are padded to this many values (`MATRIX_ROW_PADDING`).
const ROW_PADDING: u64 = 512;

/// An operation whose weights are in host memory runs on the device from this batch size on.
const OFFLOAD_MIN_BATCH: u64 = 32;

/// Bytes that a buffer of the device holds for a tensor (`ggml_backend_cuda_buffer_type_get_alloc_size`).
pub fn alloc_size(g: &Graph, id: Id) -> u64 {
    let t = &g[id];
    let size = match t.op {
        Op::FlashAttnExt { alibi } => flash_attention_size(g, t, alibi),
        _ => t.bytes(),
    };
    if is_quantized(t.ty) && !t.ne[0].is_multiple_of(ROW_PADDING) {
        size.saturating_add(row_size(t.ty, ROW_PADDING - t.ne[0] % ROW_PADDING))
    } else {
        size
    }
}

/// Whether a device takes an operation whose weights are in host memory (`ggml_backend_cuda_device_offload_op`).
pub fn offloads(t: &Tensor) -> bool {
    let batch = match t.op {
        Op::GetRows => 0,
        Op::MulMat => t.ne[1],
        Op::MulMatId | Op::MulMatIdF32 | Op::Rope => t.ne[2],
        _ => t.rows(),
    };
    batch >= OFFLOAD_MIN_BATCH
}

/// Types of a matrix that the device multiplies.
fn multiplies(ty: GgmlType) -> bool {
    // All but the two ternary types and integers.
    ty == F32 || ty == F16 || ty == BF16 || (is_quantized(ty) && !matches!(ty.0, 9 | 34 | 35))
}

/// Types whose rows the device can pick.
fn picks_rows(t: &Tensor) -> bool {
    match t.ty.0 {
        20 | 39 => t.ne[0].is_multiple_of(256), // IQ4_NL, MXFP4
        9 | 15 | 34 | 35 | 40 => false,         // Q8_1, Q8_K, TQ1_0, TQ2_0, NVFP4
        _ => is_quantized(t.ty) || matches!(t.ty, F32 | F16 | BF16 | I32),
    }
}

/// Types that a device converts single precision into when it writes rows.
fn writes_rows(ty: GgmlType) -> bool {
    // F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL
    matches!(ty, F32 | F16 | BF16) || matches!(ty.0, 2 | 3 | 6 | 7 | 8 | 20)
}

fn is_float(ty: GgmlType) -> bool {
    matches!(ty, F32 | F16 | BF16)
}

fn copies(from: &Tensor, to: &Tensor) -> bool {
    let (a, b) = (from.ty, to.ty);
    (is_float(a) && is_float(b))
        || (a == F32 && (writes_rows(b) || b == I32))
        || (b == F32 && matches!(a.0, 2 | 3 | 6 | 7 | 8))
        || (a == I32 && matches!(b, F32 | I32))
        || (a == b && from.is_contiguous() && to.is_contiguous())
}

/// No gaps between the elements of a row.
fn is_dense(t: &Tensor) -> bool {
    t.ty.block().is_some_and(|(_, bytes)| t.nb[0] == bytes)
}

/// The same, or rows of one element (`ggml_is_contiguous_rows`).
fn has_dense_rows(t: &Tensor) -> bool {
    t.ne[0] == 1 || is_dense(t)
}

/// Whether the device computes a node, wherever its sources are (`ggml_backend_cuda_device_supports_op`).
pub fn supports(g: &Graph, id: Id) -> bool {
    let t = &g[id];
    let source = |i: usize| t.src().get(i).map(|id| &g[*id]);
    let (Some(a), b) = (source(0), source(1)) else {
        return true;
    };
    match t.op {
        Op::Unary(_) => a.is_contiguous(),
        Op::Glu(_) => a.is_contiguous_from(1),
        Op::MulMat | Op::MulMatId => {
            let half = b.is_some_and(|b| b.ty == F16);
            is_dense(a) && b.is_none_or(is_dense) && (!half || a.ty == F16) && multiplies(a.ty)
        }
        Op::MulMatIdF32 => false,
        Op::GetRows => picks_rows(a),
        Op::SetRows => {
            let index = b.is_some_and(|b| matches!(b.ty, I32 | I64));
            index && ((a.ty == F32 && writes_rows(t.ty)) || (a.ty == F16 && t.ty == F16))
        }
        Op::Cpy => b.is_none_or(|b| copies(a, b)),
        Op::Repeat => matches!(a.ty, F32 | F16),
        Op::Norm | Op::RmsNorm | Op::L2Norm => has_dense_rows(a),
        Op::GroupNorm => a.is_contiguous(),
        Op::Scale => matches!(a.ty, F32 | BF16) && t.ty == a.ty,
        Op::Add | Op::Sub | Op::Mul | Op::Div => {
            let all = [Some(a), b, Some(t)].into_iter().flatten();
            if all.clone().any(|t| t.ty == BF16) {
                a.ty == BF16 && t.ty == BF16 && b.is_none_or(|b| matches!(b.ty, BF16 | F32))
            } else {
                all.clone().all(|t| matches!(t.ty, F32 | F16))
            }
        }
        Op::Rope => is_dense(a) && a.is_contiguous_from(2),
        Op::SumRows | Op::Mean => a.ty == F32 && has_dense_rows(a),
        Op::SsmConv => a.ne[1].is_multiple_of(128),
        Op::SsmScan => scans(a, source(3), source(4)),
        Op::FlashAttnExt { alibi } => flash_attention(g, t, alibi) != Kernel::None,
        Op::LightningIndexer => indexes(a, b),
        _ => true,
    }
}

/// The state space kernel's sizes: one for scalar decay (Mamba 2), one for Mamba.
fn scans(state: &Tensor, decay: Option<&Tensor>, group: Option<&Tensor>) -> bool {
    if decay.is_some_and(|a| a.ne[0] == 1) {
        matches!(state.ne[0], 96 | 128 | 256) && state.ne[1].is_multiple_of(16)
    } else {
        state.ne[0] == 16
            && state.ne[1] == 1
            && state.ne[2].is_multiple_of(128)
            && group.is_some_and(|b| b.ne[1] == 1)
    }
}

/// The sizes of the indexer's kernel (`ggml_cuda_lightning_indexer_supported`).
fn indexes(q: &Tensor, k: Option<&Tensor>) -> bool {
    q.ne[0] == 128
        && matches!(q.ne[1], 4 | 32 | 64)
        && is_aligned(q)
        && k.is_some_and(|k| is_aligned(k) && is_cache_type(k.ty))
}

/// Strides that vector loads can start at; quantized types always have them.
fn is_aligned(t: &Tensor) -> bool {
    is_quantized(t.ty) || t.nb[1..].iter().all(|nb| nb.is_multiple_of(16))
}

/// The flash attention kernel that a device would run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    None,
    /// One query: reads quantized keys and values as they are.
    Vector,
    /// Many queries: needs keys and values in half precision.
    Matrix,
}

/// Types of keys and values that the kernels know (`ggml_cuda_fattn_kv_type_supported`).
fn is_cache_type(ty: GgmlType) -> bool {
    matches!(ty, F32 | F16 | BF16) || matches!(ty.0, 2 | 3 | 6 | 7 | 8)
}

/// The kernel by head widths, shape and types (`ggml_cuda_get_best_fattn_kernel`).
fn flash_attention(g: &Graph, t: &Tensor, alibi: bool) -> Kernel {
    let [q, k, v, ref rest @ ..] = *t.src() else {
        return Kernel::None;
    };
    let (q, k, v, mask) = (&g[q], &g[k], &g[v], rest.first().map(|id| &g[*id]));
    let group = q.ne[2].checked_div(k.ne[2]).unwrap_or(0);
    let grouped = group >= 2
        && !alibi
        && k.ne[1].is_multiple_of(256)
        && mask.is_some_and(is_aligned)
        && [q, k, v].into_iter().all(is_aligned);
    let fits = match (k.ne[0], v.ne[0]) {
        (40 | 64 | 72 | 80 | 96 | 112 | 128 | 256, _) => k.ne[0] == v.ne[0],
        (192, 128) => grouped && group.is_multiple_of(8),
        (320, 256) => grouped && group.is_multiple_of(32),
        (512, 512) | (576, 512) => grouped,
        _ => false,
    };
    if !fits || !is_cache_type(k.ty) || !is_cache_type(v.ty) || mask.is_some_and(|m| m.ne[2] != 1) {
        return Kernel::None;
    }
    let vector = q.ne[0] <= 256
        && q.ne[0].is_multiple_of(64)
        && q.ne[0] != 192
        && k.ne[1].is_multiple_of(256);
    let (queries, streams) = (q.ne[1], q.ne[3]);
    let few = if is_quantized(k.ty) || is_quantized(v.ty) {
        queries <= 2
    } else {
        let wide = group > 4 && (q.ne[0] >= 256 || k.ne[1] >= 8192);
        queries == 1 && ((streams == 1 && !wide) || !grouped)
    };
    if vector && few {
        Kernel::Vector
    } else {
        Kernel::Matrix
    }
}

/// The result, and room for keys and values in half precision where the kernel needs them so
/// (`ggml_cuda_flash_attn_ext_get_alloc_size`).
fn flash_attention_size(g: &Graph, t: &Tensor, alibi: bool) -> u64 {
    let [_, k, v, ..] = *t.src() else {
        return t.bytes();
    };
    let (k_id, k, v) = (k, &g[k], &g[v]);
    let kernel = flash_attention(g, t, alibi);
    let converts = |t: &Tensor| match kernel {
        Kernel::None => false,
        Kernel::Vector => t.ty == F32,
        Kernel::Matrix => t.ty != F16,
    };
    let half = |size: u64, t: &Tensor| {
        size.next_multiple_of(128)
            .saturating_add(t.elements().saturating_mul(2))
    };
    let mut size = t.bytes();
    if converts(k) {
        size = half(size, k);
    }
    let shared =
        v.view == Some(k_id) || (v.view.is_some() && v.view == k.view && v.offset == k.offset);
    if converts(v) && !(shared && converts(k)) {
        size = half(size, v);
    }
    size
}
