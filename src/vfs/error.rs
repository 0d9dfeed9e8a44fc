//! What can go wrong with one operation, and the errno that says so.

use crate::source::SourceError;

/// Why an operation was refused.
#[derive(Debug, thiserror::Error)]
pub enum VfsError {
    /// A file of an earlier view.
    #[error("its sources changed since it was looked up")]
    Stale,
    /// No such file.
    #[error("no such file")]
    NotFound,
    /// A file operation on a directory.
    #[error("is a directory")]
    IsDir,
    /// A directory operation on a file.
    #[error("not a directory")]
    NotDir,
    /// Writing.
    #[error("the file system is read-only")]
    ReadOnly,
    /// The permission asked for is never granted (execution).
    #[error("permission denied")]
    Denied,
    /// The handle was never opened or is released.
    #[error("bad file handle")]
    BadHandle,
    /// An offset beyond what a file can have.
    #[error("offset out of range")]
    Invalid,
    /// No such extended attribute.
    #[error("no such attribute")]
    NoAttr,
    /// The caller's buffer is too small for the attribute.
    #[error("buffer too small for the attribute")]
    Range,
    /// What an open would have computed does not fit into the memory that there is.
    #[error("does not fit into the memory that is free")]
    NoMemory,
    /// What an open would have computed could not be.
    #[error("{0}")]
    Failed(String),
    /// A source could not be read or has changed.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl VfsError {
    /// The number that the kernel gets.
    pub fn errno(&self) -> i32 {
        match self {
            VfsError::NotFound => libc::ENOENT,
            VfsError::Stale => libc::ESTALE,
            VfsError::IsDir => libc::EISDIR,
            VfsError::NotDir => libc::ENOTDIR,
            VfsError::ReadOnly => libc::EROFS,
            VfsError::Denied => libc::EACCES,
            VfsError::BadHandle => libc::EBADF,
            VfsError::Invalid => libc::EINVAL,
            VfsError::NoAttr => libc::ENODATA,
            VfsError::Range => libc::ERANGE,
            VfsError::NoMemory => libc::ENOMEM,
            VfsError::Failed(_) => libc::EIO,
            VfsError::Source(SourceError::Changed { .. }) => libc::ESTALE,
            VfsError::Source(SourceError::Io { error, .. }) => {
                error.raw_os_error().unwrap_or(libc::EIO)
            }
        }
    }
}
