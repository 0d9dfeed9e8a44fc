//! The operations: lookup, open, read, and so on, on what is shown now or on what a handle was opened on.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use super::attr::{Attr, DirItem, Ownership};
use super::cache::Cache;
use super::dirs::{Dirs, Found, ROOT};
use super::entry::{About, Entry, FileContent, Folder, Model, Plan, View};
use super::error::VfsError;
use super::handle::{Handle, Handles};
use super::model::{ModelDir, State};
use super::planned::Planned;
use super::stats::{Models, Statistics, Stats};
use super::xattr::cut;
use crate::source::{Source, SourceError};

/// Bytes of plans that are kept, roughly.
const KEPT_PLANS: usize = 64 << 20;

/// The file system behind a mount.
///
/// Locks are taken in this order: a model's state, then the directories or the cache.
#[derive(Debug)]
pub struct Fs {
    dirs: RwLock<Dirs>,
    cache: Mutex<Cache>,
    handles: Handles,
    stats: Stats,
    ownership: Ownership,
}

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The handle.
    pub fh: u64,
    /// An earlier reader of this inode read in small pieces, which go faster through the page cache.
    pub small_reads: bool,
    /// The bytes are this handle's alone, so nobody may cache them.
    pub computed: bool,
}

/// What statfs shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Size of all files in blocks; none is free.
    pub blocks: u64,
    /// Number of inodes; none is free.
    pub files: u64,
    /// Bytes in a block.
    pub block_size: u32,
    /// The longest name.
    pub name_len: u32,
}

impl Fs {
    /// A file system whose root is the directory of one model, planned already to `view`.
    ///
    /// # Errors
    /// None that is known: the model is there.
    pub fn model(plan: Arc<dyn Plan>, view: View, ownership: Ownership) -> Result<Fs, VfsError> {
        let about = About {
            mtime: std::time::SystemTime::UNIX_EPOCH,
            bytes: 0,
        };
        let fs = Fs::new(Entry::Model(Model { plan, about }), ownership, KEPT_PLANS);
        let found = fs.dirs.read().find(ROOT)?;
        if let Found::Model(model) = found {
            model.set_served(!view.provisional);
            fs.adopt(&model, &mut *model.lock()?, view)?;
        }
        Ok(fs)
    }

    /// A file system of many models.
    pub fn library(root: Folder, ownership: Ownership) -> Fs {
        Fs::new(Entry::Folder(root), ownership, KEPT_PLANS)
    }

    /// `kept`: bytes of plans that are kept.
    pub(super) fn new(root: Entry, ownership: Ownership, kept: usize) -> Fs {
        Fs {
            dirs: RwLock::new(Dirs::new(root)),
            cache: Mutex::new(Cache::new(kept)),
            handles: Handles::new(),
            stats: Stats::new(),
            ownership,
        }
    }

    /// Shows another library in place of the one before. What is the same keeps its inode numbers. Files that are
    /// open stay readable; else what is gone or has changed lets go of its sources. What is provisional is planned anew
    /// at the next look.
    pub fn show(&self, root: Folder) {
        self.dirs.write().show(ROOT, root);
        let kept = self.cache.lock().all();
        for (dir, plan) in kept {
            let shown = matches!(self.dirs.read().find(dir), Ok(Found::Model(_)));
            if !shown || plan.view.provisional || plan.verify_all().is_err() {
                self.cache.lock().forget(dir, &plan);
            }
        }
    }

    fn keep(&self, model: &ModelDir, planned: &Arc<Planned>) {
        let _out = self.cache.lock().keep(model.ino, planned);
    }

    /// The last plan of a model, or a new one where it has none, or had to give it up.
    fn planned(&self, model: &Arc<ModelDir>) -> Result<Arc<Planned>, VfsError> {
        let mut state = model.lock()?;
        if let Some(planned) = state.last.upgrade() {
            self.keep(model, &planned);
            self.stats.plan_hit();
            return Ok(planned);
        }
        self.plan(model, &mut state)
    }

    fn plan(&self, model: &Arc<ModelDir>, state: &mut State) -> Result<Arc<Planned>, VfsError> {
        self.stats.plan();
        let view = model.plan.plan();
        model.set_served(view.as_ref().is_ok_and(|view| !view.provisional));
        self.adopt(model, state, view?)
    }

    /// Numbers the files of a view: as before where they are the same bytes as before.
    fn adopt(
        &self,
        model: &Arc<ModelDir>,
        state: &mut State,
        view: View,
    ) -> Result<Arc<Planned>, VfsError> {
        let first = match &state.numbers {
            Some((first, signature)) if signature.is_of(&view) => *first,
            _ => {
                let mut dirs = self.dirs.write();
                let numbered = dirs.number_files(model, view.files.len());
                numbered.ok_or(VfsError::Stale)?
            }
        };
        let about = model.about();
        let planned = Arc::new(Planned::new(view, first, self.ownership, about.mtime));
        model.set_about(planned.about(about));
        state.numbers = Some((first, planned.signature()));
        state.last = Arc::downgrade(&planned);
        self.keep(model, &planned);
        Ok(planned)
    }

    /// This plan if file `index` of it is unchanged (all files, where none is named), else a new one.
    fn fresh(
        &self,
        model: &Arc<ModelDir>,
        planned: Arc<Planned>,
        index: Option<usize>,
    ) -> Result<Arc<Planned>, VfsError> {
        let changed = match index.map_or_else(|| planned.verify_all(), |i| planned.verify(i)) {
            Ok(()) if !planned.is_due() => return Ok(planned),
            Ok(()) => None,
            Err(changed @ SourceError::Changed { .. }) => Some(changed),
            Err(error @ SourceError::Io { .. }) => return Err(error.into()),
        };
        let mut state = model.lock()?;
        if let Some(now) = state.last.upgrade()
            && !Arc::ptr_eq(&now, &planned)
        {
            return Ok(now);
        }
        if changed.is_some() {
            self.stats.change();
        }
        let next = self.plan(model, &mut state);
        match (next, changed) {
            (Ok(next), Some(changed)) => {
                log::info!("{changed}: the view is planned anew");
                Ok(next)
            }
            (Err(error), Some(changed)) => {
                log::warn!("{changed}; planning the view anew failed: {error}");
                Err(changed.into())
            }
            (next, None) => next,
        }
    }

    /// Attributes of a name in a directory.
    ///
    /// # Errors
    /// `NotFound`, or `NotDir` when `parent` is a file.
    pub fn lookup(&self, parent: u64, name: &OsStr) -> Result<Attr, VfsError> {
        let found = self.dirs.read().find(parent)?;
        let model = match found {
            Found::Folder => {
                let dirs = self.dirs.read();
                return dirs.attr(dirs.child(parent, name)?, self.ownership);
            }
            Found::File(_) => return Err(VfsError::NotDir),
            Found::Model(model) => model,
        };
        let mut planned = self.planned(&model)?;
        // So that the size that an open goes by is the new one. Where it cannot be had the old view stays visible.
        let index = planned.index_of_name(name).ok();
        if let Ok(next) = self.fresh(&model, Arc::clone(&planned), index) {
            planned = next;
        }
        model.file_attr(&planned, planned.index_of_name(name)?)
    }

    /// Attributes of an inode; of the view that `fh` was opened on, if given.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn attr(&self, ino: u64, fh: Option<u64>) -> Result<Attr, VfsError> {
        if let Some(Ok(handle)) = fh.map(|fh| self.handles.get(fh)) {
            return handle.attr();
        }
        let found = self.dirs.read().find(ino);
        let gone = match found {
            Ok(Found::Folder | Found::Model(_)) => {
                return self.dirs.read().attr(ino, self.ownership);
            }
            Ok(Found::File(model)) => {
                let planned = self.planned(&model)?;
                if let Some(index) = planned.index_of_ino(ino) {
                    return model.file_attr(&planned, index);
                }
                VfsError::Stale
            }
            Err(error) => error,
        };
        // fstat comes without the handle: a file of an earlier view that is still open has its attributes.
        self.handles
            .of_ino(ino)
            .map_or(Err(gone), |handle| handle.attr())
    }

    /// Opens a directory. Plans a model's view anew if a source has changed, so that the listing shows the files that an
    /// open will find; where no new view can be had the old one stays visible.
    ///
    /// # Errors
    /// `NotDir`, `NotFound`, `Stale`.
    pub fn opendir(&self, ino: u64) -> Result<u64, VfsError> {
        let found = self.dirs.read().find(ino)?;
        match found {
            Found::Folder => {}
            Found::File(_) => return Err(VfsError::NotDir),
            Found::Model(model) => {
                let planned = self.planned(&model)?;
                drop(self.fresh(&model, planned, None));
            }
        }
        Ok(self.handles.open_dir(ino))
    }

    /// The entries of an open directory, `.` and `..` first: listed anew when it is read from its start, else as they
    /// were then.
    ///
    /// # Errors
    /// `BadHandle`, or `Stale` when the directory is gone.
    pub fn readdir(&self, fh: u64, from_start: bool) -> Result<Arc<Vec<DirItem>>, VfsError> {
        let dir = self.handles.dir(fh)?;
        if from_start {
            let items = Arc::new(self.list(dir.ino)?);
            *dir.items.lock() = items;
        }
        let items = dir.items.lock();
        Ok(Arc::clone(&items))
    }

    fn list(&self, ino: u64) -> Result<Vec<DirItem>, VfsError> {
        let found = self.dirs.read().find(ino)?;
        let item = |name: &OsStr, attr| DirItem {
            name: name.to_owned(),
            attr,
        };
        let dots = |dirs: &Dirs| -> Result<Vec<DirItem>, VfsError> {
            let parent = dirs.attr(dirs.parent(ino), self.ownership)?;
            let own = dirs.attr(ino, self.ownership)?;
            Ok(vec![item(".".as_ref(), own), item("..".as_ref(), parent)])
        };
        match found {
            Found::File(_) => Err(VfsError::NotDir),
            Found::Folder => {
                let dirs = self.dirs.read();
                let mut items = dots(&dirs)?;
                for (name, &child) in dirs.children(ino)? {
                    items.push(item(name, dirs.attr(child, self.ownership)?));
                }
                Ok(items)
            }
            Found::Model(model) => {
                let planned = self.planned(&model)?;
                let mut items = dots(&self.dirs.read())?;
                for (index, file) in planned.view.files.iter().enumerate() {
                    items.push(item(&file.name, model.file_attr(&planned, index)?));
                }
                Ok(items)
            }
        }
    }

    /// Forgets an open directory.
    ///
    /// # Errors
    /// `BadHandle`.
    pub fn releasedir(&self, fh: u64) -> Result<(), VfsError> {
        self.handles.release_dir(fh)
    }

    /// Checks `access(2)`'s mask.
    ///
    /// # Errors
    /// `ReadOnly` for writing, `Denied` for executing a file, `NotFound`.
    pub fn access(&self, ino: u64, mask: i32) -> Result<(), VfsError> {
        let attr = self.attr(ino, None)?;
        if mask & libc::W_OK != 0 {
            return Err(VfsError::ReadOnly);
        }
        if mask & libc::X_OK != 0 && !attr.is_dir {
            return Err(VfsError::Denied);
        }
        Ok(())
    }

    /// Opens a file with `open(2)`'s flags. When a source has changed, the view is planned anew first.
    ///
    /// # Errors
    /// `ReadOnly` for any flag that writes, `IsDir`, `NotFound`, `Source` when the sources changed and no new
    /// view can be had, or what a computed file answers.
    pub fn open(&self, ino: u64, flags: i32) -> Result<Opened, VfsError> {
        self.stats.count(self.try_open(ino, flags))
    }

    fn try_open(&self, ino: u64, flags: i32) -> Result<Opened, VfsError> {
        let found = self.dirs.read().find(ino)?;
        let Found::File(model) = found else {
            return Err(VfsError::IsDir);
        };
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return Err(VfsError::ReadOnly);
        }
        // Planned anew, the file may have another number now: the kernel then looks its name up again.
        let planned = self.planned(&model)?;
        let index = planned.index_of_ino(ino).ok_or(VfsError::Stale)?;
        let planned = self.fresh(&model, planned, Some(index))?;
        let index = planned.index_of_ino(ino).ok_or(VfsError::Stale)?;
        let (file, _) = planned.file(index)?;
        let computed = match &file.content {
            FileContent::Fixed(_) => None,
            FileContent::Computed(compute) => {
                let bytes = self.stats.computed(compute.compute())?;
                model.was_computed(&file.name, bytes.len());
                Some(bytes)
            }
        };
        self.stats.open();
        Ok(Opened {
            small_reads: self.handles.take_small_open(ino),
            computed: computed.is_some(),
            fh: self
                .handles
                .open(Handle::new(model, planned, index, ino, computed)),
        })
    }

    /// The source file that an open file is identical to, if it is one.
    ///
    /// # Errors
    /// `BadHandle`, or `Source` when it has changed by now.
    pub fn identical(&self, fh: u64) -> Result<Option<Arc<File>>, VfsError> {
        let handle = self.handles.get(fh)?;
        let whole = handle.planned.whole_source(handle.index);
        Ok(whole.map(Source::unchecked).transpose()?)
    }

    /// Forgets a handle.
    ///
    /// # Errors
    /// `BadHandle`.
    pub fn release(&self, fh: u64) -> Result<(), VfsError> {
        self.handles.release(fh)
    }

    /// Reads up to `size` bytes at `offset`, fewer only at the end of the file, and gives them to `send`, which must
    /// only pass them to a system call: they may lie in a map of a source. `direct` says that a reader asked, not the
    /// kernel to fill its cache. `buf` is used where bytes have to be put
    /// together; it grows as needed and never shrinks. No lock is held while bytes move.
    ///
    /// # Errors
    /// `BadHandle`, `Invalid`, or `Source`; `send` is then not called.
    pub fn read_with(
        &self,
        fh: u64,
        offset: u64,
        size: u32,
        direct: bool,
        buf: &mut Vec<u8>,
        send: impl FnOnce(&[u8]),
    ) -> Result<(), VfsError> {
        let read = |handle: Arc<Handle>| {
            if direct {
                handle.count_direct(size);
            }
            let start = Instant::now();
            handle.read(offset, size, buf, |bytes| {
                self.stats.read(bytes.len());
                send(bytes);
            })?;
            self.stats.took(start.elapsed());
            Ok(())
        };
        self.stats.count(self.handles.get(fh).and_then(read))
    }

    /// What this mount has done, and what it has.
    pub fn statistics(&self) -> Statistics {
        let mut models = Models::default();
        for model in self.dirs.read().models() {
            let count = match model.served() {
                Some(true) => &mut models.served,
                Some(false) => &mut models.refused,
                None => &mut models.unseen,
            };
            *count = count.saturating_add(1);
        }
        self.stats.copy(self.handles.len(), models)
    }

    /// The path in the mount of an inode, or of the file that is open as `fh`; for messages.
    pub fn path(&self, ino: u64, fh: Option<u64>) -> PathBuf {
        let opened = fh.and_then(|fh| self.handles.get(fh).ok());
        let found = self.dirs.read().find(ino);
        let (model, planned) = match &opened {
            Some(handle) => (Arc::clone(&handle.model), Some(Arc::clone(&handle.planned))),
            None => match found {
                Ok(Found::File(model)) => (model, None),
                Ok(Found::Folder | Found::Model(_)) => return self.dirs.read().path(ino),
                Err(_) => return PathBuf::from(format!("inode {ino}")),
            },
        };
        let planned = planned.or_else(|| model.lock().ok()?.last.upgrade());
        let name = planned.and_then(|planned| {
            let file = planned.file(planned.index_of_ino(ino)?).ok()?.0;
            Some(file.name.clone())
        });
        let name = name.unwrap_or_else(|| format!("inode {ino}").into());
        self.dirs.read().path(model.ino).join(name)
    }

    /// Size and number of the files.
    pub fn statfs(&self) -> StatFs {
        const BLOCK: u32 = 4096;
        let dirs = self.dirs.read();
        let bytes = dirs
            .models()
            .fold(0u64, |sum, model| sum.saturating_add(model.about().bytes));
        StatFs {
            blocks: bytes.div_ceil(u64::from(BLOCK)),
            files: dirs.len(),
            block_size: BLOCK,
            name_len: 255,
        }
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttr`, `NotFound`.
    pub fn getxattr(&self, ino: u64, name: &OsStr) -> Result<Vec<u8>, VfsError> {
        let found = self.dirs.read().find(ino)?;
        let name = name.to_str().ok_or(VfsError::NoAttr)?;
        match name {
            "user.ggufuse.version" => return Ok(env!("CARGO_PKG_VERSION").into()),
            "user.ggufuse.stats" if ino == ROOT => {
                return Ok(self.statistics().text().into_bytes());
            }
            _ => {}
        }
        match (name, found) {
            ("user.ggufuse.view", Found::Folder) => Ok(b"library".to_vec()),
            ("user.ggufuse.view", Found::Model(model) | Found::File(model)) => {
                Ok(self.planned(&model)?.view.kind.into())
            }
            ("user.ggufuse.sources", Found::Model(model)) => {
                let planned = self.planned(&model)?;
                let lines = planned
                    .view
                    .sources
                    .iter()
                    .map(|source| [source.path().as_os_str().as_bytes(), b"\n"].concat());
                Ok(cut(lines.collect::<Vec<_>>().concat()))
            }
            ("user.ggufuse.source", Found::File(model)) => {
                let planned = self.planned(&model)?;
                let index = planned.index_of_ino(ino).ok_or(VfsError::Stale)?;
                Ok(cut(planned.file(index)?.0.sources_text.clone()))
            }
            _ => Err(VfsError::NoAttr),
        }
    }

    /// Names of the extended attributes, each with a zero byte after it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn listxattr(&self, ino: u64) -> Result<Vec<u8>, VfsError> {
        let found = self.dirs.read().find(ino)?;
        let mut names = b"user.ggufuse.view\0user.ggufuse.version\0".to_vec();
        names.extend_from_slice(match found {
            Found::Folder => b"",
            Found::Model(_) => b"user.ggufuse.sources\0",
            Found::File(_) => b"user.ggufuse.source\0",
        });
        if ino == ROOT {
            names.extend_from_slice(b"user.ggufuse.stats\0");
        }
        Ok(names)
    }
}
