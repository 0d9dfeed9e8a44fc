//! The kernel's mount table, and taking a mount off it.

use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The type of our mounts.
pub const FSTYPE: &str = "fuse.ggufuse";

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// What is mounted (fsname).
    pub source: OsString,
    /// Its type, [`FSTYPE`] for ours.
    pub fstype: String,
    /// Device number, `major:minor`.
    pub device: String,
}

/// All mounts that this process sees, in the order of mounting.
///
/// # Errors
/// Of reading `/proc/self/mountinfo`.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// The mounts of this program.
///
/// # Errors
/// Of reading `/proc/self/mountinfo`.
pub fn ggufuse_mounts() -> io::Result<Vec<MountEntry>> {
    Ok(mounts()?
        .into_iter()
        .filter(|entry| entry.fstype == FSTYPE)
        .collect())
}

fn parse(table: &[u8]) -> Vec<MountEntry> {
    table.split(|&b| b == b'\n').filter_map(line).collect()
}

/// `id parent major:minor root mountpoint options [optional...] - fstype source superoptions`.
fn line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let device = fields.nth(2)?;
    let mountpoint = fields.nth(1)?;
    fields.find(|field| *field == b"-")?;
    let fstype = fields.next()?;
    let source = fields.next()?;
    Some(MountEntry {
        mountpoint: OsString::from_vec(unescape(mountpoint)).into(),
        source: OsString::from_vec(unescape(source)),
        fstype: String::from_utf8_lossy(&unescape(fstype)).into_owned(),
        device: String::from_utf8_lossy(device).into_owned(),
    })
}

/// Undoes the kernel's `\ooo` for blanks, newlines and backslashes.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        if let (b'\\', Some((digits, after))) = (first, tail.split_first_chunk::<3>())
            && let Some(byte) = octal(digits)
        {
            out.push(byte);
            rest = after;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

fn octal(digits: &[u8; 3]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

/// Unmounts `path`; `lazy` detaches it even while files are open.
///
/// # Errors
/// `EBUSY` (resource busy) while files are open and `lazy` is not set, else what umount2 or fusermount3 says.
pub fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    match system(path, lazy) {
        // Not root, or root in a container without CAP_SYS_ADMIN: fusermount3 may still be able to.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => helper(path, lazy),
        done => done,
    }
}

fn system(path: &Path, lazy: bool) -> io::Result<()> {
    let target = CString::new(path.as_os_str().as_bytes())?;
    let flags = libc::UMOUNT_NOFOLLOW | if lazy { libc::MNT_DETACH } else { 0 };
    // SAFETY: target is a NUL-terminated string that outlives the call.
    match unsafe { libc::umount2(target.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn helper(path: &Path, lazy: bool) -> io::Result<()> {
    let output = Command::new("fusermount3")
        .env("LC_ALL", "C")
        .arg(if lazy { "-uz" } else { "-u" })
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("fusermount3: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if said.contains("busy") {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    Err(io::Error::other(if said.is_empty() {
        format!("fusermount3: {}", output.status)
    } else {
        said
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_lines() {
        let table = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            30 22 0:55 / /mnt/a\\040b\\134c\\011 ro - fuse.ggufuse /m/x\\040y ro,user_id=0\n\
            31 22 0:56 / /n rw shared:1 master:2 - tmpfs tmpfs rw\nbroken line\n\n";
        let got = parse(table);
        assert_eq!(got.len(), 3);
        assert_eq!(got[1].mountpoint, Path::new("/mnt/a b\\c\t"));
        assert_eq!(got[1].source, "/m/x y");
        assert_eq!(
            (got[1].fstype.as_str(), got[1].device.as_str()),
            ("fuse.ggufuse", "0:55")
        );
        assert_eq!(
            (got[2].fstype.as_str(), got[0].fstype.as_str()),
            ("tmpfs", "ext4")
        );
    }

    #[test]
    fn odd_escapes_stay() {
        assert_eq!(unescape(b"a\\9x\\04"), b"a\\9x\\04");
        assert_eq!(unescape(b"\\777\\012"), b"\\777\n");
    }

    #[test]
    fn the_real_table_has_a_root() {
        assert!(
            mounts()
                .unwrap()
                .iter()
                .any(|entry| entry.mountpoint == Path::new("/"))
        );
    }

    #[test]
    fn what_is_not_mounted_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(unmount(dir.path(), false).is_err());
    }
}
