//! What stat shows.

use std::ffi::OsString;
use std::time::{Duration, SystemTime};

use crate::source::Source;

/// The preferred size of reads (`st_blksize`): 1 MiB.
pub const BLOCK_SIZE: u32 = 1 << 20;

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
    /// A directory, else a regular file.
    pub is_dir: bool,
    /// Size and times may be others at the next look, so nobody may keep them: a computed file.
    pub volatile: bool,
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

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirItem {
    /// Its name, `.` and `..` included.
    pub name: OsString,
    /// Its attributes.
    pub attr: Attr,
}

impl Ownership {
    /// A directory with `folders` directories in it.
    pub(super) fn dir(self, ino: u64, folders: usize, mtime: SystemTime) -> Attr {
        Attr {
            is_dir: true,
            mode: 0o555 & !self.umask,
            nlink: u32::try_from(folders).map_or(u32::MAX, |n| n.saturating_add(2)),
            ..self.file(ino, 0, &[], mtime)
        }
    }

    /// A file of `size` bytes that are taken from `sources`; modified at `mtime` where it has none.
    pub(super) fn file(self, ino: u64, size: u64, sources: &[&Source], mtime: SystemTime) -> Attr {
        // SAFETY: getuid and getgid only read process state and always succeed.
        let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
        let uid = self.uid.unwrap_or(uid);
        let gid = self.gid.unwrap_or(gid);
        let mode = sources
            .iter()
            .fold(0o444, |mode, source| mode & readable(source, gid));
        Attr {
            ino,
            size,
            blocks: size.div_ceil(512),
            mtime: newest(sources.iter().copied()).unwrap_or(mtime),
            is_dir: false,
            volatile: false,
            mode: mode & !self.umask,
            uid,
            gid,
            nlink: 1,
            blksize: BLOCK_SIZE,
        }
    }
}

/// The newest modification of any of the sources.
pub(super) fn newest<'a>(sources: impl Iterator<Item = &'a Source>) -> Option<SystemTime> {
    sources
        .map(|source| source.identity().mtime)
        .max()
        .map(time)
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
