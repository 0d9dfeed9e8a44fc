use std::io;
use std::path::{Path, PathBuf};

use crate::source::SourceError;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A system call on an output, its folder, or the journal failed.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A source cannot be read, or changed.
    #[error("{0}")]
    Source(#[from] SourceError),
    /// The output is there already.
    #[error("{path}: there already; nothing is overwritten", path = path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another process writes the same output.
    #[error("{path}: another process is writing it", path = path.display())]
    Busy {
        /// The file beside the output.
        path: PathBuf,
    },
    /// The file system has too little room.
    #[error("{path}: {need} bytes are needed on its file system, {have} are free", path = path.display())]
    NoRoom {
        /// The output.
        path: PathBuf,
        /// Bytes needed, at the point where most are.
        need: u64,
        /// Bytes there are at that point.
        have: u64,
    },
    /// The file system cannot hold a file of this size.
    #[error("{path}: FAT holds no file of {len} bytes; split with --max-file-size fat32", path = path.display())]
    TooLarge {
        /// The output.
        path: PathBuf,
        /// Its length.
        len: u64,
    },
    /// What was read back is not what was written.
    #[error("{path}: byte {offset} is not what it should be", path = path.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// Offset of a byte that differs.
        offset: u64,
    },
    /// The journal of an interrupted run does not go with what is on the disk.
    #[error("{path}: {why}; nothing was deleted this time", path = path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// Ended by who watches.
    #[error("stopped")]
    Stopped,
}

impl ExportError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> ExportError {
        move |error| ExportError::Io {
            path: path.to_owned(),
            error,
        }
    }
}
