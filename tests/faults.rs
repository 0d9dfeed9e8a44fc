//! What breaks beneath the mount, or in our own code, fails one read; the daemon lives.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[allow(dead_code, reason = "its main is for the benchmark")]
#[path = "../examples/plain_fuse.rs"]
mod plain_fuse;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{GgufBuilder, Mounted, ggufuse};
use ggufuse::layout::VirtualFile;
use ggufuse::mount::{MountOptions, serve};
use ggufuse::source::Source;
use ggufuse::vfs::{FileContent, Fs, Ownership, Plan, VfsError, View, ViewFile};

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

/// A model of one tensor of 32 MiB, and its bytes.
fn large(path: &Path) -> Vec<u8> {
    let model = GgufBuilder::sample(1, 8 << 20);
    model.write(path);
    model.bytes()
}

#[derive(Debug)]
struct Panicking;

impl Plan for Panicking {
    fn plan(&self) -> Result<View, VfsError> {
        panic!("on purpose")
    }
}

#[test]
fn a_panic_is_an_error_of_one_call() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    fs::write(&path, b"0123456789").unwrap();
    let files = ["m", "other"].map(|name| {
        let mut content = VirtualFile::default();
        if name == "m" {
            content.push_source(0, 0, 10).unwrap();
        } else {
            content.push_inline(b"still here".to_vec()).unwrap();
        }
        ViewFile {
            name: name.into(),
            content: FileContent::Fixed(content),
            sources_text: Vec::new(),
        }
    });
    let view = View {
        files: files.into(),
        sources: vec![Source::open(&path).unwrap()],
        kind: "merged",
        provisional: false,
    };
    let panicking = Arc::new(Fs::model(Arc::new(Panicking), view, Ownership::default()).unwrap());
    let point = tempfile::tempdir().unwrap();
    let (ready, mounted) = std::sync::mpsc::channel();
    let at = point.path().to_owned();
    let server = std::thread::spawn(move || {
        serve(panicking, &at, &MountOptions::default(), || {
            ready.send(()).map_err(std::io::Error::other)
        })
    });
    mounted.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(fs::read(point.path().join("m")).unwrap(), b"0123456789");
    fs::write(&path, b"another length").unwrap();
    // Until the kernel asks again what the name stands for.
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(errno(fs::read(point.path().join("m"))), Some(libc::EIO));
    assert_eq!(fs::read(point.path().join("other")).unwrap(), b"still here");
    let out = ggufuse(&["unmount", point.path().to_str().unwrap()]);
    assert!(out.status.success());
    server.join().unwrap().unwrap();
}

/// The head of the view can be read, its tail not; and then a second time.
fn only_the_tail_fails(view: &Path, whole: &[u8], errors: &[i32]) {
    let file = File::open(view).unwrap();
    for _ in 0..2 {
        let mut head = vec![0; 1 << 20];
        file.read_exact_at(&mut head, 0).unwrap();
        assert_eq!(head, whole[..1 << 20]);
        let mut tail = vec![0; 1 << 20];
        let error = errno(file.read_exact_at(&mut tail, 24 << 20)).unwrap();
        assert!(errors.contains(&error), "errno {error}");
    }
    drop(file);
    let again = File::open(view).unwrap().metadata().unwrap();
    assert_eq!(again.len(), whole.len() as u64);
}

#[test]
fn a_source_on_a_file_system_that_fails() {
    let dir = tempfile::tempdir().unwrap();
    let backing = dir.path().join("backing");
    let whole = large(&backing);
    let point = tempfile::tempdir().unwrap();
    let mut config = fuser::Config::default();
    config.mount_options = vec![fuser::MountOption::RO];
    let plain = plain_fuse::Plain::file(&backing).unwrap();
    let below = fuser::Session::new(plain, point.path(), &config)
        .unwrap()
        .spawn()
        .unwrap();
    let mount = Mounted::new(&point.path().join("data"), &["--view", "merged"]);
    let backing = File::options().write(true).open(&backing).unwrap();
    backing.set_len(16 << 20).unwrap();
    only_the_tail_fails(&mount.path().join("data.gguf"), &whole, &[libc::EIO]);
    mount.unmount();
    below.umount_and_join().unwrap();
}

/// An ext4 on a loop device.
struct LoopDisk {
    dir: tempfile::TempDir,
    device: PathBuf,
}

fn sh(line: &str, args: &[&Path]) -> String {
    let out = Command::new("sh")
        .args(["-ec", line, "sh"])
        .args(args)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{line}: {errors}");
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

impl LoopDisk {
    fn new() -> LoopDisk {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        let make = r#"truncate -s 128M "$1/disk"; mkfs.ext4 -q -O ^has_journal "$1/disk"; losetup --show -f "$1/disk""#;
        let device = sh(make, &[dir.path()]).into();
        let disk = LoopDisk { dir, device };
        sh(r#"mount "$1" "$2""#, &[&disk.device, &disk.path()]);
        disk
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The disk loses all its blocks: what is not in memory is an error from now on.
    fn fail(&self) {
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

/// Writes a file's pages out and drops those behind its first 2 MiB from memory.
fn forget_tail(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    // SAFETY: advice about a descriptor that is open.
    let done =
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 2 << 20, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(done, 0);
}

#[test]
fn a_source_on_a_disk_that_fails() {
    let root = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !root || !Path::new("/dev/loop-control").exists() {
        eprintln!("not run: needs root and loop devices");
        return;
    }
    let disk = LoopDisk::new();
    let model = disk.path().join("m.gguf");
    let whole = large(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    forget_tail(&model);
    disk.fail();
    // EFAULT where the map was lent, and the kernel met the error in its copy.
    let errors = [libc::EIO, libc::EFAULT];
    only_the_tail_fails(&mount.path().join("m.gguf"), &whole, &errors);
    mount.unmount();
}
