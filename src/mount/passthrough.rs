//! Files that the kernel reads itself, from a source that they are identical to (FUSE passthrough).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};

use fuser::{BackingId, ReplyOpen};
use parking_lot::Mutex;

/// The sources that the kernel reads. All handles of an inode share one registration, as the kernel demands.
#[derive(Debug, Default)]
pub(super) struct Backings(Mutex<Registered>);

#[derive(Debug, Default)]
struct Registered {
    by_ino: HashMap<u64, Weak<BackingId>>,
    by_fh: HashMap<u64, Arc<BackingId>>,
}

impl Backings {
    /// Registers `file` for handle `fh` until [`Backings::release`].
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN, ELOOP for a source that is itself on a stacked file system.
    pub(super) fn open(
        &self,
        ino: u64,
        fh: u64,
        file: &File,
        reply: &ReplyOpen,
    ) -> io::Result<Arc<BackingId>> {
        let mut registered = self.0.lock();
        let known = registered.by_ino.get(&ino).and_then(Weak::upgrade);
        let id = match known {
            Some(id) => id,
            None => Arc::new(reply.open_backing(file)?),
        };
        registered.by_ino.insert(ino, Arc::downgrade(&id));
        registered.by_fh.insert(fh, Arc::clone(&id));
        Ok(id)
    }

    /// Forgets a handle, and the registration with the last one.
    pub(super) fn release(&self, ino: u64, fh: u64) {
        let mut registered = self.0.lock();
        if registered.by_fh.remove(&fh).is_some()
            && registered
                .by_ino
                .get(&ino)
                .is_some_and(|id| id.strong_count() == 0)
        {
            registered.by_ino.remove(&ino);
        }
    }
}
