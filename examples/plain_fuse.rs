//! What a FUSE file system costs without ours: one file `data`, buffered, fuser's defaults. For `contrib/bench`.
//!
//! `plain_fuse FILE MOUNTPOINT` serves FILE's bytes by pread, `plain_fuse null:SIZE MOUNTPOINT` constant ones.
//! It ends when it is unmounted.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};

/// The file system. A file that is truncated behind it is EIO, as on a failing disk.
#[derive(Debug)]
pub struct Plain {
    file: Option<File>,
    size: u64,
}

const TTL: Duration = Duration::from_secs(60);

impl Plain {
    /// A file's bytes.
    pub fn file(path: &Path) -> std::io::Result<Plain> {
        let file = File::open(path)?;
        Ok(Plain {
            size: file.metadata()?.len(),
            file: Some(file),
        })
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let is_dir = ino == 1;
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: INodeNo(ino),
            size: if is_dir { 0 } else { self.size },
            blocks: self.size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: if is_dir {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: 0o555,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Plain {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "data" {
            reply.entry(&TTL, &self.attr(2), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = u64::from(size).min(self.size.saturating_sub(offset));
        let mut buf = vec![7; usize::try_from(len).unwrap_or(0)];
        match self
            .file
            .as_ref()
            .map_or(Ok(()), |file| file.read_exact_at(&mut buf, offset))
        {
            Ok(()) => reply.data(&buf),
            Err(_) => reply.error(Errno::EIO),
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(source), Some(point)) = (args.next(), args.next()) else {
        return Err("plain_fuse FILE|null:SIZE MOUNTPOINT".into());
    };
    let plain = match source.strip_prefix("null:") {
        Some(size) => Plain {
            file: None,
            size: size.parse()?,
        },
        None => Plain::file(Path::new(&source))?,
    };
    fuser::mount(plain, point, &Config::default())?;
    Ok(())
}
