//! A model's directory: planned when it is looked at, planned anew when a source has changed.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};

use super::attr::Attr;
use super::entry::{About, Model, Plan};
use super::error::VfsError;
use super::planned::{Planned, Signature};

/// A header of some megabytes is read from the slowest disk in this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// A model's directory.
#[derive(Debug)]
pub(super) struct ModelDir {
    pub(super) ino: u64,
    pub(super) plan: Arc<dyn Plan>,
    about: Mutex<About>,
    /// Held while planning, so that those who look at the same time plan once.
    state: Mutex<State>,
    /// Whether its files are served, as far as known; never locked for long.
    served: Mutex<Option<bool>>,
    /// Size and time of what computed files were last.
    computed: Mutex<HashMap<OsString, (u64, SystemTime)>>,
}

/// The last plan, as long as somebody holds it: the cache, or an open file.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) last: Weak<Planned>,
    /// The first number of its files, and the bytes that they stand for.
    pub(super) numbers: Option<(u64, Signature)>,
}

impl ModelDir {
    pub(super) fn new(ino: u64, model: Model) -> ModelDir {
        ModelDir {
            ino,
            plan: model.plan,
            about: Mutex::new(model.about),
            state: Mutex::default(),
            served: Mutex::default(),
            computed: Mutex::default(),
        }
    }

    pub(super) fn is(&self, model: &Model) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.plan), Arc::as_ptr(&model.plan))
    }

    pub(super) fn about(&self) -> About {
        *self.about.lock()
    }

    pub(super) fn set_about(&self, about: About) {
        *self.about.lock() = about;
    }

    /// Whether its files are served; `None` while nobody has looked.
    pub(super) fn served(&self) -> Option<bool> {
        *self.served.lock()
    }

    pub(super) fn set_served(&self, served: bool) {
        *self.served.lock() = Some(served);
    }

    /// The state, once nobody else plans.
    ///
    /// # Errors
    /// `Failed` when that takes too long: the plan of a model may wait for a link that leads back to it through the mount.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, State>, VfsError> {
        self.state
            .try_lock_for(PATIENCE)
            .ok_or_else(|| VfsError::Failed("its model takes too long to be read".to_owned()))
    }

    /// Attributes of a file of `planned`; of a computed one as it was last.
    pub(super) fn file_attr(&self, planned: &Planned, index: usize) -> Result<Attr, VfsError> {
        let (file, attr) = planned.file(index)?;
        let last = attr.volatile.then(|| self.computed.lock()).and_then(|all| {
            let &(size, mtime) = all.get(&file.name)?;
            Some(Attr {
                size,
                blocks: size.div_ceil(512),
                mtime,
                ..*attr
            })
        });
        Ok(last.unwrap_or(*attr))
    }

    /// Takes note of what a computed file is now.
    pub(super) fn was_computed(&self, name: &OsString, bytes: usize) {
        let now = (bytes as u64, SystemTime::now());
        self.computed.lock().insert(name.clone(), now);
    }
}
