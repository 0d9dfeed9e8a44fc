//! The operations: lookup, open, read, and so on, on the current view or on the one a handle was opened on.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use parking_lot::{Mutex, RwLock};

use super::VfsError;
use super::tree::{Attr, Inodes, ROOT, Tree, View};
use crate::layout::Piece;
use crate::source::SourceError;

type Reload = Box<dyn Fn() -> Result<View, VfsError> + Send + Sync>;

/// The file system behind a mount.
pub struct Fs {
    current: RwLock<Arc<Tree>>,
    reload: Reload,
    /// Held while reloading, so that concurrent opens reload once.
    inodes: Mutex<Inodes>,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    next_handle: AtomicU64,
    /// Inodes that were read in small pieces, and how many opens that still counts for.
    small_reads: Mutex<HashMap<u64, u8>>,
    stats: Stats,
    /// Seconds from the epoch to the start.
    since: u64,
}

#[derive(Debug)]
struct Handle {
    tree: Arc<Tree>,
    index: usize,
    ino: u64,
    /// Reads that a reader asked for itself (not the kernel to fill its cache), and their bytes.
    direct_reads: AtomicU64,
    direct_bytes: AtomicU64,
}

/// Readers of pieces below this, on average over at least so many, do better with the kernel's readahead.
const SMALL_READ: u64 = 32 << 10;
const ENOUGH_READS: u64 = 64;

/// After so many opens through the page cache an inode is tried without it again: nobody can tell there how large the
/// reader's pieces are.
const SMALL_OPENS: u8 = 16;

#[derive(Debug, Default)]
struct Stats {
    reads: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The handle.
    pub fh: u64,
    /// An earlier reader of this inode read in small pieces, which go faster through the page cache.
    pub small_reads: bool,
}

/// One entry of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirItem {
    /// Its name, `.` and `..` included.
    pub name: OsString,
    /// Its attributes.
    pub attr: Attr,
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

impl fmt::Debug for Fs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fs")
            .field("current", &self.current)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Fs {
    /// A file system that shows `view`, and what `reload` plans anew when a source was found changed at an open.
    pub fn new(view: View, reload: Reload) -> Fs {
        let mut inodes = Inodes::default();
        let tree = Tree::new(view, &mut inodes, 0);
        Fs {
            current: RwLock::new(Arc::new(tree)),
            reload,
            inodes: Mutex::new(inodes),
            handles: RwLock::default(),
            next_handle: AtomicU64::new(1),
            small_reads: Mutex::default(),
            stats: Stats::default(),
            since: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }

    fn tree(&self) -> Arc<Tree> {
        Arc::clone(&self.current.read())
    }

    fn count<T>(&self, result: Result<T, VfsError>) -> Result<T, VfsError> {
        if result.is_err() {
            self.stats.errors.fetch_add(1, Relaxed);
        }
        result
    }

    /// The current tree if file `index` of `tree` is unchanged, else a reloaded one.
    fn fresh(&self, tree: Arc<Tree>, index: usize) -> Result<Arc<Tree>, VfsError> {
        let Err(error) = tree.verify(index) else {
            return Ok(tree);
        };
        let changed = match error {
            SourceError::Changed { .. } => error,
            SourceError::Io { .. } => return Err(error.into()),
        };
        let mut inodes = self.inodes.lock();
        let now = self.tree();
        if now.generation != tree.generation {
            return Ok(now);
        }
        match (self.reload)() {
            Ok(view) => {
                log::info!("{changed}: the view is planned anew");
                let next = Arc::new(Tree::new(
                    view,
                    &mut inodes,
                    tree.generation.wrapping_add(1),
                ));
                *self.current.write() = Arc::clone(&next);
                Ok(next)
            }
            Err(error) => {
                log::warn!("{changed}; planning the view anew failed: {error}");
                Err(changed.into())
            }
        }
    }

    /// Attributes of a name in a directory.
    ///
    /// # Errors
    /// `NotFound`, or `NotDir` when `parent` is not the root.
    pub fn lookup(&self, parent: u64, name: &OsStr) -> Result<Attr, VfsError> {
        let mut tree = self.tree();
        if parent != ROOT {
            tree.index_of_ino(parent)?;
            return Err(VfsError::NotDir);
        }
        let index = tree.index_of_name(name)?;
        // So that the size that an open goes by is the new one. Where it cannot be had the old view stays visible.
        if let Ok(next) = self.fresh(Arc::clone(&tree), index) {
            tree = next;
        }
        Ok(tree.file(tree.index_of_name(name)?)?.1.attr)
    }

    /// Attributes of an inode; of the view that `fh` was opened on, if given.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn attr(&self, ino: u64, fh: Option<u64>) -> Result<Attr, VfsError> {
        if let Some(handle) = fh.and_then(|fh| self.handles.read().get(&fh).cloned()) {
            return Ok(handle.tree.file(handle.index)?.1.attr);
        }
        let tree = self.tree();
        if ino == ROOT {
            return Ok(tree.root);
        }
        let Ok(index) = tree.index_of_ino(ino) else {
            // fstat comes without the handle: a file of an earlier view that is still open has its attributes.
            let handles = self.handles.read();
            let open = handles.values().find(|handle| handle.ino == ino);
            return match open {
                Some(handle) => Ok(handle.tree.file(handle.index)?.1.attr),
                None => Err(self.gone(ino)),
            };
        };
        Ok(tree.file(index)?.1.attr)
    }

    /// The error for a number that the current view does not have: with ESTALE the kernel looks the name up again.
    fn gone(&self, ino: u64) -> VfsError {
        if self.inodes.lock().issued(ino) {
            VfsError::Stale
        } else {
            VfsError::NotFound
        }
    }

    /// The root's entries, `.` and `..` first.
    ///
    /// # Errors
    /// `NotDir` or `NotFound` when `ino` is not the root.
    pub fn readdir(&self, ino: u64) -> Result<Vec<DirItem>, VfsError> {
        let tree = self.tree();
        if ino != ROOT {
            tree.index_of_ino(ino)?;
            return Err(VfsError::NotDir);
        }
        let dots = [".", ".."].into_iter().map(|name| DirItem {
            name: name.into(),
            attr: tree.root,
        });
        let files = tree.view.files.iter().zip(&tree.nodes);
        Ok(dots
            .chain(files.map(|(file, node)| DirItem {
                name: file.name.clone(),
                attr: node.attr,
            }))
            .collect())
    }

    /// Opens the directory. Plans the view anew if a source has changed, so that the listing shows the files that an
    /// open will find; where no new view can be had the old one stays visible.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn opendir(&self, ino: u64) -> Result<(), VfsError> {
        let tree = self.tree();
        if ino != ROOT {
            tree.index_of_ino(ino)?;
            return Err(VfsError::NotDir);
        }
        let changed = (0..tree.view.files.len()).find(|&index| tree.verify(index).is_err());
        if let Some(index) = changed {
            drop(self.fresh(tree, index));
        }
        Ok(())
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
    /// `ReadOnly` for any flag that writes, `IsDir`, `NotFound`, or `Source` when the sources changed and no new
    /// view can be had.
    pub fn open(&self, ino: u64, flags: i32) -> Result<Opened, VfsError> {
        self.count(self.try_open(ino, flags))
    }

    fn try_open(&self, ino: u64, flags: i32) -> Result<Opened, VfsError> {
        let tree = self.tree();
        let index = tree.index_of_ino(ino).map_err(|error| match error {
            VfsError::NotFound => self.gone(ino),
            other => other,
        })?;
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return Err(VfsError::ReadOnly);
        }
        let tree = self.fresh(tree, index)?;
        // Planned anew: the file has another number now.
        let index = tree.index_of_ino(ino).map_err(|_| VfsError::Stale)?;
        let small_reads = {
            let mut small = self.small_reads.lock();
            match small.get_mut(&ino) {
                None => false,
                Some(0) => small.remove(&ino).is_none(),
                Some(opens) => {
                    *opens = opens.saturating_sub(1);
                    true
                }
            }
        };
        let fh = self.next_handle.fetch_add(1, Relaxed);
        self.handles.write().insert(
            fh,
            Arc::new(Handle {
                tree,
                index,
                ino,
                direct_reads: AtomicU64::new(0),
                direct_bytes: AtomicU64::new(0),
            }),
        );
        Ok(Opened { fh, small_reads })
    }

    /// Forgets a handle.
    ///
    /// # Errors
    /// `BadHandle`.
    pub fn release(&self, fh: u64) -> Result<(), VfsError> {
        let handle = self
            .handles
            .write()
            .remove(&fh)
            .ok_or(VfsError::BadHandle)?;
        let reads = handle.direct_reads.load(Relaxed);
        let small = handle.direct_bytes.load(Relaxed) < reads.saturating_mul(SMALL_READ);
        if reads >= ENOUGH_READS && small {
            self.small_reads.lock().insert(handle.ino, SMALL_OPENS);
        }
        Ok(())
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
        self.count(self.try_read(fh, offset, size, direct, buf, |bytes| {
            self.stats.reads.fetch_add(1, Relaxed);
            self.stats.bytes.fetch_add(bytes.len() as u64, Relaxed);
            send(bytes);
        }))
    }

    fn try_read(
        &self,
        fh: u64,
        offset: u64,
        size: u32,
        direct: bool,
        buf: &mut Vec<u8>,
        send: impl FnOnce(&[u8]),
    ) -> Result<(), VfsError> {
        let handle = self
            .handles
            .read()
            .get(&fh)
            .cloned()
            .ok_or(VfsError::BadHandle)?;
        if direct {
            handle.direct_reads.fetch_add(1, Relaxed);
            handle.direct_bytes.fetch_add(u64::from(size), Relaxed);
        }
        let end = offset
            .checked_add(u64::from(size))
            .ok_or(VfsError::Invalid)?;
        i64::try_from(end).map_err(|_| VfsError::Invalid)?;
        let content = &handle.tree.file(handle.index)?.0.content;
        let source = |index: usize| {
            let sources = &handle.tree.view.sources;
            sources.get(index).ok_or(VfsError::Invalid)
        };
        let mut pieces = content.resolve(offset, u64::from(size));
        match (pieces.next(), pieces.next()) {
            (Some(Piece::Inline(bytes)), None) => {
                send(bytes);
                return Ok(());
            }
            (
                Some(Piece::Source {
                    source: index,
                    offset,
                    len,
                }),
                None,
            ) => {
                if let Some(lent) = source(index)?.lend(offset, len)? {
                    send(lent.bytes());
                    return Ok(());
                }
            }
            _ => {}
        }
        let want = end.min(content.len()).saturating_sub(offset);
        let want = usize::try_from(want).map_err(|_| VfsError::Invalid)?;
        if buf.len() < want {
            buf.resize(want, 0);
        }
        let mut rest = buf.get_mut(..want).ok_or(VfsError::Invalid)?;
        for piece in content.resolve(offset, u64::from(size)) {
            let len = usize::try_from(piece.len()).map_err(|_| VfsError::Invalid)?;
            let (part, tail) = rest.split_at_mut_checked(len).ok_or(VfsError::Invalid)?;
            match piece {
                Piece::Inline(bytes) => part.copy_from_slice(bytes),
                Piece::Source {
                    source: index,
                    offset,
                    ..
                } => source(index)?.read_exact_at(part, offset)?,
                Piece::Zeros(_) => part.fill(0),
            }
            rest = tail;
        }
        if !rest.is_empty() {
            return Err(VfsError::Invalid);
        }
        send(buf.get(..want).ok_or(VfsError::Invalid)?);
        Ok(())
    }

    /// Size and number of the files.
    pub fn statfs(&self) -> StatFs {
        const BLOCK: u32 = 4096;
        let tree = self.tree();
        let blocks = tree.nodes.iter().fold(0u64, |sum, node| {
            sum.saturating_add(node.attr.size.div_ceil(u64::from(BLOCK)))
        });
        StatFs {
            blocks,
            files: (tree.nodes.len() as u64).saturating_add(1),
            block_size: BLOCK,
            name_len: 255,
        }
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttr`, `NotFound`.
    pub fn getxattr(&self, ino: u64, name: &OsStr) -> Result<Vec<u8>, VfsError> {
        let tree = self.tree();
        let file = if ino == ROOT {
            None
        } else {
            Some(tree.file(tree.index_of_ino(ino)?)?.0)
        };
        match (name.to_str(), file) {
            (Some("user.ggufuse.view"), _) => Ok(tree.view.kind.into()),
            (Some("user.ggufuse.version"), _) => Ok(env!("CARGO_PKG_VERSION").into()),
            (Some("user.ggufuse.source"), Some(file)) => Ok(cut(file.sources_text.clone())),
            (Some("user.ggufuse.stats"), None) => Ok(self.stats_text().into_bytes()),
            (Some("user.ggufuse.sources"), None) => {
                let lines = tree
                    .view
                    .sources
                    .iter()
                    .map(|source| [source.path().as_os_str().as_bytes(), b"\n"].concat());
                Ok(cut(lines.collect::<Vec<_>>().concat()))
            }
            _ => Err(VfsError::NoAttr),
        }
    }

    /// Names of the extended attributes, each with a zero byte after it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn listxattr(&self, ino: u64) -> Result<Vec<u8>, VfsError> {
        self.attr(ino, None)?;
        Ok(if ino == ROOT {
            &b"user.ggufuse.stats\0user.ggufuse.view\0user.ggufuse.version\0user.ggufuse.sources\0"
                [..]
        } else {
            &b"user.ggufuse.source\0user.ggufuse.view\0user.ggufuse.version\0"[..]
        }
        .to_vec())
    }

    fn stats_text(&self) -> String {
        let Stats {
            reads,
            bytes,
            errors,
        } = &self.stats;
        format!(
            "since {}\nreads {}\nbytes {}\nerrors {}\nopen_handles {}\n",
            self.since,
            reads.load(Relaxed),
            bytes.load(Relaxed),
            errors.load(Relaxed),
            self.handles.read().len()
        )
    }
}

/// An extended attribute has at most 64 KiB: a longer list of lines ends with how many are left out.
fn cut(mut list: Vec<u8>) -> Vec<u8> {
    const MOST: usize = (64 << 10) - 64;
    if list.len() > MOST {
        let end = list
            .get(..MOST)
            .and_then(|head| head.iter().rposition(|&b| b == b'\n'))
            .unwrap_or(0);
        let left = list
            .get(end..)
            .unwrap_or_default()
            .trim_ascii()
            .split(|&b| b == b'\n')
            .count();
        list.truncate(end);
        list.extend_from_slice(format!("\n... and {left} more").as_bytes());
    }
    list
}

#[cfg(test)]
impl Fs {
    fn read(&self, fh: u64, offset: u64, size: u32) -> Result<Vec<u8>, VfsError> {
        let mut got = Vec::new();
        self.read_with(fh, offset, size, true, &mut Vec::new(), |bytes| {
            got.extend_from_slice(bytes)
        })?;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::VirtualFile;
    use crate::source::Source;
    use crate::vfs::ViewFile;
    use std::path::{Path, PathBuf};

    fn view(path: &Path) -> Result<View, VfsError> {
        let source = Source::open(path)?;
        let mut content = VirtualFile::default();
        content.push_inline(b"head".to_vec()).unwrap();
        content.push_zeros(3).unwrap();
        content.push_source(0, 2, source.len() - 2).unwrap();
        let files = vec![ViewFile {
            name: "m.gguf".into(),
            content,
            sources_text: b"text".to_vec(),
        }];
        Ok(View {
            files,
            sources: vec![source],
            kind: "merged",
            ownership: super::super::Ownership::default(),
        })
    }

    fn fixture() -> (tempfile::TempDir, PathBuf, Fs) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"0123456789").unwrap();
        let again = path.clone();
        let fs = Fs::new(view(&path).unwrap(), Box::new(move || view(&again)));
        (dir, path, fs)
    }

    fn errno<T: fmt::Debug>(result: Result<T, VfsError>) -> i32 {
        result.unwrap_err().errno()
    }

    #[test]
    fn reads_across_pieces() {
        let (_dir, _path, fs) = fixture();
        let ino = fs.lookup(ROOT, OsStr::new("m.gguf")).unwrap().ino;
        let fh = fs.open(ino, libc::O_RDONLY).unwrap().fh;
        let whole = b"head\0\0\x0023456789";
        for from in 0..20u64 {
            for len in 0..20u32 {
                let a = (from as usize).min(whole.len());
                let b = (from as usize + len as usize).min(whole.len());
                assert_eq!(fs.read(fh, from, len).unwrap(), &whole[a..b]);
            }
        }
        let mut dirty = vec![0xff; 64];
        assert_eq!(
            {
                let mut got = Vec::new();
                fs.read_with(fh, 0, 64, true, &mut dirty, |bytes| {
                    got.extend_from_slice(bytes)
                })
                .unwrap();
                got
            },
            whole
        );
        assert_eq!(errno(fs.read(fh, u64::MAX, 1)), libc::EINVAL);
        assert_eq!(errno(fs.read(fh, i64::MAX as u64, 1)), libc::EINVAL);
        assert!(fs.read(fh, i64::MAX as u64 - 1, 1).unwrap().is_empty());
        let stats = String::from_utf8(fs.getxattr(ROOT, OsStr::new("user.ggufuse.stats")).unwrap())
            .unwrap();
        assert!(stats.ends_with("errors 2\nopen_handles 1\n"), "{stats}");
    }

    #[test]
    fn handles_and_names_that_are_not_there() {
        let (_dir, _path, fs) = fixture();
        assert_eq!(errno(fs.read(7, 0, 1)), libc::EBADF);
        assert_eq!(errno(fs.release(7)), libc::EBADF);
        let fh = fs.open(2, libc::O_RDONLY).unwrap().fh;
        fs.release(fh).unwrap();
        assert_eq!(errno(fs.read(fh, 0, 1)), libc::EBADF);
        assert_eq!(errno(fs.lookup(ROOT, OsStr::new("x"))), libc::ENOENT);
        assert_eq!(errno(fs.lookup(2, OsStr::new("x"))), libc::ENOTDIR);
        assert_eq!(errno(fs.open(ROOT, libc::O_RDONLY)), libc::EISDIR);
        assert_eq!(errno(fs.open(2, libc::O_RDWR)), libc::EROFS);
        assert_eq!(errno(fs.open(2, libc::O_TRUNC)), libc::EROFS);
        assert_eq!(errno(fs.open(3, libc::O_RDONLY)), libc::ENOENT);
        assert_eq!(
            errno(fs.getxattr(2, OsStr::new("user.ggufuse.stats"))),
            libc::ENODATA
        );
        assert_eq!(errno(fs.access(2, libc::W_OK)), libc::EROFS);
        assert_eq!(errno(crate::vfs::fit(vec![1, 2], 1)), libc::ERANGE);
        assert_eq!(fs.readdir(ROOT).unwrap().len(), 3);
    }

    #[test]
    fn a_truncated_source_is_stale() {
        let (_dir, path, fs) = fixture();
        let fh = fs.open(2, libc::O_RDONLY).unwrap().fh;
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4)
            .unwrap();
        assert_eq!(errno(fs.read(fh, 7, 8)), libc::ESTALE);
        assert_eq!(fs.read(fh, 0, 7).unwrap(), b"head\0\0\0");
    }

    #[test]
    fn a_changed_source_is_reloaded_at_open() {
        let (dir, path, fs) = fixture();
        let old = fs.open(2, libc::O_RDONLY).unwrap();
        let new_path = dir.path().join("b");
        std::fs::write(&new_path, b"abcdefghijkl").unwrap();
        std::fs::rename(&new_path, &path).unwrap();
        // The kernel looks the name up again, and finds another number: what it has cached of 2 stays that of 2.
        assert_eq!(errno(fs.open(2, libc::O_RDONLY)), libc::ESTALE);
        let name = fs.readdir(ROOT).unwrap().pop().unwrap().name;
        let ino = fs.lookup(ROOT, &name).unwrap().ino;
        assert_ne!(ino, 2);
        let new = fs.open(ino, libc::O_RDONLY).unwrap();
        assert_eq!(fs.read(old.fh, 7, 99).unwrap(), b"23456789");
        assert_eq!(fs.read(new.fh, 7, 99).unwrap(), b"cdefghijkl");
        assert_eq!(fs.attr(ino, None).unwrap().size, 17);
        // fstat of what is open, with the handle and without.
        assert_eq!(fs.attr(2, Some(old.fh)).unwrap().size, 15);
        assert_eq!(fs.attr(2, None).unwrap().size, 15);
        fs.release(old.fh).unwrap();
        assert_eq!(errno(fs.attr(2, None)), libc::ESTALE);
        assert_eq!(errno(fs.attr(99, None)), libc::ENOENT);
    }

    #[test]
    fn a_deleted_source_serves_old_handles_only() {
        let (_dir, path, fs) = fixture();
        let fh = fs.open(2, libc::O_RDONLY).unwrap().fh;
        std::fs::remove_file(&path).unwrap();
        assert_eq!(errno(fs.open(2, libc::O_RDONLY)), libc::ESTALE);
        assert_eq!(fs.read(fh, 7, 99).unwrap(), b"23456789");
    }
}
