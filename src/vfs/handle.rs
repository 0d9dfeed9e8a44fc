//! Open files and directories.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Mutex, RwLock};

use super::attr::{Attr, DirItem};
use super::error::VfsError;
use super::model::ModelDir;
use super::planned::Planned;

/// Readers of pieces below this, on average over at least so many, do better with the kernel's readahead.
const SMALL_READ: u64 = 32 << 10;
const ENOUGH_READS: u64 = 64;

/// After so many opens through the page cache an inode is tried without it again: nobody can tell there how large the
/// reader's pieces are.
const SMALL_OPENS: u8 = 16;

/// An open file. It holds the view that it was opened on, and the view its sources.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) model: Arc<ModelDir>,
    pub(super) planned: Arc<Planned>,
    pub(super) index: usize,
    pub(super) ino: u64,
    /// The bytes of a computed file.
    pub(super) computed: Option<Vec<u8>>,
    /// Reads that a reader asked for itself (not the kernel to fill its cache), and their bytes.
    direct_reads: AtomicU64,
    direct_bytes: AtomicU64,
}

impl Handle {
    pub(super) fn new(
        model: Arc<ModelDir>,
        planned: Arc<Planned>,
        index: usize,
        ino: u64,
        computed: Option<Vec<u8>>,
    ) -> Handle {
        Handle {
            model,
            planned,
            index,
            ino,
            computed,
            direct_reads: AtomicU64::new(0),
            direct_bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn attr(&self) -> Result<Attr, VfsError> {
        self.model.file_attr(&self.planned, self.index)
    }

    pub(super) fn count_direct(&self, bytes: u32) {
        self.direct_reads.fetch_add(1, Relaxed);
        self.direct_bytes.fetch_add(u64::from(bytes), Relaxed);
    }

    fn reads_in_small_pieces(&self) -> bool {
        let reads = self.direct_reads.load(Relaxed);
        reads >= ENOUGH_READS && self.direct_bytes.load(Relaxed) < reads.saturating_mul(SMALL_READ)
    }
}

/// An open directory, listed anew each time it is read from its start.
#[derive(Debug)]
pub(super) struct DirHandle {
    pub(super) ino: u64,
    pub(super) items: Mutex<Arc<Vec<DirItem>>>,
}

/// All that is open.
#[derive(Debug)]
pub(super) struct Handles {
    files: RwLock<HashMap<u64, Arc<Handle>>>,
    dirs: RwLock<HashMap<u64, Arc<DirHandle>>>,
    next: AtomicU64,
    /// Inodes that were read in small pieces, and how many opens that still counts for.
    small_reads: Mutex<HashMap<u64, u8>>,
}

impl Handles {
    pub(super) fn new() -> Handles {
        Handles {
            files: RwLock::default(),
            dirs: RwLock::default(),
            next: AtomicU64::new(1),
            small_reads: Mutex::default(),
        }
    }

    /// The number of open files.
    pub(super) fn len(&self) -> usize {
        self.files.read().len()
    }

    pub(super) fn open(&self, handle: Handle) -> u64 {
        let fh = self.next.fetch_add(1, Relaxed);
        self.files.write().insert(fh, Arc::new(handle));
        fh
    }

    pub(super) fn get(&self, fh: u64) -> Result<Arc<Handle>, VfsError> {
        self.files
            .read()
            .get(&fh)
            .cloned()
            .ok_or(VfsError::BadHandle)
    }

    /// Some open handle of an inode.
    pub(super) fn of_ino(&self, ino: u64) -> Option<Arc<Handle>> {
        let files = self.files.read();
        files.values().find(|handle| handle.ino == ino).cloned()
    }

    pub(super) fn release(&self, fh: u64) -> Result<(), VfsError> {
        let handle = self.files.write().remove(&fh).ok_or(VfsError::BadHandle)?;
        if handle.reads_in_small_pieces() {
            self.small_reads.lock().insert(handle.ino, SMALL_OPENS);
        }
        Ok(())
    }

    /// Whether an earlier reader of the inode read in small pieces. To be asked once per open.
    pub(super) fn take_small_open(&self, ino: u64) -> bool {
        let mut small = self.small_reads.lock();
        match small.get_mut(&ino) {
            None => false,
            Some(0) => small.remove(&ino).is_none(),
            Some(opens) => {
                *opens = opens.saturating_sub(1);
                true
            }
        }
    }

    pub(super) fn open_dir(&self, ino: u64) -> u64 {
        let fh = self.next.fetch_add(1, Relaxed);
        let handle = DirHandle {
            ino,
            items: Mutex::default(),
        };
        self.dirs.write().insert(fh, Arc::new(handle));
        fh
    }

    pub(super) fn dir(&self, fh: u64) -> Result<Arc<DirHandle>, VfsError> {
        self.dirs
            .read()
            .get(&fh)
            .cloned()
            .ok_or(VfsError::BadHandle)
    }

    pub(super) fn release_dir(&self, fh: u64) -> Result<(), VfsError> {
        let known = self.dirs.write().remove(&fh);
        known.map(drop).ok_or(VfsError::BadHandle)
    }
}
