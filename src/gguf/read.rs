use std::collections::HashSet;
use std::ops::Range;

use super::header::{ALIGNMENT_KEY, KvRange};
use super::{DEFAULT_ALIGNMENT, Error, GgmlType, Header, Problem, Tensor, ValueType};
use crate::units::align_up;

/// Caps of `gguf.cpp`: bytes of a string, elements of an array.
const MAX_STRING: u64 = 1 << 30;
const MAX_ARRAY: u64 = 1 << 30;
/// ggml tensors have at most four dimensions.
const MAX_DIMS: u32 = 4;
/// The smallest entries: a KV (empty key, type, one byte) and a tensor info (empty name, no dims).
const MIN_KV: u64 = 8 + 4 + 1;
const MIN_INFO: u64 = 8 + 4 + 4 + 8;
/// No header of a real model comes near this; without it a sparse file with one huge array would fill the memory.
const MAX_HEADER: u64 = 1 << 30;
/// First read; doubled until the header is whole.
const FIRST_READ: u64 = 1 << 20;

/// Reads the header of a file of `file_len` bytes through `fill`, which fills a buffer from an offset.
/// Reads ever larger heads until the header is whole, so it never reads more than twice the header or 1 MiB.
///
/// # Errors
/// Those of `fill`, and [`Error`] for bytes that are no valid header.
pub fn read<E: From<Error>>(
    file_len: u64,
    mut fill: impl FnMut(&mut [u8], u64) -> Result<(), E>,
) -> Result<Header, E> {
    let mut bytes = Vec::new();
    let mut want = FIRST_READ.min(file_len);
    loop {
        let have = bytes.len();
        let target = usize::try_from(want).map_err(|_| {
            E::from(Error::at(
                have,
                Problem::Count {
                    what: "the header's length",
                    value: want,
                },
            ))
        })?;
        bytes.resize(target, 0);
        fill(bytes.get_mut(have..).unwrap_or_default(), have as u64)?;
        match parse(bytes, file_len) {
            Ok(header) => return Ok(header),
            Err((error, returned)) => {
                let truncated = matches!(error.problem, Problem::Truncated { .. });
                if !truncated || want == file_len {
                    return Err(error.into());
                }
                if want >= MAX_HEADER {
                    let problem = Problem::Count {
                        what: "the header's length",
                        value: want,
                    };
                    return Err(E::from(Error {
                        offset: error.offset,
                        problem,
                    }));
                }
                bytes = returned;
                want = want.saturating_mul(2).min(file_len);
            }
        }
    }
}

/// Parses a header from the first bytes of a file of `file_len` bytes.
///
/// # Errors
/// The [`Error`] and the bytes back. `Truncated` means that the header goes on past `bytes`.
pub fn parse(bytes: Vec<u8>, file_len: u64) -> Result<Header, (Error, Vec<u8>)> {
    let parsed = Cursor {
        bytes: &bytes,
        at: 0,
        file_len,
    }
    .header();
    match parsed {
        Ok((version, alignment, kvs, tensors, data_offset, end)) => {
            let mut bytes = bytes;
            bytes.truncate(end);
            bytes.shrink_to_fit();
            Ok(Header {
                bytes,
                version,
                alignment,
                kvs,
                tensors,
                data_offset,
                changed: false,
            })
        }
        Err(error) => Err((error, bytes)),
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_len: u64,
}

type Parsed = (u32, u64, Vec<KvRange>, Vec<Tensor>, u64, usize);

impl<'a> Cursor<'a> {
    fn fail<T>(&self, problem: Problem) -> Result<T, Error> {
        Err(Error::at(self.at, problem))
    }

    /// Bytes of the file from here on, in memory or not.
    fn remaining(&self) -> u64 {
        self.file_len.saturating_sub(self.at as u64)
    }

    fn take(&mut self, n: u64, what: &'static str) -> Result<&'a [u8], Error> {
        let have = (self.bytes.len().saturating_sub(self.at)) as u64;
        let truncated = Problem::Truncated {
            what,
            need: n,
            have,
        };
        let Some(end) = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n)) else {
            return self.fail(truncated);
        };
        let Some(slice) = self.bytes.get(self.at..end) else {
            return self.fail(truncated);
        };
        self.at = end;
        Ok(slice)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        let mut raw = [0; 4];
        raw.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(raw))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        let mut raw = [0; 8];
        raw.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// A count of things of at least `each` bytes: refused at once if the file cannot hold them.
    fn count(&mut self, what: &'static str, each: u64, max: u64) -> Result<u64, Error> {
        let start = self.at;
        let n = self.u64(what)?;
        if n > max
            || n.checked_mul(each)
                .is_none_or(|bytes| bytes > self.remaining())
        {
            return Err(Error::at(start, Problem::Count { what, value: n }));
        }
        Ok(n)
    }

    fn string(&mut self, what: &'static str) -> Result<Range<usize>, Error> {
        let n = self.count(what, 1, MAX_STRING)?;
        let start = self.at;
        self.take(n, what)?;
        Ok(start..self.at)
    }

    fn slice(&self, range: &Range<usize>) -> &'a [u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    fn header(mut self) -> Result<Parsed, Error> {
        if self.file_len == 0 {
            return self.fail(Problem::Empty);
        }
        let magic = self
            .bytes
            .get(..4.min(self.bytes.len()))
            .unwrap_or_default();
        if magic != b"GGUF" {
            if self.bytes.starts_with(b"version https://git-lfs") {
                return self.fail(Problem::LfsPointer);
            }
            return self.fail(Problem::Magic(format!(
                "{:?}",
                String::from_utf8_lossy(magic)
            )));
        }
        self.take(4, "the magic")?;
        let version = self.u32("the version")?;
        if version != 0 && version & 0xffff == 0 {
            return Err(Error::at(4, Problem::BigEndian));
        }
        if version != 2 && version != 3 {
            return Err(Error::at(4, Problem::Version(version)));
        }
        let n_tensors = self.count("the number of tensors", MIN_INFO, i64::MAX.unsigned_abs())?;
        let n_kv = self.count("the number of keys", MIN_KV, i64::MAX.unsigned_abs())?;
        let (kvs, alignment) = self.kvs(n_kv)?;
        let (tensors, data_offset) = self.tensors(n_tensors, alignment)?;
        Ok((version, alignment, kvs, tensors, data_offset, self.at))
    }

    fn kvs(&mut self, n: u64) -> Result<(Vec<KvRange>, u64), Error> {
        // Grows as entries are really there, not by what the count claims.
        let mut kvs = Vec::new();
        let mut seen = HashSet::new();
        let mut alignment = DEFAULT_ALIGNMENT;
        for _ in 0..n {
            let start = self.at;
            let key = self.string("a key")?;
            let name = self.slice(&key);
            let lossy = || String::from_utf8_lossy(name).into_owned();
            if !seen.insert(name) {
                return Err(Error::at(start, Problem::DuplicateKey(lossy())));
            }
            let raw = self.u32("a value type")?;
            let Some(ty) = ValueType::from_raw(raw) else {
                return self.fail(Problem::ValueType {
                    key: lossy(),
                    value: raw,
                });
            };
            let from = self.at;
            self.skip_value(ty, name)?;
            let value = from..self.at;
            if name == ALIGNMENT_KEY {
                alignment =
                    alignment_of(ty, self.slice(&value)).map_err(|why| Error::at(from, why))?;
            }
            kvs.push(KvRange {
                offset: Some(start as u64),
                entry: start..self.at,
                key,
                ty,
                value,
            });
        }
        Ok((kvs, alignment))
    }

    fn skip_value(&mut self, ty: ValueType, key: &[u8]) -> Result<(), Error> {
        match (ty, ty.size()) {
            (_, Some(size)) => self.take(size, "a value").map(drop),
            (ValueType::String, None) => self.string("a string").map(drop),
            (_, None) => {
                let raw = self.u32("an array's element type")?;
                let element = ValueType::from_raw(raw).filter(|&t| t != ValueType::Array);
                let Some(element) = element else {
                    let key = String::from_utf8_lossy(key).into_owned();
                    return self.fail(Problem::ValueType { key, value: raw });
                };
                let each = element.size().unwrap_or(8);
                let n = self.count("an array's length", each, MAX_ARRAY)?;
                match element.size() {
                    Some(size) => self.take(n.saturating_mul(size), "an array").map(drop),
                    None => (0..n).try_for_each(|_| self.string("a string").map(drop)),
                }
            }
        }
    }

    fn tensors(&mut self, n: u64, alignment: u64) -> Result<(Vec<Tensor>, u64), Error> {
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut starts = Vec::new();
        let mut seen = HashSet::new();
        for _ in 0..n {
            let start = self.at;
            starts.push(start);
            let name = self.string("a tensor's name")?;
            let name = self.slice(&name);
            if !seen.insert(name) {
                return Err(Error::at(
                    start,
                    Problem::DuplicateTensor(String::from_utf8_lossy(name).into_owned()),
                ));
            }
            let n_dims = self.u32("a tensor's rank")?;
            if n_dims > MAX_DIMS {
                return self.fail(tensor_problem(
                    name,
                    format!("{n_dims} dimensions, more than {MAX_DIMS}"),
                ));
            }
            let dims = (0..n_dims)
                .map(|_| self.u64("a tensor's dimension"))
                .collect::<Result<Vec<_>, _>>()?;
            let ty = GgmlType(self.u32("a tensor's type")?);
            let offset = self.u64("a tensor's offset")?;
            let len = match ty.block() {
                None => 0,
                Some(block) => match tensor_len(&dims, block) {
                    Ok(len) => len,
                    Err(reason) => {
                        return self.fail(tensor_problem(
                            name,
                            format!("{dims:?} {}: {reason}", ty.name()),
                        ));
                    }
                },
            };
            tensors.push(Tensor {
                name: name.to_vec(),
                dims,
                ty,
                offset,
                len,
            });
        }
        let Some(data_offset) = align_up(self.at as u64, alignment) else {
            return self.fail(Problem::Alignment(alignment.to_string()));
        };
        self.place(&mut tensors, &starts, data_offset, alignment)?;
        Ok((tensors, data_offset))
    }

    /// Turns offsets in the data section into offsets in the file, and checks them.
    fn place(
        &self,
        tensors: &mut [Tensor],
        starts: &[usize],
        data: u64,
        alignment: u64,
    ) -> Result<(), Error> {
        let mut offsets: Vec<u64> = tensors.iter().map(|t| t.offset).collect();
        offsets.sort_unstable();
        for (tensor, &start) in tensors.iter_mut().zip(starts) {
            let fail = |reason: String| Err(Error::at(start, tensor_problem(&tensor.name, reason)));
            if tensor.offset.checked_rem(alignment) != Some(0) {
                return fail(format!(
                    "its offset {} is not a multiple of the alignment {alignment}",
                    tensor.offset
                ));
            }
            let Some(at) = data
                .checked_add(tensor.offset)
                .filter(|&at| at <= self.file_len || tensor.dims.contains(&0))
            else {
                return fail(format!(
                    "its offset {} lies past the end of the file ({} bytes)",
                    tensor.offset, self.file_len
                ));
            };
            if tensor.ty.block().is_none() && !tensor.dims.contains(&0) {
                let next = offsets.partition_point(|&o| o <= tensor.offset);
                let end = offsets
                    .get(next)
                    .map_or(Some(self.file_len), |&o| data.checked_add(o));
                tensor.len = end.and_then(|end| end.checked_sub(at)).unwrap_or(0);
                if tensor.len == 0 {
                    return fail(format!(
                        "its data begins at byte {at}, where the file ends (an unfinished download?)"
                    ));
                }
            }
            tensor.offset = at;
            if tensor.len > 0
                && at
                    .checked_add(tensor.len)
                    .is_none_or(|end| end > self.file_len)
            {
                return fail(format!(
                    "its data needs bytes {at} to {}, but the file has {} (an unfinished download?)",
                    at.saturating_add(tensor.len),
                    self.file_len
                ));
            }
        }
        let mut spans: Vec<_> = tensors
            .iter()
            .zip(starts)
            .filter(|(t, _)| t.len > 0)
            .collect();
        spans.sort_unstable_by_key(|(t, _)| t.offset);
        for pair in spans.windows(2) {
            if let [(a, _), (b, start)] = pair
                && a.offset.saturating_add(a.len) > b.offset
            {
                let reason = format!(
                    "its data overlaps that of {:?}",
                    String::from_utf8_lossy(&a.name)
                );
                return Err(Error::at(**start, tensor_problem(&b.name, reason)));
            }
        }
        Ok(())
    }
}

/// The alignment that a value of `general.alignment` stands for.
pub(super) fn alignment_of(ty: ValueType, value: &[u8]) -> Result<u64, Problem> {
    let power = <[u8; 4]>::try_from(value).ok().map(u32::from_le_bytes);
    match power.filter(|power| ty == ValueType::U32 && power.is_power_of_two()) {
        Some(power) => Ok(power.into()),
        None => Err(Problem::Alignment(format!("{} {value:?}", ty.name()))),
    }
}

fn tensor_problem(name: &[u8], reason: String) -> Problem {
    Problem::Tensor {
        name: String::from_utf8_lossy(name).into_owned(),
        reason,
    }
}

/// Bytes of a tensor: whole blocks per row; the product of the dimensions must fit an i64 as in ggml.
fn tensor_len(dims: &[u64], (block, bytes): (u64, u64)) -> Result<u64, &'static str> {
    let elements = dims
        .iter()
        .try_fold(1u64, |n, &d| {
            i64::try_from(d).ok().and_then(|_| n.checked_mul(d))
        })
        .filter(|&n| i64::try_from(n).is_ok())
        .ok_or("its number of values overflows")?;
    let row = dims.first().copied().unwrap_or(1);
    if row.checked_rem(block) != Some(0) {
        return Err("its rows are not whole blocks");
    }
    elements
        .checked_div(block)
        .and_then(|n| n.checked_mul(bytes))
        .ok_or("its size overflows")
}
