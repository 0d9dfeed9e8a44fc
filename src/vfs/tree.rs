//! A view as the kernel sees it: one directory of files with inode numbers and attributes.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::time::{Duration, SystemTime};

use super::VfsError;
use crate::layout::{Content, VirtualFile};
use crate::source::{Source, SourceError};

/// Inode number of the root directory.
pub const ROOT: u64 = 1;

/// The preferred size of reads (`st_blksize`): 1 MiB.
pub const BLOCK_SIZE: u32 = 1 << 20;

/// One file of a view.
#[derive(Debug, Clone)]
pub struct ViewFile {
    /// Its name in the root directory.
    pub name: OsString,
    /// Its bytes.
    pub content: VirtualFile,
    /// Value of the extended attribute `user.ggufuse.source`.
    pub sources_text: Vec<u8>,
}

/// All files of a mount and the sources that they are made of.
#[derive(Debug, Clone)]
pub struct View {
    /// The files; names are unique.
    pub files: Vec<ViewFile>,
    /// The sources that the files' extents index.
    pub sources: Vec<Source>,
    /// `merged` or `shards`.
    pub kind: &'static str,
    /// What the mount's options say of owner and mode.
    pub ownership: Ownership,
}

/// Owner, group and withheld mode bits, where a mount's options set them; else the process's own and none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ownership {
    /// Owner of everything.
    pub uid: Option<u32>,
    /// Group of everything.
    pub gid: Option<u32>,
    /// Mode bits taken away.
    pub umask: u16,
}

/// What stat shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Length in blocks of 512 bytes.
    pub blocks: u64,
    /// The newest modification of a source.
    pub mtime: SystemTime,
    /// The root directory, else a regular file.
    pub is_dir: bool,
    /// Permission bits.
    pub mode: u16,
    /// Owner: the user that the process runs as, unless the mount says otherwise.
    pub uid: u32,
    /// Group: likewise.
    pub gid: u32,
    /// Number of links.
    pub nlink: u32,
    /// Preferred size of reads.
    pub blksize: u32,
}

/// Inode numbers given out. Those of one view are never used for another: the kernel caches pages and sizes by
/// inode, so a number stands for the same bytes for the life of the mount.
#[derive(Debug)]
pub(super) struct Inodes {
    next: u64,
}

impl Default for Inodes {
    fn default() -> Inodes {
        Inodes { next: ROOT + 1 }
    }
}

impl Inodes {
    fn number(&mut self) -> u64 {
        let ino = self.next;
        self.next = ino.saturating_add(1);
        ino
    }

    /// Whether a file ever had this number.
    pub(super) fn issued(&self, ino: u64) -> bool {
        (ROOT.saturating_add(1)..self.next).contains(&ino)
    }
}

/// A file of a tree: its attributes and the sources that it uses.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) attr: Attr,
    used: Vec<usize>,
}

/// A view with everything looked up that does not change: an immutable snapshot.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) view: View,
    /// Counts the reloads; different numbers may mean different bytes.
    pub(super) generation: u64,
    pub(super) root: Attr,
    /// In the order of `view.files`.
    pub(super) nodes: Vec<Node>,
    by_name: HashMap<OsString, usize>,
    by_ino: HashMap<u64, usize>,
}

impl Tree {
    pub(super) fn new(view: View, inodes: &mut Inodes, generation: u64) -> Tree {
        let mut tree = Tree {
            root: attr(
                ROOT,
                0,
                &view.sources.iter().collect::<Vec<_>>(),
                view.ownership,
            ),
            generation,
            nodes: Vec::with_capacity(view.files.len()),
            by_name: HashMap::new(),
            by_ino: HashMap::new(),
            view,
        };
        tree.root.is_dir = true;
        tree.root.mode = 0o555 & !tree.view.ownership.umask;
        tree.root.nlink = 2;
        let ownership = tree.view.ownership;
        for (index, file) in tree.view.files.iter().enumerate() {
            let used: BTreeSet<usize> = (file.content.extents().iter())
                .filter_map(|extent| match extent.content {
                    Content::Source { source, .. } => Some(source),
                    Content::Inline(_) | Content::Zeros => None,
                })
                .collect();
            let sources: Vec<&Source> = used
                .iter()
                .filter_map(|&i| tree.view.sources.get(i))
                .collect();
            let ino = inodes.number();
            tree.by_name.insert(file.name.clone(), index);
            tree.by_ino.insert(ino, index);
            let attr = attr(ino, file.content.len(), &sources, ownership);
            tree.nodes.push(Node {
                attr,
                used: used.into_iter().collect(),
            });
        }
        tree
    }

    pub(super) fn index_of_name(&self, name: &OsStr) -> Result<usize, VfsError> {
        self.by_name.get(name).copied().ok_or(VfsError::NotFound)
    }

    pub(super) fn index_of_ino(&self, ino: u64) -> Result<usize, VfsError> {
        if ino == ROOT {
            return Err(VfsError::IsDir);
        }
        self.by_ino.get(&ino).copied().ok_or(VfsError::NotFound)
    }

    pub(super) fn file(&self, index: usize) -> Result<(&ViewFile, &Node), VfsError> {
        self.view
            .files
            .get(index)
            .zip(self.nodes.get(index))
            .ok_or(VfsError::NotFound)
    }

    /// Fails when a path that file `index` is made of no longer leads to the file that is open.
    pub(super) fn verify(&self, index: usize) -> Result<(), SourceError> {
        let Some(node) = self.nodes.get(index) else {
            return Ok(());
        };
        node.used
            .iter()
            .filter_map(|&i| self.view.sources.get(i))
            .try_for_each(Source::verify_path)
    }
}

fn attr(ino: u64, size: u64, sources: &[&Source], ownership: Ownership) -> Attr {
    // SAFETY: getuid and getgid only read process state and always succeed.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let uid = ownership.uid.unwrap_or(uid);
    let gid = ownership.gid.unwrap_or(gid);
    let mtime = sources
        .iter()
        .map(|source| source.identity().mtime)
        .max()
        .unwrap_or_default();
    let mode = sources
        .iter()
        .fold(0o444, |mode, source| mode & readable(source, gid));
    Attr {
        ino,
        size,
        blocks: size.div_ceil(512),
        mtime: time(mtime),
        is_dir: false,
        mode: mode & !ownership.umask,
        uid,
        gid,
        nlink: 1,
        blksize: BLOCK_SIZE,
    }
}

/// Who may read a source, told for our own owner and group. We could open it, so our user may; our group has
/// the bits of the source's group only if it is the same group, else those of all others.
fn readable(source: &Source, gid: u32) -> u16 {
    let Ok((mode, group)) = source.mode_and_group() else {
        return 0o400;
    };
    let mut bits = 0o400;
    if mode & (if group == gid { 0o040 } else { 0o004 }) != 0 {
        bits |= 0o040;
    }
    if mode & 0o004 != 0 {
        bits |= 0o004;
    }
    bits
}

fn time((seconds, nanos): (i64, i64)) -> SystemTime {
    let nanos = Duration::from_nanos(u64::try_from(nanos).unwrap_or(0));
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(whole)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(whole)
    };
    base.and_then(|base| base.checked_add(nanos))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
