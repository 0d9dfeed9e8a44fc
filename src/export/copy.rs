//! Pieces of a virtual file to a file: shared blocks where the file system has them and alignment allows, else a copy
//! inside the kernel, else through a buffer.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Advice, copy_file_range, fadvise};
use rustix::io::Errno;

use super::{Event, ExportError, Watch};
use crate::layout::Piece;
use crate::source::{Source, SourceError};

/// Bytes between two looks at who watches. Small enough to stay in memory between its reading and its writing.
const CHUNK: u64 = 8 << 20;
/// Bytes of the buffer, and of zeros written at a time.
const BUFFER: usize = 1 << 20;
const BUFFER_LEN: u64 = BUFFER as u64;

/// Copies into one file.
#[derive(Debug)]
pub(super) struct Copier<'a> {
    to: &'a File,
    path: &'a Path,
    buffer: Vec<u8>,
    /// Block size of the output, while blocks may be shared.
    block: Option<u64>,
    in_kernel: bool,
    /// Up to where the output was handed to the disk.
    flushed: u64,
}

impl<'a> Copier<'a> {
    pub(super) fn new(to: &'a File, path: &'a Path) -> Copier<'a> {
        Copier {
            to,
            path,
            buffer: Vec::new(),
            block: to.metadata().ok().map(|meta| meta.blksize()),
            in_kernel: true,
            flushed: 0,
        }
    }

    /// Writes a piece at offset `at`. A source is looked up by its number; that it is gone is an error of the caller.
    pub(super) fn piece<'s>(
        &mut self,
        piece: Piece<'_>,
        at: u64,
        source: impl FnOnce(usize) -> Option<&'s Source>,
        watch: &mut dyn Watch,
    ) -> Result<(), ExportError> {
        match piece {
            Piece::Inline(bytes) => {
                self.write(bytes, at)?;
                watch.event(Event::Copied(bytes.len() as u64));
                Ok(())
            }
            Piece::Zeros(len) => self.zeros(at, len, watch),
            Piece::Source {
                source: no,
                offset,
                len,
            } => match source(no) {
                Some(source) => self.range(source, offset, at, len, watch),
                None => Err(self.failed(io::Error::other("a source that is not open"))),
            },
        }
    }

    fn failed(&self, error: io::Error) -> ExportError {
        ExportError::io(self.path)(error)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), ExportError> {
        let written = self.to.write_all_at(bytes, at);
        written.map_err(|error| self.failed(error))
    }

    fn zeros(&mut self, mut at: u64, len: u64, watch: &mut dyn Watch) -> Result<(), ExportError> {
        self.buffer.clear();
        self.buffer.resize(BUFFER, 0);
        let end = at.saturating_add(len);
        while at < end {
            if watch.stopped() {
                return Err(ExportError::Stopped);
            }
            let n = end.saturating_sub(at).min(BUFFER_LEN);
            self.write(self.buffer.get(..bounded(n)).unwrap_or_default(), at)?;
            watch.event(Event::Copied(n));
            at = at.saturating_add(n);
        }
        Ok(())
    }

    fn range(
        &mut self,
        source: &Source,
        mut from: u64,
        mut at: u64,
        mut len: u64,
        watch: &mut dyn Watch,
    ) -> Result<(), ExportError> {
        while len > 0 {
            if watch.stopped() {
                return Err(ExportError::Stopped);
            }
            let shared = self.share(source, from, at, len)?;
            let n = if shared > 0 {
                shared
            } else {
                // What comes next is read from the disk while this is written.
                let want = self.up_to_block(from, at, len.min(CHUNK));
                ahead(source, from.saturating_add(want), CHUNK)?;
                self.copy(source, from, at, want)?
            };
            watch.event(Event::Copied(n));
            from = from.saturating_add(n);
            at = at.saturating_add(n);
            len = len.saturating_sub(n);
            self.flush(at);
        }
        Ok(())
    }

    /// Blocks that both files can share from here on: the offsets must lie alike in their blocks.
    fn alike(&self, from: u64, at: u64) -> Option<u64> {
        let block = self.block?;
        (from.checked_rem(block)? == at.checked_rem(block)?).then_some(block)
    }

    /// Shares whole blocks. Returns how many bytes; zero where that is impossible.
    fn share(&mut self, source: &Source, from: u64, at: u64, len: u64) -> Result<u64, ExportError> {
        let whole = match self.alike(from, at) {
            Some(block) if from.checked_rem(block) == Some(0) => {
                len.saturating_sub(len.checked_rem(block).unwrap_or(0))
            }
            _ => 0,
        };
        if whole == 0 {
            return Ok(0);
        }
        let done = source.with_file(|file| Ok(clone_range(file, self.to, from, at, whole)))?;
        if done.is_err() {
            // Whatever the reason, a copy either does better or says it better.
            self.block = None;
            return Ok(0);
        }
        Ok(whole)
    }

    /// Cuts a copy off where blocks can be shared.
    fn up_to_block(&self, from: u64, at: u64, len: u64) -> u64 {
        let Some(block) = self.alike(from, at) else {
            return len;
        };
        match from.checked_rem(block) {
            None | Some(0) => len,
            Some(into) => len.min(block.saturating_sub(into)),
        }
    }

    /// Copies some of the range, at least a byte of it.
    fn copy(&mut self, source: &Source, from: u64, at: u64, len: u64) -> Result<u64, ExportError> {
        if self.in_kernel {
            let copied = source.with_file(|file| {
                let (mut from, mut at) = (from, at);
                Ok(copy_file_range(
                    file,
                    Some(&mut from),
                    self.to,
                    Some(&mut at),
                    bounded(len),
                ))
            })?;
            match copied {
                Ok(n) if n > 0 => return Ok(n as u64),
                Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                    return Err(self.failed(copied.err().unwrap_or(Errno::NOSPC).into()));
                }
                // The buffer tells whether the source or the output is at fault, if anything is.
                Err(Errno::IO | Errno::INTR) | Ok(_) => {}
                Err(_) => self.in_kernel = false,
            }
        }
        let n = len.min(BUFFER_LEN);
        self.buffer.resize(BUFFER, 0);
        let buffer = self.buffer.get_mut(..bounded(n)).unwrap_or_default();
        source.read_exact_at(buffer, from)?;
        self.write(self.buffer.get(..bounded(n)).unwrap_or_default(), at)?;
        Ok(n)
    }

    /// Hands what was written to the disk without waiting, so that the sync at the end has little to wait for. The
    /// kernel by itself begins when a tenth of the memory is full of it.
    fn flush(&mut self, end: u64) {
        const WINDOW: u64 = 4 * CHUNK;
        if end.saturating_sub(self.flushed) < WINDOW {
            return;
        }
        let offset = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let (from, len) = (self.flushed, end.saturating_sub(self.flushed));
        // SAFETY: takes no pointer. A failure is one of the sync at the end too, which is not ignored.
        unsafe {
            libc::sync_file_range(
                self.to.as_raw_fd(),
                offset(from),
                offset(len),
                libc::SYNC_FILE_RANGE_WRITE,
            )
        };
        self.flushed = end;
    }
}

fn bounded(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Asks the kernel to read a range that comes soon.
fn ahead(source: &Source, from: u64, len: u64) -> Result<(), SourceError> {
    source.with_file(|file| {
        // Advice that is not taken is no failure.
        let _ = fadvise(file, from, NonZeroU64::new(len), Advice::WillNeed);
        Ok(())
    })
}

fn clone_range(from: &File, to: &File, start: u64, at: u64, len: u64) -> io::Result<()> {
    let range = libc::file_clone_range {
        src_fd: from.as_raw_fd().into(),
        src_offset: start,
        src_length: len,
        dest_offset: at,
    };
    // SAFETY: both descriptors are open, and the pointer is to a live file_clone_range.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONERANGE, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
