//! One GGUF file from parts: KVs, tensor infos, padding, tensor data.

use super::extent::VirtualFile;
use crate::gguf::{HeaderSize, Tensor, tensor_info};
use crate::units::align_up;

/// A tensor and the source file that holds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed<'a> {
    pub source: usize,
    pub tensor: &'a Tensor,
}

/// A key-value entry: unchanged bytes of a source, or written anew.
#[derive(Debug, Clone)]
pub(super) enum KvPart {
    Source {
        source: usize,
        offset: u64,
        len: u64,
    },
    Inline(Vec<u8>),
}

impl KvPart {
    pub(super) fn len(&self) -> u64 {
        match self {
            KvPart::Source { len, .. } => *len,
            KvPart::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Lays the file out. Returns it with the length of its header. `None` when a size overflows.
pub(super) fn assemble(
    kvs: &[KvPart],
    tensors: &[Placed<'_>],
    alignment: u64,
) -> Option<(VirtualFile, u64)> {
    let mut file = VirtualFile::default();
    let mut inline = HeaderSize::fixed(tensors.len() as u64, kvs.len() as u64);
    for kv in kvs {
        match kv {
            KvPart::Inline(bytes) => inline.extend_from_slice(bytes),
            KvPart::Source {
                source,
                offset,
                len,
            } => {
                file.push_inline(std::mem::take(&mut inline))?;
                file.push_source(*source, *offset, *len)?;
            }
        }
    }
    let mut at = 0u64;
    for placed in tensors {
        let t = placed.tensor;
        inline.extend_from_slice(&tensor_info(&t.name, &t.dims, t.ty.0, at));
        at = at.checked_add(align_up(t.len, alignment)?)?;
    }
    file.push_inline(inline)?;
    pad(&mut file, alignment)?;
    let header = file.len();
    for placed in tensors {
        file.push_source(placed.source, placed.tensor.offset, placed.tensor.len)?;
        pad(&mut file, alignment)?;
    }
    Some((file, header))
}

fn pad(file: &mut VirtualFile, alignment: u64) -> Option<()> {
    let end = align_up(file.len(), alignment)?;
    file.push_zeros(end.checked_sub(file.len())?)
}
