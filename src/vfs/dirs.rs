//! The directory tree: which number is which directory or belongs to which model's files.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use super::attr::{Attr, Ownership};
use super::entry::{Entry, Folder};
use super::error::VfsError;
use super::model::ModelDir;

/// Inode number of the root directory.
pub const ROOT: u64 = 1;

#[derive(Debug)]
pub(super) struct Dirs {
    dirs: HashMap<u64, Dir>,
    /// Number of files by the first one's inode number, and the model that they belong to.
    files: BTreeMap<u64, (u64, Arc<ModelDir>)>,
    /// Numbers from here on were never given out. None is given out twice: the kernel caches pages and sizes by
    /// number, so one stands for the same bytes for the life of the mount.
    next: u64,
}

#[derive(Debug)]
struct Dir {
    parent: u64,
    kind: DirKind,
}

#[derive(Debug, Clone)]
enum DirKind {
    Folder {
        children: BTreeMap<OsString, u64>,
        mtime: SystemTime,
    },
    Model {
        model: Arc<ModelDir>,
        /// The first number of its files, once they have been planned.
        files: Option<u64>,
    },
}

/// What an inode number stands for.
#[derive(Debug, Clone)]
pub(super) enum Found {
    Folder,
    Model(Arc<ModelDir>),
    /// A file of this model.
    File(Arc<ModelDir>),
}

impl Dirs {
    pub(super) fn new(root: Entry) -> Dirs {
        let mut dirs = Dirs {
            dirs: HashMap::new(),
            files: BTreeMap::new(),
            next: ROOT,
        };
        dirs.add(ROOT, root);
        dirs
    }

    fn numbers(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next = first.saturating_add(count);
        first
    }

    /// What has this number now.
    ///
    /// # Errors
    /// `Stale` for one that is gone, `NotFound` for one that never was.
    pub(super) fn find(&self, ino: u64) -> Result<Found, VfsError> {
        if let Some(dir) = self.dirs.get(&ino) {
            return Ok(match &dir.kind {
                DirKind::Folder { .. } => Found::Folder,
                DirKind::Model { model, .. } => Found::Model(Arc::clone(model)),
            });
        }
        match self.files.range(..=ino).next_back() {
            Some((&first, (count, model))) if ino < first.saturating_add(*count) => {
                Ok(Found::File(Arc::clone(model)))
            }
            _ if (ROOT..self.next).contains(&ino) => Err(VfsError::Stale),
            _ => Err(VfsError::NotFound),
        }
    }

    /// Attributes of a directory.
    pub(super) fn attr(&self, ino: u64, ownership: Ownership) -> Result<Attr, VfsError> {
        let dir = self.dirs.get(&ino).ok_or(VfsError::NotFound)?;
        Ok(match &dir.kind {
            DirKind::Folder { children, mtime } => ownership.dir(ino, children.len(), *mtime),
            DirKind::Model { model, .. } => ownership.dir(ino, 0, model.about().mtime),
        })
    }

    /// The directory that `ino` is in; the root's is the root.
    pub(super) fn parent(&self, ino: u64) -> u64 {
        self.dirs.get(&ino).map_or(ROOT, |dir| dir.parent)
    }

    /// The path of a directory from the root, which is empty; for messages.
    pub(super) fn path(&self, ino: u64) -> PathBuf {
        if ino == ROOT {
            return PathBuf::new();
        }
        let parent = self.parent(ino);
        let children = self.children(parent);
        let name = children.ok().and_then(|children| {
            let (name, _) = children.iter().find(|&(_, &child)| child == ino)?;
            Some(name)
        });
        match name {
            Some(name) => self.path(parent).join(name),
            None => PathBuf::from(format!("inode {ino}")),
        }
    }

    /// The directory of this name in a folder.
    pub(super) fn child(&self, folder: u64, name: &OsStr) -> Result<u64, VfsError> {
        let children = self.children(folder)?;
        children.get(name).copied().ok_or(VfsError::NotFound)
    }

    /// Names and numbers in a folder.
    pub(super) fn children(&self, folder: u64) -> Result<&BTreeMap<OsString, u64>, VfsError> {
        match self.dirs.get(&folder).map(|dir| &dir.kind) {
            Some(DirKind::Folder { children, .. }) => Ok(children),
            _ => Err(VfsError::NotFound),
        }
    }

    /// Numbers for the files of a model, instead of those that it had. `None` when the model is gone.
    pub(super) fn number_files(&mut self, owner: &Arc<ModelDir>, count: usize) -> Option<u64> {
        let first = self.numbers(count as u64);
        match self.dirs.get_mut(&owner.ino).map(|dir| &mut dir.kind) {
            Some(DirKind::Model { model, files }) if Arc::ptr_eq(model, owner) => {
                if let Some(before) = files.replace(first) {
                    self.files.remove(&before);
                }
                if count > 0 {
                    self.files.insert(first, (count as u64, Arc::clone(owner)));
                }
                Some(first)
            }
            _ => None,
        }
    }

    /// All models.
    pub(super) fn models(&self) -> impl Iterator<Item = &Arc<ModelDir>> {
        self.dirs.values().filter_map(|dir| match &dir.kind {
            DirKind::Folder { .. } => None,
            DirKind::Model { model, .. } => Some(model),
        })
    }

    /// The number of directories and planned files.
    pub(super) fn len(&self) -> u64 {
        let files = self.files.values().map(|(count, _)| count).sum::<u64>();
        files.saturating_add(self.dirs.len() as u64)
    }

    /// Makes a folder what is given. What is there already keeps its number: folders by their names, models by their plans.
    pub(super) fn show(&mut self, ino: u64, folder: Folder) {
        let Ok(children) = self.children(ino) else {
            return;
        };
        let mut old = children.clone();
        let mut now = BTreeMap::new();
        for (name, entry) in folder.entries {
            let same = old.get(&name).copied().filter(|&ino| self.is(ino, &entry));
            if let Some(ino) = same {
                old.remove(&name);
                match (entry, self.find(ino)) {
                    (Entry::Folder(folder), _) => self.show(ino, folder),
                    (Entry::Model(new), Ok(Found::Model(model))) => model.set_about(new.about),
                    (Entry::Model(_), _) => {}
                }
                now.insert(name, ino);
            } else {
                now.insert(name, self.add(ino, entry));
            }
        }
        for gone in old.into_values() {
            self.remove(gone);
        }
        if let Some(dir) = self.dirs.get_mut(&ino) {
            dir.kind = DirKind::Folder {
                children: now,
                mtime: folder.mtime,
            };
        }
    }

    /// Whether a directory is to go on as `entry`.
    fn is(&self, ino: u64, entry: &Entry) -> bool {
        match (self.dirs.get(&ino).map(|dir| &dir.kind), entry) {
            (Some(DirKind::Folder { .. }), Entry::Folder(_)) => true,
            (Some(DirKind::Model { model, .. }), Entry::Model(new)) => model.is(new),
            _ => false,
        }
    }

    fn add(&mut self, parent: u64, entry: Entry) -> u64 {
        let ino = self.numbers(1);
        let (kind, folder) = match entry {
            Entry::Folder(folder) => (
                DirKind::Folder {
                    children: BTreeMap::new(),
                    mtime: folder.mtime,
                },
                Some(folder),
            ),
            Entry::Model(model) => {
                let model = Arc::new(ModelDir::new(ino, model));
                (DirKind::Model { model, files: None }, None)
            }
        };
        self.dirs.insert(ino, Dir { parent, kind });
        if let Some(folder) = folder {
            self.show(ino, folder);
        }
        ino
    }

    fn remove(&mut self, ino: u64) {
        match self.dirs.remove(&ino).map(|dir| dir.kind) {
            Some(DirKind::Folder { children, .. }) => {
                children.into_values().for_each(|child| self.remove(child));
            }
            Some(DirKind::Model { files, .. }) => {
                files.map(|first| self.files.remove(&first));
            }
            None => {}
        }
    }
}
