use std::ops::Range;

use super::read::alignment_of;
use super::{DEFAULT_ALIGNMENT, GgmlType, Problem, Value, ValueType};

/// The key that says to what tensor data is aligned.
pub(super) const ALIGNMENT_KEY: &[u8] = b"general.alignment";

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Raw name, without terminator; not necessarily UTF-8.
    pub name: Vec<u8>,
    /// Extent per dimension, as stored.
    pub dims: Vec<u64>,
    /// Element type.
    pub ty: GgmlType,
    /// Offset of its data in the file.
    pub offset: u64,
    /// Bytes of data, without padding. For an unknown type: up to the next tensor, or to the file's end.
    pub len: u64,
}

#[derive(Debug, Clone)]
pub(super) struct KvRange {
    /// Offset of the entry in the file; none for one that was written anew.
    pub offset: Option<u64>,
    pub entry: Range<usize>,
    pub key: Range<usize>,
    pub ty: ValueType,
    pub value: Range<usize>,
}

/// A validated header. All tensors lie within the file; keys and tensor names are unique. The bytes of entries that
/// were written anew follow those of the file's own.
#[derive(Debug, Clone)]
pub struct Header {
    pub(super) bytes: Vec<u8>,
    pub(super) version: u32,
    pub(super) alignment: u64,
    pub(super) kvs: Vec<KvRange>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) data_offset: u64,
    pub(super) changed: bool,
}

/// One key and its value, as stored.
#[derive(Debug, Clone, Copy)]
pub struct Kv<'a> {
    /// Raw key.
    pub key: &'a [u8],
    /// Type of the value.
    pub ty: ValueType,
    /// Raw little-endian value; strings and arrays with their length prefix.
    pub value: &'a [u8],
    /// The whole entry: key, type and value.
    pub entry: &'a [u8],
    /// Offset of the entry in the file; none for one that was written anew.
    pub offset: Option<u64>,
}

impl Kv<'_> {
    /// The value of any integer type.
    pub fn int(&self) -> Option<i128> {
        let fixed = |n: usize| -> Option<[u8; 8]> {
            let mut out = [0; 8];
            out.get_mut(..n)?.copy_from_slice(self.value.get(..n)?);
            Some(out)
        };
        use ValueType::*;
        Some(match self.ty {
            U8 => u64::from_le_bytes(fixed(1)?).into(),
            U16 => u64::from_le_bytes(fixed(2)?).into(),
            U32 => u64::from_le_bytes(fixed(4)?).into(),
            U64 => u64::from_le_bytes(fixed(8)?).into(),
            I8 => i8::from_le_bytes(self.value.try_into().ok()?).into(),
            I16 => i16::from_le_bytes(self.value.try_into().ok()?).into(),
            I32 => i32::from_le_bytes(self.value.try_into().ok()?).into(),
            I64 => i64::from_le_bytes(self.value.try_into().ok()?).into(),
            F32 | F64 | Bool | String | Array => return None,
        })
    }

    /// The bytes of a string value.
    pub fn str_bytes(&self) -> Option<&[u8]> {
        (self.ty == ValueType::String)
            .then(|| self.value.get(8..))
            .flatten()
    }

    /// Element type and count of an array value.
    pub fn array(&self) -> Option<(ValueType, u64)> {
        if self.ty != ValueType::Array {
            return None;
        }
        let ty = u32::from_le_bytes(self.value.get(..4)?.try_into().ok()?);
        let n = u64::from_le_bytes(self.value.get(4..12)?.try_into().ok()?);
        Some((ValueType::from_raw(ty)?, n))
    }
}

impl Header {
    /// Format version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// `general.alignment`, or 32; a power of two.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The key-values in file order.
    pub fn kvs(&self) -> impl ExactSizeIterator<Item = Kv<'_>> {
        self.kvs.iter().map(|kv| {
            let slice = |r: &Range<usize>| self.bytes.get(r.clone()).unwrap_or_default();
            Kv {
                key: slice(&kv.key),
                ty: kv.ty,
                value: slice(&kv.value),
                entry: slice(&kv.entry),
                offset: kv.offset,
            }
        })
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<Kv<'_>> {
        self.kvs().find(|kv| kv.key == key)
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// This header with `key` set to `value`, in its place or at the end if it is new, or removed for `None`.
    /// The tensors stay where they are in the file, whatever becomes of `general.alignment`.
    ///
    /// # Errors
    /// `Alignment` when that key gets a value that is none.
    pub fn with_key(mut self, key: &[u8], value: Option<&Value>) -> Result<Header, Problem> {
        if key == ALIGNMENT_KEY {
            self.alignment = value.map_or(Ok(DEFAULT_ALIGNMENT), |value| {
                alignment_of(value.ty(), value.bytes())
            })?;
        }
        let place = self.kvs().position(|kv| kv.key == key);
        self.changed |= value.is_some() || place.is_some();
        let Some(value) = value else {
            place.map(|at| self.kvs.remove(at));
            return Ok(self);
        };
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&value.entry(key));
        let end = self.bytes.len();
        let key_start = start.saturating_add(8);
        let written = KvRange {
            offset: None,
            entry: start..end,
            key: key_start..key_start.saturating_add(key.len()),
            ty: value.ty(),
            value: end.saturating_sub(value.bytes().len())..end,
        };
        match place.and_then(|at| self.kvs.get_mut(at)) {
            Some(old) => *old = written,
            None => self.kvs.push(written),
        }
        Ok(self)
    }

    /// Whether it is no longer as it is in the file.
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// Where tensor data begins in the file: the end of the header, aligned.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }
}
