//! Whether a file holds the bytes of a virtual file, read from the disk.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use super::{ExportError, Watch};
use crate::layout::{Piece, VirtualFile};
use crate::source::Source;

const CHUNK: u64 = 1 << 20;

/// Compares a range of `content` with the same range of the file at `path`, which is read back from the disk as far as
/// the kernel lets go of what it has cached. Pieces of sources that `source` does not give are left out.
///
/// # Errors
/// `Differs` with the first difference, `Io` and `Source` for what cannot be read, `Stopped`.
pub(super) fn same<'s>(
    path: &Path,
    content: &VirtualFile,
    range: Range<u64>,
    source: impl Fn(usize) -> Option<&'s Source>,
    watch: &dyn Watch,
) -> Result<(), ExportError> {
    let file = File::open(path).map_err(ExportError::io(path))?;
    // Pages that are clean, as they are after a sync, are dropped.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut at = range.start;
    while at < range.end {
        if watch.stopped() {
            return Err(ExportError::Stopped);
        }
        let mut start = at;
        let pieces = content.resolve(at, CHUNK.min(range.end.saturating_sub(at)));
        for piece in pieces {
            let len = usize::try_from(piece.len()).unwrap_or(usize::MAX);
            left.resize(len, 0);
            right.resize(len, 0);
            let known = match piece {
                Piece::Inline(bytes) => {
                    left.copy_from_slice(bytes);
                    true
                }
                Piece::Zeros(_) => {
                    left.fill(0);
                    true
                }
                Piece::Source {
                    source: no, offset, ..
                } => match source(no) {
                    Some(source) => {
                        source.read_exact_at(&mut left, offset)?;
                        true
                    }
                    None => false,
                },
            };
            if known {
                read(&file, &mut right, start, path)?;
            }
            if known && left != right {
                let into = left.iter().zip(&right).position(|(a, b)| a != b);
                return Err(ExportError::Differs {
                    path: path.to_owned(),
                    offset: start.saturating_add(into.unwrap_or(0) as u64),
                });
            }
            start = start.saturating_add(piece.len());
        }
        if start == at {
            break;
        }
        at = start;
    }
    Ok(())
}

fn read(file: &File, buffer: &mut [u8], at: u64, path: &Path) -> Result<(), ExportError> {
    file.read_exact_at(buffer, at)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ExportError::Differs {
                path: path.to_owned(),
                offset: file.metadata().map_or(at, |meta| meta.len()),
            },
            _ => ExportError::io(path)(error),
        })
}
