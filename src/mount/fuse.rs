//! The adaptor between FUSE requests and [`Fs`]: translation only.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BackingId, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};

use super::passthrough::Backings;
use crate::vfs::{Attr, Fs, Opened, VfsError, XattrReply, fit};

/// For so long the kernel keeps names and attributes: of files, of directories (models come and go).
const FILE_TTL: Duration = Duration::from_secs(1);
const DIR_TTL: Duration = Duration::from_millis(250);
const MAX_READAHEAD: u32 = 2 << 20;
const MAX_WRITE: u32 = 1 << 20;
const MAX_BACKGROUND: u16 = 64;

thread_local! {
    /// Each serving thread reads into one buffer that it keeps.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Whether the kernel caches the files' pages a second time, beside those of the sources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Direct where such files can be mapped, but through the page cache for files that are read in small pieces.
    #[default]
    Auto,
    /// Never, except for maps.
    Direct,
    /// Always.
    Page,
    /// As `Auto`, but files that are identical to a source are read by the kernel, straight from it. Whether it changes
    /// meanwhile nobody checks.
    Passthrough,
}

/// Serves FUSE requests from an [`Fs`].
#[derive(Debug)]
pub struct Adaptor {
    fs: Arc<Fs>,
    cache: CacheMode,
    /// The kernel can map files that are opened with direct I/O.
    direct: AtomicBool,
    /// The kernel can read sources itself, and may.
    passthrough: AtomicBool,
    backings: Backings,
}

impl Adaptor {
    /// An adaptor for `fs` whose files are cached by `cache`.
    pub fn new(fs: Arc<Fs>, cache: CacheMode) -> Adaptor {
        Adaptor {
            fs,
            cache,
            direct: AtomicBool::new(false),
            passthrough: AtomicBool::new(false),
            backings: Backings::default(),
        }
    }

    /// The flags of an open file that we serve.
    fn flags(&self, opened: &Opened) -> FopenFlags {
        let mut flags = FopenFlags::empty();
        // A number stands for the same bytes for ever, so what the kernel has cached is right.
        flags.set(FopenFlags::FOPEN_KEEP_CACHE, !opened.computed);
        let direct = match self.cache {
            // Read to their true end, whatever size stat has said.
            _ if opened.computed => true,
            CacheMode::Auto | CacheMode::Passthrough => {
                !opened.small_reads && self.direct.load(Ordering::Relaxed)
            }
            CacheMode::Direct => true,
            CacheMode::Page => false,
        };
        flags.set(FopenFlags::FOPEN_DIRECT_IO, direct);
        flags
    }

    /// Leaves the reading of an open file to the kernel, where it is identical to a source and the kernel can.
    fn pass_through(&self, ino: u64, fh: u64, reply: &ReplyOpen) -> Option<Arc<BackingId>> {
        if !self.passthrough.load(Ordering::Relaxed) {
            return None;
        }
        let file = self.fs.identical(fh).ok()??;
        match self.backings.open(ino, fh, &file, reply) {
            Ok(id) => Some(id),
            Err(error) => {
                log::warn!(
                    "the kernel does not read sources itself ({error}); they are served as with --cache auto"
                );
                self.passthrough.store(false, Ordering::Relaxed);
                None
            }
        }
    }
}

impl Adaptor {
    /// Logs an error with what was asked for, and translates it.
    fn fail(&self, operation: &str, ino: INodeNo, error: &VfsError) -> Errno {
        if log::log_enabled!(level(error)) {
            let path = self.fs.path(ino.0, None);
            let (path, errno) = (path.display(), error.errno());
            log::log!(level(error), operation, path:%, errno; "{operation} of {path}: {error}");
        }
        Errno::from_i32(error.errno())
    }

    fn fail_read(&self, ino: INodeNo, fh: FileHandle, offset: u64, error: &VfsError) -> Errno {
        if log::log_enabled!(level(error)) {
            let path = self.fs.path(ino.0, Some(fh.0));
            let (path, errno) = (path.display(), error.errno());
            log::log!(level(error), operation = "read", path:%, offset, errno;
                "read of {path} at offset {offset}: {error}");
        }
        Errno::from_i32(error.errno())
    }

    fn xattr(
        &self,
        ino: INodeNo,
        operation: &str,
        value: Result<Vec<u8>, VfsError>,
        size: u32,
        reply: ReplyXattr,
    ) {
        match value.and_then(|value| fit(value, size)) {
            Ok(XattrReply::Size(size)) => reply.size(size),
            Ok(XattrReply::Data(data)) => reply.data(&data),
            Err(error) => reply.error(self.fail(operation, ino, &error)),
        }
    }
}

/// What a program may ask for without anything being wrong is for debugging.
fn level(error: &VfsError) -> log::Level {
    match error {
        VfsError::NotFound | VfsError::Stale | VfsError::NoAttr | VfsError::Range => {
            log::Level::Debug
        }
        _ => log::Level::Warn,
    }
}

/// Runs a callback's body. A panic drops the reply that was moved in, which answers EIO.
fn guard(operation: &str, body: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        log::error!("{operation}: panicked; answered with EIO");
    }
}

fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.mtime,
        mtime: attr.mtime,
        ctime: attr.mtime,
        crtime: attr.mtime,
        kind: kind(attr),
        perm: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: attr.blksize,
        flags: 0,
    }
}

/// For so long the kernel may keep a name, and its attributes.
fn ttl(attr: &Attr) -> Duration {
    match (attr.volatile, attr.is_dir) {
        (true, _) => Duration::ZERO,
        (false, true) => DIR_TTL,
        (false, false) => FILE_TTL,
    }
}

fn kind(attr: &Attr) -> FileType {
    if attr.is_dir {
        FileType::Directory
    } else {
        FileType::RegularFile
    }
}

/// Position of a directory entry from the offset that the kernel hands back.
fn position(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// A callback that writes: refused.
macro_rules! read_only {
    ($($name:ident($($arg:ident: $type:ty),*) -> $reply:ty;)*) => {$(
        fn $name(&self, _req: &Request, ino: INodeNo, $($arg: $type,)* reply: $reply) {
            guard(stringify!($name), move || reply.error(self.fail(stringify!($name), ino, &VfsError::ReadOnly)));
        }
    )*};
}

impl Filesystem for Adaptor {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A refused value comes back as the largest allowed one.
        if let Err(most) = config.set_max_readahead(MAX_READAHEAD) {
            let _ = config.set_max_readahead(most);
        }
        if let Err(most) = config.set_max_write(MAX_WRITE) {
            let _ = config.set_max_write(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        for wish in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
        ] {
            if config.add_capabilities(wish).is_err() {
                log::debug!("the kernel lacks {wish:?}");
            }
        }
        let direct = config
            .add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
            .is_ok();
        self.direct.store(direct, Ordering::Relaxed);
        if self.cache == CacheMode::Passthrough {
            // Sources on an overlay count as one level.
            let can = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
                && config.set_max_stack_depth(2).is_ok();
            self.passthrough.store(can, Ordering::Relaxed);
            if !can {
                log::warn!(
                    "the kernel lacks passthrough (Linux 6.9); files are served as with --cache auto"
                );
            }
        }
        log::debug!(
            "files open with {}",
            if direct {
                "direct I/O"
            } else {
                "the page cache"
            }
        );
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        guard("lookup", move || match self.fs.lookup(parent.0, name) {
            Ok(attr) => reply.entry(&ttl(&attr), &file_attr(&attr), Generation(0)),
            Err(error) => reply.error(self.fail("lookup", parent, &error)),
        });
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        guard("getattr", move || {
            match self.fs.attr(ino.0, fh.map(|fh| fh.0)) {
                Ok(attr) => reply.attr(&ttl(&attr), &file_attr(&attr)),
                Err(error) => reply.error(self.fail("getattr", ino, &error)),
            }
        });
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        guard("open", move || match self.fs.open(ino.0, flags.0) {
            Ok(opened) => {
                let fh = FileHandle(opened.fh);
                match self.pass_through(ino.0, opened.fh, &reply) {
                    Some(id) => reply.opened_passthrough(fh, FopenFlags::empty(), &id),
                    None => reply.opened(fh, self.flags(&opened)),
                }
            }
            Err(error) => reply.error(self.fail("open", ino, &error)),
        });
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        guard("read", move || {
            let mut reply = Some(reply);
            let result = BUFFER.with_borrow_mut(|buffer| {
                self.fs
                    .read_with(fh.0, offset, size, lock_owner.is_some(), buffer, |bytes| {
                        if let Some(reply) = reply.take() {
                            reply.data(bytes);
                        }
                    })
            });
            if let (Err(error), Some(reply)) = (result, reply) {
                reply.error(self.fail_read(ino, fh, offset, &error));
            }
        });
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        guard("flush", move || reply.ok());
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        guard("release", move || {
            self.backings.release(ino.0, fh.0);
            match self.fs.release(fh.0) {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(self.fail("release", ino, &error)),
            }
        });
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        guard("fsync", move || reply.ok());
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        guard("opendir", move || match self.fs.opendir(ino.0) {
            Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::empty()),
            Err(error) => reply.error(self.fail("opendir", ino, &error)),
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        guard("readdir", move || {
            match self.fs.readdir(fh.0, offset == 0) {
                Ok(items) => {
                    for (next, item) in (1u64..).zip(&*items).skip(position(offset)) {
                        if reply.add(INodeNo(item.attr.ino), next, kind(&item.attr), &item.name) {
                            break;
                        }
                    }
                    reply.ok();
                }
                Err(error) => reply.error(self.fail("readdir", ino, &error)),
            }
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        guard("readdirplus", move || {
            match self.fs.readdir(fh.0, offset == 0) {
                Ok(items) => {
                    for (next, item) in (1u64..).zip(&*items).skip(position(offset)) {
                        let (attr, ttl) = (file_attr(&item.attr), ttl(&item.attr));
                        if reply.add(attr.ino, next, &item.name, &ttl, &attr, Generation(0)) {
                            break;
                        }
                    }
                    reply.ok();
                }
                Err(error) => reply.error(self.fail("readdirplus", ino, &error)),
            }
        });
    }

    fn releasedir(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        guard("releasedir", move || match self.fs.releasedir(fh.0) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.fail("releasedir", ino, &error)),
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        guard("statfs", move || {
            let s = self.fs.statfs();
            reply.statfs(
                s.blocks,
                0,
                0,
                s.files,
                0,
                s.block_size,
                s.name_len,
                s.block_size,
            );
        });
    }

    fn access(&self, _req: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        guard("access", move || match self.fs.access(ino.0, mask.bits()) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.fail("access", ino, &error)),
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        guard("getxattr", move || {
            self.xattr(ino, "getxattr", self.fs.getxattr(ino.0, name), size, reply)
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        guard("listxattr", move || {
            self.xattr(ino, "listxattr", self.fs.listxattr(ino.0), size, reply)
        });
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        guard("ioctl", move || reply.error(Errno::ENOTTY));
    }

    // The kernel does the seeking itself from now on.
    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: i64,
        _whence: i32,
        reply: ReplyLseek,
    ) {
        guard("lseek", move || reply.error(Errno::ENOSYS));
    }

    read_only! {
        setattr(
            _mode: Option<u32>, _uid: Option<u32>, _gid: Option<u32>, _size: Option<u64>, _atime: Option<TimeOrNow>,
            _mtime: Option<TimeOrNow>, _ctime: Option<SystemTime>, _fh: Option<FileHandle>, _crtime: Option<SystemTime>,
            _chgtime: Option<SystemTime>, _bkuptime: Option<SystemTime>, _flags: Option<BsdFileFlags>
        ) -> ReplyAttr;
        mknod(_name: &OsStr, _mode: u32, _umask: u32, _rdev: u32) -> ReplyEntry;
        mkdir(_name: &OsStr, _mode: u32, _umask: u32) -> ReplyEntry;
        unlink(_name: &OsStr) -> ReplyEmpty;
        rmdir(_name: &OsStr) -> ReplyEmpty;
        symlink(_link_name: &OsStr, _target: &Path) -> ReplyEntry;
        rename(_name: &OsStr, _newparent: INodeNo, _newname: &OsStr, _flags: RenameFlags) -> ReplyEmpty;
        link(_newparent: INodeNo, _newname: &OsStr) -> ReplyEntry;
        write(
            _fh: FileHandle, _offset: u64, _data: &[u8], _write_flags: WriteFlags, _flags: OpenFlags,
            _lock_owner: Option<LockOwner>
        ) -> ReplyWrite;
        create(_name: &OsStr, _mode: u32, _umask: u32, _flags: i32) -> ReplyCreate;
        setxattr(_name: &OsStr, _value: &[u8], _flags: i32, _position: u32) -> ReplyEmpty;
        removexattr(_name: &OsStr) -> ReplyEmpty;
        fallocate(_fh: FileHandle, _offset: u64, _length: u64, _mode: i32) -> ReplyEmpty;
    }
}
