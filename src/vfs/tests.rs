use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::*;
use crate::layout::VirtualFile;
use crate::source::Source;

impl Fs {
    fn read(&self, fh: u64, offset: u64, size: u32) -> Result<Vec<u8>, VfsError> {
        let mut got = Vec::new();
        self.read_with(fh, offset, size, true, &mut Vec::new(), |bytes| {
            got.extend_from_slice(bytes)
        })?;
        Ok(got)
    }

    fn names(&self, ino: u64) -> Result<Vec<String>, VfsError> {
        let fh = self.opendir(ino)?;
        let items = self.readdir(fh, true)?;
        self.releasedir(fh)?;
        Ok((items.iter().skip(2))
            .map(|item| item.name.to_str().unwrap().to_owned())
            .collect())
    }

    /// The number that a path below the root has.
    fn ino(&self, path: &str) -> Result<u64, VfsError> {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        parts.try_fold(ROOT, |dir, name| {
            Ok(self.lookup(dir, OsStr::new(name))?.ino)
        })
    }

    fn whole(&self, path: &str) -> Result<Vec<u8>, VfsError> {
        let fh = self.open(self.ino(path)?, libc::O_RDONLY)?.fh;
        let bytes = self.read(fh, 0, 1 << 20);
        self.release(fh)?;
        bytes
    }
}

/// Shows a file behind four bytes and three zeros; a missing one as a provisional text.
#[derive(Debug)]
struct OfFile {
    path: PathBuf,
    refused: bool,
    planned: AtomicUsize,
    clock: Option<Arc<Clock>>,
}

impl OfFile {
    fn new(path: &Path, refused: bool) -> Arc<OfFile> {
        Arc::new(OfFile {
            path: path.to_owned(),
            refused,
            planned: AtomicUsize::new(0),
            clock: None,
        })
    }
}

impl Plan for OfFile {
    fn plan(&self) -> Result<View, VfsError> {
        self.planned.fetch_add(1, Relaxed);
        let source = match Source::open(&self.path) {
            Ok(source) => source,
            Err(error) if self.refused => {
                return Ok(View {
                    files: vec![ViewFile::text("ERROR.txt", error.to_string())],
                    sources: Vec::new(),
                    kind: "refused",
                    provisional: true,
                });
            }
            Err(error) => return Err(error.into()),
        };
        let mut content = VirtualFile::default();
        content.push_inline(b"head".to_vec()).unwrap();
        content.push_zeros(3).unwrap();
        content.push_source(0, 2, source.len() - 2).unwrap();
        let mut files = vec![ViewFile {
            name: "m.gguf".into(),
            content: FileContent::Fixed(content),
            sources_text: b"text".to_vec(),
        }];
        files.extend(self.clock.clone().map(|c| ViewFile::computed("clock", c)));
        Ok(View {
            files,
            sources: vec![source],
            kind: "merged",
            provisional: false,
        })
    }
}

/// Each open reads one more `x`; nothing fits when there are five.
#[derive(Debug, Default)]
struct Clock(Mutex<usize>);

impl Compute for Clock {
    fn compute(&self) -> Result<Vec<u8>, VfsError> {
        let mut n = self.0.lock();
        *n += 1;
        (*n < 5).then(|| b"x".repeat(*n)).ok_or(VfsError::NoMemory)
    }

    fn weight(&self) -> usize {
        0
    }
}

fn fixture() -> (tempfile::TempDir, PathBuf, Fs) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, b"0123456789").unwrap();
    let plan = OfFile::new(&path, false);
    let view = plan.plan().unwrap();
    (
        dir,
        path,
        Fs::model(plan, view, Ownership::default()).unwrap(),
    )
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
    let (mut dirty, mut got) = (vec![0xff; 64], Vec::new());
    fs.read_with(fh, 0, 64, true, &mut dirty, |bytes| {
        got.extend_from_slice(bytes)
    })
    .unwrap();
    assert_eq!(got, whole);
    assert_eq!(errno(fs.read(fh, u64::MAX, 1)), libc::EINVAL);
    assert_eq!(errno(fs.read(fh, i64::MAX as u64, 1)), libc::EINVAL);
    assert!(fs.read(fh, i64::MAX as u64 - 1, 1).unwrap().is_empty());
    let stats =
        String::from_utf8(fs.getxattr(ROOT, OsStr::new("user.ggufuse.stats")).unwrap()).unwrap();
    assert!(
        stats.contains("errors 2\nopen_handles 1\nopens 1\n"),
        "{stats}"
    );
    assert!(
        stats.ends_with(&format!("errors_errno_{} 2\n", libc::EINVAL)),
        "{stats}"
    );
    assert_eq!(fs.path(ino, None).to_str(), Some("m.gguf"));
    assert_eq!(fs.path(ino, Some(fh)).to_str(), Some("m.gguf"));
}

#[test]
fn handles_and_names_that_are_not_there() {
    let (_dir, _path, fs) = fixture();
    assert_eq!(errno(fs.read(7, 0, 1)), libc::EBADF);
    assert_eq!(errno(fs.release(7)), libc::EBADF);
    assert_eq!(errno(fs.readdir(7, true)), libc::EBADF);
    assert_eq!(errno(fs.releasedir(7)), libc::EBADF);
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
    assert_eq!(fs.names(ROOT).unwrap(), ["m.gguf"]);
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
    let ino = fs.ino("m.gguf").unwrap();
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

fn folder(entries: impl IntoIterator<Item = (&'static str, Entry)>) -> Folder {
    Folder {
        entries: (entries.into_iter())
            .map(|(name, entry)| (name.into(), entry))
            .collect::<BTreeMap<_, _>>(),
        mtime: SystemTime::UNIX_EPOCH,
    }
}

fn model(plan: &Arc<OfFile>) -> Entry {
    Entry::Model(Model {
        plan: plan.clone(),
        about: About {
            mtime: SystemTime::UNIX_EPOCH,
            bytes: 10,
        },
    })
}

/// `org/one`, `org/two` and `three`, of files `1`, `2` and `3`.
fn library() -> (tempfile::TempDir, [Arc<OfFile>; 3]) {
    let dir = tempfile::tempdir().unwrap();
    let plans = ["1", "2", "3"].map(|name| {
        std::fs::write(dir.path().join(name), format!("01{name}")).unwrap();
        OfFile::new(&dir.path().join(name), true)
    });
    (dir, plans)
}

fn shown([one, two, three]: &[Arc<OfFile>; 3]) -> Folder {
    let org = folder([("one", model(one)), ("two", model(two))]);
    folder([("org", Entry::Folder(org)), ("three", model(three))])
}

#[test]
fn nested_directories_plan_what_is_looked_at() {
    let (_dir, plans) = library();
    let fs = Fs::library(shown(&plans), Ownership::default());
    assert_eq!(fs.names(ROOT).unwrap(), ["org", "three"]);
    let org = fs.ino("org").unwrap();
    assert_eq!(fs.names(org).unwrap(), ["one", "two"]);
    assert_eq!(fs.attr(org, None).unwrap().nlink, 4);
    let count = || plans.each_ref().map(|plan| plan.planned.load(Relaxed));
    assert_eq!(count(), [0, 0, 0]);
    assert_eq!(fs.whole("org/two/m.gguf").unwrap(), b"head\0\0\x002");
    assert_eq!(fs.whole("org/two/m.gguf").unwrap(), b"head\0\0\x002");
    assert_eq!(count(), [0, 1, 0]);
    let one = fs.ino("org/one").unwrap();
    let fh = fs.opendir(one).unwrap();
    let dots: Vec<u64> = (fs.readdir(fh, true).unwrap().iter())
        .map(|item| item.attr.ino)
        .take(2)
        .collect();
    assert_eq!(dots, [one, org]);
    assert_eq!(errno(fs.open(org, libc::O_RDONLY)), libc::EISDIR);
    assert_eq!(errno(fs.lookup(org, OsStr::new("x"))), libc::ENOENT);
    assert_eq!(
        fs.getxattr(org, OsStr::new("user.ggufuse.view")).unwrap(),
        b"library"
    );
}

#[test]
fn another_library_keeps_the_numbers_of_what_stays() {
    let (_dir, plans) = library();
    let fs = Fs::library(shown(&plans), Ownership::default());
    let paths = ["org", "org/one", "org/one/m.gguf", "three/m.gguf"];
    let before = paths.map(|path| fs.ino(path).unwrap());
    let open = fs.open(before[3], libc::O_RDONLY).unwrap();
    let listed = fs.opendir(ROOT).unwrap();
    assert_eq!(fs.readdir(listed, true).unwrap().len(), 4);
    let next = folder([("one", model(&plans[0])), ("x", model(&plans[1]))]);
    fs.show(folder([("org", Entry::Folder(next))]));
    assert_eq!(fs.names(ROOT).unwrap(), ["org"]);
    // Read on, a listing is what it was; from its start it is new.
    assert_eq!(fs.readdir(listed, false).unwrap().len(), 4);
    assert_eq!(fs.readdir(listed, true).unwrap().len(), 3);
    for (path, ino) in paths.iter().zip(before).take(3) {
        assert_eq!(fs.ino(path).unwrap(), ino, "{path}");
    }
    assert_eq!(plans[0].planned.load(Relaxed), 1);
    assert_eq!(errno(fs.open(before[3], libc::O_RDONLY)), libc::ESTALE);
    assert_eq!(fs.attr(before[3], None).unwrap().size, 8);
    assert_eq!(fs.read(open.fh, 7, 9).unwrap(), b"3");
    fs.release(open.fh).unwrap();
    assert_eq!(errno(fs.attr(before[3], None)), libc::ESTALE);
    // What comes back is another directory.
    fs.show(shown(&plans));
    assert_ne!(fs.ino("three/m.gguf").unwrap(), before[3]);
    assert_eq!(fs.names(fs.ino("org").unwrap()).unwrap(), ["one", "two"]);
}

#[test]
fn a_plan_that_was_given_up_comes_back_with_the_same_numbers() {
    let (dir, plans) = library();
    let fs = Fs::new(Entry::Folder(shown(&plans)), Ownership::default(), 0);
    let one = fs.ino("org/one/m.gguf").unwrap();
    fs.ino("org/two/m.gguf").unwrap();
    assert_eq!(fs.ino("org/one/m.gguf").unwrap(), one);
    assert_eq!(plans[0].planned.load(Relaxed), 2);
    // An open file keeps its plan.
    let fh = fs.open(one, libc::O_RDONLY).unwrap().fh;
    fs.ino("org/two/m.gguf").unwrap();
    fs.ino("three/m.gguf").unwrap();
    let planned = plans[0].planned.load(Relaxed);
    assert_eq!(fs.attr(one, None).unwrap().size, 8);
    assert_eq!(plans[0].planned.load(Relaxed), planned);
    fs.release(fh).unwrap();
    // Given up and changed: other bytes, another number.
    fs.ino("three/m.gguf").unwrap();
    std::fs::write(dir.path().join("1"), b"another").unwrap();
    assert_eq!(errno(fs.attr(one, None)), libc::ESTALE);
    assert_ne!(fs.ino("org/one/m.gguf").unwrap(), one);
}

#[test]
fn a_refused_model_says_why_until_it_is_there() {
    let (dir, plans) = library();
    std::fs::remove_file(dir.path().join("3")).unwrap();
    let fs = Fs::library(shown(&plans), Ownership::default());
    let three = fs.ino("three").unwrap();
    assert_eq!(fs.names(three).unwrap(), ["ERROR.txt"]);
    let said = String::from_utf8(fs.whole("three/ERROR.txt").unwrap()).unwrap();
    assert!(said.contains("No such file"), "{said}");
    let ino = fs.ino("three/ERROR.txt").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(fs.ino("three/ERROR.txt").unwrap(), ino);
    assert_eq!(plans[2].planned.load(Relaxed), 2);
    std::fs::write(dir.path().join("3"), b"01three").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(fs.names(three).unwrap(), ["m.gguf"]);
    assert_eq!(errno(fs.attr(ino, None)), libc::ESTALE);
    std::fs::remove_file(dir.path().join("3")).unwrap();
    assert_eq!(fs.names(three).unwrap(), ["ERROR.txt"]);
}

#[test]
fn what_is_computed_at_an_open_is_that_handles_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, b"0123456789").unwrap();
    let plan = Arc::new(OfFile {
        path,
        refused: false,
        planned: AtomicUsize::new(0),
        clock: Some(Arc::default()),
    });
    let view = plan.plan().unwrap();
    let fs = Fs::model(plan, view, Ownership::default()).unwrap();
    let clock = fs.lookup(ROOT, OsStr::new("clock")).unwrap();
    assert_eq!((clock.size, clock.volatile), (0, true));
    let opened: Vec<Opened> = (0..3)
        .map(|_| fs.open(clock.ino, libc::O_RDONLY).unwrap())
        .collect();
    assert!(opened.iter().all(|opened| opened.computed));
    assert_eq!(fs.attr(clock.ino, None).unwrap().size, 3);
    for (opened, wanted) in opened.iter().zip(["x", "xx", "xxx"]) {
        assert_eq!(fs.read(opened.fh, 0, 99).unwrap(), wanted.as_bytes());
        assert!(fs.read(opened.fh, 3, 99).unwrap().is_empty());
        fs.release(opened.fh).unwrap();
    }
    assert_eq!(fs.whole("clock").unwrap(), b"xxxx");
    assert_eq!(errno(fs.open(clock.ino, libc::O_RDONLY)), libc::ENOMEM);
    assert_eq!(fs.lookup(ROOT, OsStr::new("clock")).unwrap().size, 4);
}
