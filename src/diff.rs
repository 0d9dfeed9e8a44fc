//! In what two models differ, however they are divided into files: keys, tensors, and their bytes.

use std::collections::{HashMap, HashSet};

use sha2::{Digest, Sha256};

use crate::gguf::{Header, Kv, Tensor};
use crate::layout::is_split_key;
use crate::model::Model;
use crate::source::SourceError;

/// Bytes of a tensor that are compared at a time, of each model.
const CHUNK: u64 = 1 << 20;

/// One of the two models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first.
    A,
    /// The second.
    B,
}

/// A difference, or a tensor that is the same.
#[derive(Debug)]
pub enum Finding<'m> {
    /// A key that only one has.
    KeyOnly(Side, Kv<'m>),
    /// A key with another type or value.
    Key(Kv<'m>, Kv<'m>),
    /// A tensor that only one has.
    TensorOnly(Side, &'m Tensor),
    /// A tensor with another type or shape.
    Shape(&'m Tensor, &'m Tensor),
    /// A tensor with other bytes.
    Bytes {
        /// The tensor.
        tensor: &'m Tensor,
        /// Offset of the first byte that differs, in its data.
        at: u64,
        /// SHA-256 of its data in both, where hashes were asked for.
        hashes: Option<(String, String)>,
    },
    /// A tensor that is the same in both.
    Same {
        /// The tensor.
        tensor: &'m Tensor,
        /// SHA-256 of its data, where hashes were asked for.
        hash: Option<String>,
    },
}

/// Why two models were not compared to the end.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// A model cannot be read.
    #[error("{0}")]
    Source(#[from] SourceError),
    /// Ended by who watches.
    #[error("stopped")]
    Stopped,
}

/// Compares two models. `found` gets every tensor and every difference; `read` gets how many bytes of tensors were
/// compared since its last call, and says whether to go on. The keys that say how a model is divided do not count.
///
/// # Errors
/// [`DiffError`].
pub fn diff<'m>(
    a: &'m Model,
    b: &'m Model,
    hash: bool,
    found: &mut dyn FnMut(Finding<'m>),
    read: &mut dyn FnMut(u64) -> bool,
) -> Result<(), DiffError> {
    keys(a, b, found);
    let mut theirs: HashMap<&[u8], (usize, &Tensor)> = tensors(b)
        .map(|(file, tensor)| (tensor.name.as_slice(), (file, tensor)))
        .collect();
    for (file, tensor) in tensors(a) {
        let Some((other_file, other)) = theirs.remove(tensor.name.as_slice()) else {
            found(Finding::TensorOnly(Side::A, tensor));
            continue;
        };
        if tensor.ty != other.ty || shape(tensor) != shape(other) || tensor.len != other.len {
            found(Finding::Shape(tensor, other));
            continue;
        }
        found(bytes(
            (a, file, tensor),
            (b, other_file, other),
            hash,
            read,
        )?);
    }
    // In the order of the file, not of the map.
    for (_, tensor) in tensors(b) {
        if theirs.contains_key(tensor.name.as_slice()) {
            found(Finding::TensorOnly(Side::B, tensor));
        }
    }
    Ok(())
}

fn keys<'m>(a: &'m Model, b: &'m Model, found: &mut dyn FnMut(Finding<'m>)) {
    let (Some(a), Some(b)) = (a.headers.first(), b.headers.first()) else {
        return;
    };
    let theirs: HashMap<&[u8], Kv<'m>> = metadata(b).map(|kv| (kv.key, kv)).collect();
    for kv in metadata(a) {
        match theirs.get(kv.key) {
            None => found(Finding::KeyOnly(Side::A, kv)),
            Some(other) if (kv.ty, kv.value) != (other.ty, other.value) => {
                found(Finding::Key(kv, *other));
            }
            Some(_) => {}
        }
    }
    let ours: HashSet<&[u8]> = metadata(a).map(|kv| kv.key).collect();
    metadata(b)
        .filter(|kv| !ours.contains(kv.key))
        .for_each(|kv| found(Finding::KeyOnly(Side::B, kv)));
}

fn metadata(header: &Header) -> impl Iterator<Item = Kv<'_>> {
    header.kvs().filter(|kv| !is_split_key(kv.key))
}

fn tensors(model: &Model) -> impl Iterator<Item = (usize, &Tensor)> {
    let files = model.headers.iter().enumerate();
    files.flat_map(|(file, header)| header.tensors().iter().map(move |tensor| (file, tensor)))
}

/// The dimensions without those of 1 at the end, which some writers leave out.
fn shape(tensor: &Tensor) -> &[u64] {
    let kept = tensor.dims.iter().rposition(|&dim| dim != 1);
    let kept = kept.map_or(0, |last| last.saturating_add(1));
    tensor.dims.get(..kept).unwrap_or_default()
}

type Place<'m> = (&'m Model, usize, &'m Tensor);

/// Two tensors of the same type and shape.
fn bytes<'m>(
    (a, a_file, tensor): Place<'m>,
    (b, b_file, other): Place<'m>,
    hash: bool,
    read: &mut dyn FnMut(u64) -> bool,
) -> Result<Finding<'m>, DiffError> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let (mut left_hash, mut right_hash) = (Sha256::new(), Sha256::new());
    let (mut at, mut differs) = (0u64, None);
    // After a difference the rest only matters for the hashes.
    while at < tensor.len && (hash || differs.is_none()) {
        let n = tensor.len.saturating_sub(at).min(CHUNK);
        let len = usize::try_from(n).unwrap_or(0);
        left.resize(len, 0);
        right.resize(len, 0);
        a.read_at(a_file, &mut left, tensor.offset.saturating_add(at))?;
        b.read_at(b_file, &mut right, other.offset.saturating_add(at))?;
        if differs.is_none() && left != right {
            let into = left.iter().zip(&right).position(|(a, b)| a != b);
            differs = Some(at.saturating_add(into.unwrap_or(0) as u64));
        }
        if hash {
            left_hash.update(&left);
            right_hash.update(&right);
        }
        at = at.saturating_add(n);
        if !read(n) {
            return Err(DiffError::Stopped);
        }
    }
    let hashes = hash.then(|| (hex(left_hash), hex(right_hash)));
    Ok(match differs {
        Some(at) => Finding::Bytes { tensor, at, hashes },
        None => Finding::Same {
            tensor,
            hash: hashes.map(|(hash, _)| hash),
        },
    })
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}
