//! Which tensors go into which shard, by the rules of `tools/gguf-split` (llama.cpp b11434), and the views built from that.

use super::assemble::{KvPart, Placed, assemble};
use super::{LayoutError, VirtualFile};
use crate::gguf::{DEFAULT_ALIGNMENT, Header, HeaderSize, Value, ValueType, tensor_info};
use crate::units::align_up;

const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// Tensors per shard where no limit is given.
pub const DEFAULT_MAX_TENSORS: u64 = 128;

/// Where shards end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SplitOptions {
    /// A new shard at every multiple of this many tensors.
    pub max_tensors: Option<u64>,
    /// Bytes of tensor data per shard, headers not counted; a larger tensor gets a shard of its own.
    pub max_size: Option<u64>,
    /// Bytes of a whole shard file, header included; never exceeded.
    pub max_file_size: Option<u64>,
    /// The first shard has metadata only.
    pub no_tensor_first: bool,
}

/// A file of a view.
#[derive(Debug, Clone)]
pub struct Built {
    /// Its content.
    pub file: VirtualFile,
    /// Bytes of its header, padding included.
    pub header_len: u64,
    /// Number of tensors.
    pub n_tensors: u64,
    /// Bytes of tensor data without padding.
    pub tensor_bytes: u64,
}

/// The merged view of a model whose shards have these headers, in order.
/// `clean` leaves all `split.*` keys out; else they are as `llama-gguf-split --merge` writes them.
///
/// # Errors
/// `Overflow`.
pub fn merge(headers: &[Header], clean: bool) -> Result<Built, LayoutError> {
    let tensors = all_tensors(headers);
    let mut kvs = kept_kvs(headers, |key| {
        if clean {
            is_split_key(key)
        } else {
            key == SPLIT_COUNT.as_bytes()
        }
    });
    let was_split = headers
        .first()
        .is_some_and(|h| h.get(SPLIT_COUNT.as_bytes()).is_some());
    if !clean && was_split {
        kvs.push(split_kv(SPLIT_COUNT, ValueType::U16, 0).ok_or(LayoutError::Overflow)?);
    }
    build(&kvs, &tensors, alignment(headers))
}

/// The shards of a model.
///
/// # Errors
/// [`LayoutError`]: nothing fits, too many shards, or overflow.
pub fn split(headers: &[Header], options: &SplitOptions) -> Result<Vec<Built>, LayoutError> {
    let tensors = all_tensors(headers);
    let total = tensors.len() as u64;
    let own = |no: usize, count: usize| -> Option<Vec<KvPart>> {
        // The order in which the tool's set calls leave them.
        Some(vec![
            split_kv(SPLIT_NO, ValueType::U16, no as u64)?,
            split_kv(SPLIT_TENSORS, ValueType::I32, total)?,
            split_kv(SPLIT_COUNT, ValueType::U16, count as u64)?,
        ])
    };
    let own_len: u64 = own(0, 0)
        .ok_or(LayoutError::TooManyTensors(total))?
        .iter()
        .map(KvPart::len)
        .sum();
    let first = kept_kvs(headers, is_split_key);
    let first_len = first
        .iter()
        .map(KvPart::len)
        .try_fold(own_len, u64::checked_add)
        .ok_or(LayoutError::Overflow)?;
    let walk = Walk {
        options,
        first_len,
        own_len,
        alignment: alignment(headers),
    };
    let groups = walk.run(&tensors)?;
    if groups.len() > usize::from(u16::MAX) {
        return Err(LayoutError::TooManyShards(groups.len()));
    }
    let mut at = 0usize;
    let mut shards = Vec::with_capacity(groups.len());
    for (no, &n) in groups.iter().enumerate() {
        let mut kvs = if no == 0 { first.clone() } else { Vec::new() };
        kvs.extend(own(no, groups.len()).ok_or(LayoutError::Overflow)?);
        let end = at.saturating_add(n);
        let mine = tensors.get(at..end).unwrap_or_default();
        at = end;
        shards.push(build(&kvs, mine, walk.alignment_of(no))?);
    }
    Ok(shards)
}

fn build(kvs: &[KvPart], tensors: &[Placed<'_>], alignment: u64) -> Result<Built, LayoutError> {
    let (file, header_len) = assemble(kvs, tensors, alignment).ok_or(LayoutError::Overflow)?;
    let tensor_bytes = tensors
        .iter()
        .map(|p| p.tensor.len)
        .try_fold(0, u64::checked_add)
        .ok_or(LayoutError::Overflow)?;
    Ok(Built {
        file,
        header_len,
        n_tensors: tensors.len() as u64,
        tensor_bytes,
    })
}

fn split_kv(key: &str, ty: ValueType, value: u64) -> Option<KvPart> {
    let value = Value::int(ty, value.into())?;
    Some(KvPart::Inline(value.entry(key.as_bytes())))
}

/// Whether a view writes this key itself: it says how a model is divided, not what it is.
pub fn is_split_key(key: &[u8]) -> bool {
    [SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS]
        .iter()
        .any(|k| k.as_bytes() == key)
}

/// The KVs of the first shard that `dropped` leaves: ranges of that source, and what was written anew.
fn kept_kvs(headers: &[Header], dropped: impl Fn(&[u8]) -> bool) -> Vec<KvPart> {
    let kvs = headers
        .first()
        .into_iter()
        .flat_map(Header::kvs)
        .filter(|kv| !dropped(kv.key));
    kvs.map(|kv| match kv.offset {
        Some(offset) => KvPart::Source {
            source: 0,
            offset,
            len: kv.entry.len() as u64,
        },
        None => KvPart::Inline(kv.entry.to_vec()),
    })
    .collect()
}

fn all_tensors(headers: &[Header]) -> Vec<Placed<'_>> {
    headers
        .iter()
        .enumerate()
        .flat_map(|(source, header)| {
            header
                .tensors()
                .iter()
                .map(move |tensor| Placed { source, tensor })
        })
        .collect()
}

/// `general.alignment` stands in the first shard and counts for the whole model.
fn alignment(headers: &[Header]) -> u64 {
    headers.first().map_or(DEFAULT_ALIGNMENT, Header::alignment)
}

struct Walk<'a> {
    options: &'a SplitOptions,
    first_len: u64,
    own_len: u64,
    alignment: u64,
}

/// A shard while it fills.
#[derive(Clone, Copy)]
struct Filling {
    no: usize,
    n: usize,
    /// Tensor bytes, each padded to 32, as the tool counts them.
    data: u64,
    header: HeaderSize,
    /// Tensor bytes, each padded to the shard's alignment.
    padded: u64,
}

impl Walk<'_> {
    /// Later shards carry no `general.alignment`, so loaders take the default there.
    fn alignment_of(&self, no: usize) -> u64 {
        if no == 0 {
            self.alignment
        } else {
            DEFAULT_ALIGNMENT
        }
    }

    fn open(&self, no: usize) -> Option<Filling> {
        let mut header = HeaderSize::default();
        header.add(if no == 0 {
            self.first_len
        } else {
            self.own_len
        })?;
        Some(Filling {
            no,
            n: 0,
            data: 0,
            header,
            padded: 0,
        })
    }

    fn with(&self, mut shard: Filling, placed: &Placed<'_>) -> Option<Filling> {
        let t = placed.tensor;
        shard.n = shard.n.checked_add(1)?;
        shard.data = shard
            .data
            .checked_add(align_up(t.len, DEFAULT_ALIGNMENT)?)?;
        shard
            .header
            .add(tensor_info(&t.name, &t.dims, t.ty.0, 0).len() as u64)?;
        shard.padded = shard
            .padded
            .checked_add(align_up(t.len, self.alignment_of(shard.no))?)?;
        Some(shard)
    }

    fn file_len(&self, shard: &Filling) -> Option<u64> {
        shard
            .header
            .padded(self.alignment_of(shard.no))?
            .checked_add(shard.padded)
    }

    /// Tensors per shard.
    fn run(&self, tensors: &[Placed<'_>]) -> Result<Vec<usize>, LayoutError> {
        const OVER: LayoutError = LayoutError::Overflow;
        let o = self.options;
        let by_default =
            o.max_tensors.is_none() && o.max_size.is_none() && o.max_file_size.is_none();
        let every = o.max_tensors.or(by_default.then_some(DEFAULT_MAX_TENSORS));
        let mut shard = self.open(0).ok_or(OVER)?;
        if let Some(limit) = o.max_file_size {
            let need = self.file_len(&shard).ok_or(OVER)?;
            if need > limit {
                return Err(LayoutError::MetadataTooLarge { need, limit });
            }
        }
        let mut groups = Vec::new();
        if o.no_tensor_first && !tensors.is_empty() {
            groups.push(0);
            shard = self.open(1).ok_or(OVER)?;
        }
        for (i, placed) in tensors.iter().enumerate() {
            let next = self.with(shard, placed).ok_or(OVER)?;
            let too_long = |s: &Filling| -> Result<Option<(u64, u64)>, LayoutError> {
                let len = self.file_len(s).ok_or(OVER)?;
                Ok(o.max_file_size
                    .filter(|&limit| len > limit)
                    .map(|limit| (len, limit)))
            };
            let soft = every.is_some_and(|n| (i as u64).checked_rem(n) == Some(0))
                || o.max_size.is_some_and(|max| next.data > max);
            // A shard is never left empty for a soft limit; for the strict one the first may keep the metadata alone.
            if (soft && shard.n > 0)
                || (too_long(&next)?.is_some() && (shard.n > 0 || shard.no == 0))
            {
                groups.push(shard.n);
                shard = self
                    .with(self.open(groups.len()).ok_or(OVER)?, placed)
                    .ok_or(OVER)?;
            } else {
                shard = next;
            }
            if let Some((need, limit)) = too_long(&shard)? {
                let name = String::from_utf8_lossy(&placed.tensor.name).into_owned();
                return Err(LayoutError::TensorTooLarge { name, need, limit });
            }
        }
        groups.push(shard.n);
        Ok(groups)
    }
}
