//! What breaks beneath the mount, or in our own code, fails one read; the daemon lives.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[allow(dead_code, reason = "its main is for the benchmark")]
#[path = "../examples/plain_fuse.rs"]
mod plain_fuse;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::disk::{LoopDisk, can_mount, sh};
use common::{GgufBuilder, Mounted, ggufuse};
use ggufuse::layout::VirtualFile;
use ggufuse::mount::{MountOptions, Unmounter, serve};
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
        serve(
            panicking,
            &at,
            &MountOptions::default(),
            &Unmounter::here(),
            || Ok(()),
            || ready.send(()).map_err(std::io::Error::other),
        )
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
    // Detached: a command that another test starts may hold a copy of a descriptor for a moment.
    let at = point.path();
    sh(
        r#"umount -l "$1" 2>/dev/null || fusermount3 -uz "$1""#,
        &[at],
    );
    // Dropping it would unmount once more.
    std::mem::forget(below);
}

#[test]
fn a_source_on_a_disk_that_fails() {
    if !can_mount() {
        return;
    }
    let disk = LoopDisk::new(&std::env::temp_dir());
    let model = disk.path().join("m.gguf");
    let whole = large(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    common::forget_tail(&model, 2 << 20);
    disk.fail();
    // EFAULT where the map was lent, and the kernel met the error in its copy.
    let errors = [libc::EIO, libc::EFAULT];
    only_the_tail_fails(&mount.path().join("m.gguf"), &whole, &errors);
    mount.unmount();
}
