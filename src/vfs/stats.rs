//! What a mount has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use super::error::VfsError;

#[derive(Debug)]
pub(super) struct Stats {
    reads: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    /// Seconds from the epoch to the start.
    since: u64,
}

impl Stats {
    pub(super) fn new() -> Stats {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Stats {
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            since: now.map_or(0, |since| since.as_secs()),
        }
    }

    pub(super) fn read(&self, bytes: usize) {
        self.reads.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn count<T>(&self, result: Result<T, VfsError>) -> Result<T, VfsError> {
        if result.is_err() {
            self.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// Value of `user.ggufuse.stats`.
    pub(super) fn text(&self, open_handles: usize) -> String {
        format!(
            "since {}\nreads {}\nbytes {}\nerrors {}\nopen_handles {open_handles}\n",
            self.since,
            self.reads.load(Relaxed),
            self.bytes.load(Relaxed),
            self.errors.load(Relaxed),
        )
    }
}
