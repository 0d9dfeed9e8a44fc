//! Disks that are small or fail.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Whether this process may mount file systems of its own; says so if not.
pub fn can_mount() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    let can = root && Path::new("/dev/loop-control").exists();
    if !can {
        eprintln!("not run: needs root and loop devices");
    }
    can
}

/// Runs a shell line that must succeed; what it prints.
pub fn sh(line: &str, args: &[&Path]) -> String {
    let out = Command::new("sh")
        .args(["-ec", line, "sh"])
        .args(args)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{line}: {errors}");
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

/// A file system on a loop device.
pub struct LoopDisk {
    dir: tempfile::TempDir,
    device: PathBuf,
}

impl LoopDisk {
    /// An ext4 of 128 MiB. Its blocks are those of a sparse file in `folder`.
    pub fn new(folder: &Path) -> LoopDisk {
        LoopDisk::with(folder, "128M", "mkfs.ext4 -q -O ^has_journal")
    }

    /// A file system of this size that `make` makes.
    pub fn with(folder: &Path, size: &str, make: &str) -> LoopDisk {
        let dir = tempfile::tempdir_in(folder).unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        let line = format!(
            r#"truncate -s {size} "$1/disk"; {make} "$1/disk" >&2; losetup --show -f "$1/disk""#
        );
        let device = sh(&line, &[dir.path()]).into();
        let disk = LoopDisk { dir, device };
        sh(r#"mount "$1" "$2""#, &[&disk.device, &disk.path()]);
        disk
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The disk loses all its blocks: what is not in memory is an error from now on.
    pub fn fail(&self) {
        let disk = File::options()
            .write(true)
            .open(self.dir.path().join("disk"))
            .unwrap();
        disk.set_len(0).unwrap();
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(self.path()).output());
        drop(Command::new("losetup").arg("-d").arg(&self.device).output());
    }
}

/// A file system in memory that is soon full.
pub struct Tmpfs {
    dir: tempfile::TempDir,
}

impl Tmpfs {
    pub fn new(bytes: u64) -> Tmpfs {
        let dir = tempfile::tempdir().unwrap();
        let line = format!(r#"mount -t tmpfs -o size={bytes} ggufuse-test "$1""#);
        sh(&line, &[dir.path()]);
        Tmpfs { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A file that was deleted keeps its room while a command that another thread starts has, until its exec, our
    /// descriptors.
    pub fn wait_until_empty(&self) {
        let path = std::ffi::CString::new(self.path().to_str().unwrap()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            // SAFETY: all-zero bytes are a valid statvfs.
            let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
            // SAFETY: the string ends in NUL, and the pointer is to a live statvfs.
            assert_eq!(unsafe { libc::statvfs(path.as_ptr(), &raw mut stat) }, 0);
            if stat.f_bfree == stat.f_blocks {
                return;
            }
            assert!(Instant::now() < deadline, "something is left on it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fills it to the last byte.
    pub fn fill(&self) {
        let line = r#"dd if=/dev/zero of="$1/filler" bs=64K 2>/dev/null || true"#;
        sh(line, &[self.path()]);
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(self.path()).output());
    }
}
