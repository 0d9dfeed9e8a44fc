//! Virtual files written to disk, so that a crash at any point loses nothing and leaves no half file under a final name.
//!
//! A file is written beside its final name, synced, and renamed; nothing is ever overwritten. [`write()`] does that for a
//! set of files at once. [`drain`] writes one file and deletes its sources, each only once its bytes are durable in the
//! output, with a journal by which an interrupted run is taken up again.

mod compare;
mod copy;
mod drain;
mod error;
mod journal;
mod partial;
mod room;
mod write;

use std::path::{Path, PathBuf};

use crate::layout::VirtualFile;

pub use drain::{drain, resume, unfinished};
pub use error::ExportError;
pub use write::write;

/// A file to write.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its final name.
    pub path: PathBuf,
    /// Its content.
    pub content: VirtualFile,
}

/// What happens, for whoever watches.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A file of this many bytes is begun, or taken up again.
    Writing(&'a Path, u64),
    /// This many more bytes are copied.
    Copied(u64),
    /// A file is whole and on the disk, under its final name or about to get it.
    Written(&'a Path),
    /// A file that was there already holds the very same bytes, and stays.
    Kept(&'a Path),
    /// A source is deleted.
    Deleted(&'a Path),
}

/// Who follows the work and may end it.
pub trait Watch {
    /// Something happened.
    fn event(&mut self, event: Event<'_>);

    /// Whether to stop: asked for every few megabytes.
    fn stopped(&self) -> bool;
}
