//! A virtual file as a value: a sorted, gapless list of extents.

use std::sync::Arc;

/// What the bytes of one extent are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Bytes written anew (headers). The extent's length is the slice's length.
    Inline(Arc<[u8]>),
    /// A range of a source file: index into the model's sources, byte offset in that file.
    Source {
        /// Index of the source file in the set that the view was planned for.
        source: usize,
        /// Offset in the source file of the extent's first byte.
        offset: u64,
    },
    /// Zero bytes (padding).
    Zeros,
}

/// `len` bytes of a virtual file that come from one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the virtual file.
    pub start: u64,
    /// Length in bytes, never zero.
    pub len: u64,
    /// Where the bytes come from.
    pub content: Content,
}

/// The part of one extent that a read touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes at hand.
    Inline(&'a [u8]),
    /// `len` bytes of source number `source` from `offset`.
    Source {
        /// Index of the source file.
        source: usize,
        /// Offset in that file.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// This many zero bytes.
    Zeros(u64),
}

impl Piece<'_> {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Piece::Inline(bytes) => bytes.len() as u64,
            Piece::Source { len, .. } | Piece::Zeros(len) => *len,
        }
    }

    /// True for a piece without bytes; [`VirtualFile::resolve`] never yields one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The whole content of one file of a view. Extents are sorted, adjacent and start at zero.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtualFile {
    extents: Vec<Extent>,
    len: u64,
}

impl VirtualFile {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The extents, in order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Appends bytes. `None` when the file would be longer than 2^63 - 1 bytes, as for all `push_*`.
    pub fn push_inline(&mut self, bytes: Vec<u8>) -> Option<()> {
        let len = bytes.len() as u64;
        self.push(len, Content::Inline(bytes.into()))
    }

    /// Appends a range of a source; a range that continues the last extent extends it.
    pub fn push_source(&mut self, source: usize, offset: u64, len: u64) -> Option<()> {
        offset.checked_add(len)?;
        if let Some(last) = self.extents.last_mut()
            && let Content::Source {
                source: s,
                offset: o,
            } = last.content
            && s == source
            && o.checked_add(last.len) == Some(offset)
        {
            self.len = checked_len(self.len, len)?;
            last.len = last.len.checked_add(len)?;
            return Some(());
        }
        self.push(len, Content::Source { source, offset })
    }

    /// Appends zero bytes.
    pub fn push_zeros(&mut self, len: u64) -> Option<()> {
        self.push(len, Content::Zeros)
    }

    fn push(&mut self, len: u64, content: Content) -> Option<()> {
        let end = checked_len(self.len, len)?;
        if len > 0 {
            self.extents.push(Extent {
                start: self.len,
                len,
                content,
            });
        }
        self.len = end;
        Some(())
    }

    /// This file with every range of source `i` taken from `files[i]` instead. `None` when such a range is not in that
    /// file, or for a file too long.
    pub fn over(&self, files: &[VirtualFile]) -> Option<VirtualFile> {
        let mut out = VirtualFile::default();
        for extent in &self.extents {
            match &extent.content {
                Content::Source { source, offset } => {
                    let mut left = extent.len;
                    for piece in files.get(*source)?.resolve(*offset, extent.len) {
                        left = left.checked_sub(piece.len())?;
                        match piece {
                            Piece::Inline(bytes) => out.push_inline(bytes.to_vec())?,
                            Piece::Source {
                                source,
                                offset,
                                len,
                            } => out.push_source(source, offset, len)?,
                            Piece::Zeros(len) => out.push_zeros(len)?,
                        }
                    }
                    if left > 0 {
                        return None;
                    }
                }
                content => out.push(extent.len, content.clone())?,
            }
        }
        Some(out)
    }

    /// The pieces that make up `[offset, offset + len)`, cut off at the end of the file.
    pub fn resolve(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece<'_>> {
        let end = offset.saturating_add(len).min(self.len);
        let first = self
            .extents
            .partition_point(|e| e.start.saturating_add(e.len) <= offset);
        self.extents
            .get(first..)
            .unwrap_or_default()
            .iter()
            .map_while(move |extent| {
                let from = extent.start.max(offset);
                let to = extent.start.saturating_add(extent.len).min(end);
                let len = to.checked_sub(from).filter(|&n| n > 0)?;
                let skip = from.saturating_sub(extent.start);
                Some(match &extent.content {
                    Content::Inline(bytes) => {
                        let skip = usize::try_from(skip).ok()?;
                        let stop = skip.checked_add(usize::try_from(len).ok()?)?;
                        Piece::Inline(bytes.get(skip..stop)?)
                    }
                    Content::Source { source, offset } => Piece::Source {
                        source: *source,
                        offset: offset.checked_add(skip)?,
                        len,
                    },
                    Content::Zeros => Piece::Zeros(len),
                })
            })
    }
}

/// File offsets are signed in the kernel: a virtual file ends at or before 2^63 - 1.
fn checked_len(have: u64, more: u64) -> Option<u64> {
    have.checked_add(more)
        .filter(|&end| i64::try_from(end).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Materializes the extents the naive way.
    fn bytes(pieces: impl Iterator<Item = u8>) -> Vec<u8> {
        pieces.collect()
    }

    fn source_byte(source: usize, offset: u64) -> u8 {
        (offset.wrapping_mul(31).wrapping_add(source as u64 * 7) % 251) as u8
    }

    proptest! {
        #[test]
        fn resolve_equals_a_byte_vector(
            parts in prop::collection::vec((0u8..3, 0usize..3, 0u64..50, 0u64..40), 0..12),
            offset in 0u64..500, len in 0u64..500,
        ) {
            let mut file = VirtualFile::default();
            let mut naive = Vec::new();
            for (kind, source, at, len) in parts {
                match kind {
                    0 => {
                        let data: Vec<u8> = (0..len).map(|i| (i ^ 0x5a) as u8).collect();
                        naive.extend_from_slice(&data);
                        file.push_inline(data).unwrap();
                    }
                    1 => {
                        naive.extend((at..at + len).map(|o| source_byte(source, o)));
                        file.push_source(source, at, len).unwrap();
                    }
                    _ => {
                        naive.extend((0..len).map(|_| 0));
                        file.push_zeros(len).unwrap();
                    }
                }
            }
            prop_assert_eq!(file.len(), naive.len() as u64);
            let got = bytes(file.resolve(offset, len).flat_map(|piece| match piece {
                Piece::Inline(b) => b.to_vec(),
                Piece::Source { source, offset, len } =>
                    (offset..offset + len).map(|o| source_byte(source, o)).collect(),
                Piece::Zeros(n) => vec![0; n as usize],
            }));
            let from = (offset as usize).min(naive.len());
            let to = ((offset + len) as usize).min(naive.len());
            prop_assert_eq!(&got, &naive[from..to]);
        }
    }

    proptest! {
        #[test]
        fn a_file_over_a_file_in_pieces_has_the_same_bytes(
            cuts in prop::collection::vec(0u64..300, 0..6),
            ranges in prop::collection::vec((0u64..300, 0u64..300), 0..8),
        ) {
            let mut cuts = [vec![0, 300], cuts].concat();
            cuts.sort_unstable();
            let mut joined = VirtualFile::default();
            for (i, pair) in cuts.windows(2).enumerate() {
                joined.push_source(i, 0, pair[1] - pair[0]).unwrap();
            }
            let mut file = VirtualFile::default();
            for (a, b) in ranges {
                file.push_source(0, a.min(b), a.abs_diff(b)).unwrap();
                file.push_zeros(3).unwrap();
            }
            let over = file.over(&[joined]).unwrap();
            prop_assert_eq!(over.len(), file.len());
            let whole = |file: &VirtualFile, start: &dyn Fn(usize) -> u64| {
                bytes(file.resolve(0, file.len()).flat_map(|piece| match piece {
                    Piece::Source { source, offset, len } => {
                        let from = start(source) + offset;
                        (from..from + len).map(|at| source_byte(7, at)).collect::<Vec<_>>()
                    }
                    other => vec![0; other.len() as usize],
                }))
            };
            prop_assert_eq!(whole(&over, &|i| cuts[i]), whole(&file, &|_| 0));
        }
    }

    #[test]
    fn a_file_over_a_shorter_one_is_none() {
        let (mut file, mut short) = (VirtualFile::default(), VirtualFile::default());
        file.push_source(0, 5, 6).unwrap();
        short.push_source(0, 0, 10).unwrap();
        assert_eq!(file.over(&[short]), None);
        assert_eq!(file.over(&[]), None);
    }

    #[test]
    fn a_file_longer_than_the_kernel_counts_is_refused() {
        let mut file = VirtualFile::default();
        file.push_zeros(i64::MAX as u64).unwrap();
        assert_eq!(file.push_zeros(1), None);
        assert_eq!(file.push_source(0, u64::MAX, 1), None);
    }
}
