//! The open descriptors of all sources, least recently used first out. One pool, since the limit is the process's.

use std::fs::File;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, OnceLock};

use lru::LruCache;
use parking_lot::Mutex;

use super::lease::Leased;

/// Descriptors held open where nothing else is said: half of the usual soft limit of 1,024.
const DEFAULT_LIMIT: usize = 512;

/// An open descriptor, and the lease on its file once a range was asked for.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) file: Arc<File>,
    pub(super) leased: OnceLock<Option<Arc<Leased>>>,
}

static POOL: LazyLock<Mutex<LruCache<u64, Arc<Open>>>> = LazyLock::new(|| {
    let limit = NonZeroUsize::new(DEFAULT_LIMIT).unwrap_or(NonZeroUsize::MIN);
    Mutex::new(LruCache::new(limit))
});

/// Sets how many source files may be open at a time (at least one); those in use at the moment count on top.
pub fn limit_open_files(limit: usize) {
    let limit = NonZeroUsize::new(limit).unwrap_or(NonZeroUsize::MIN);
    POOL.lock().resize(limit);
}

/// A source's place in the pool; leaving it closes the descriptor.
#[derive(Debug)]
pub(super) struct Place(u64);

impl Place {
    pub(super) fn new(file: File) -> Place {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let place = Place(NEXT.fetch_add(1, Relaxed));
        place.put(file);
        place
    }

    pub(super) fn get(&self) -> Option<Arc<Open>> {
        POOL.lock().get(&self.0).cloned()
    }

    pub(super) fn put(&self, file: File) -> Arc<Open> {
        let open = Arc::new(Open {
            file: Arc::new(file),
            leased: OnceLock::new(),
        });
        // What falls out is dropped after the lock: closing may give a lease back.
        let _out = POOL.lock().push(self.0, Arc::clone(&open));
        open
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _out = POOL.lock().pop(&self.0);
    }
}
