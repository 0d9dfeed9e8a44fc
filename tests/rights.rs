//! What a serving process may still do, and as whom it serves.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use common::{GgufBuilder, ggufuse, is_root};

/// CAP_DAC_READ_SEARCH and CAP_LEASE.
const READS: &str = "0000000010000004";
const NONE: &str = "0000000000000000";
const NOBODY: u32 = 65534;

struct Served {
    daemon: Child,
    point: tempfile::TempDir,
    dir: tempfile::TempDir,
}

impl Served {
    /// A model that only `owner` can read, mounted with these options.
    fn new(owner: u32, options: &[&str]) -> Served {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let model = dir.path().join("m.gguf");
        GgufBuilder::sample(3, 1000).write(&model);
        fs::set_permissions(&model, Permissions::from_mode(0o600)).unwrap();
        chown(&model, Some(owner), Some(owner)).unwrap();
        let point = tempfile::tempdir().unwrap();
        chown(point.path(), Some(owner), Some(owner)).unwrap();
        let daemon = start(&model, point.path(), options);
        Served { daemon, point, dir }
    }

    fn view(&self) -> PathBuf {
        self.point.path().join("m.gguf")
    }

    /// The values of a line of /proc/PID/status of each thread.
    fn status(&self, key: &str) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.daemon.id())).unwrap();
        let value = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("status")).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap().trim().to_owned()
        };
        tasks.map(|task| value(task.unwrap())).collect()
    }

    fn assert_all(&self, key: &str, wanted: &str) {
        let values = self.status(key);
        assert!(values.len() >= 4, "its threads: {values:?}");
        assert!(
            values.iter().all(|value| value == wanted),
            "{key} {values:?}"
        );
    }

    fn end(&mut self) {
        // SAFETY: takes no pointer; the process has not been waited for.
        unsafe { libc::kill(self.daemon.id() as i32, libc::SIGTERM) };
        assert!(self.daemon.wait().unwrap().success());
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(
            !mounts.contains(self.point.path().to_str().unwrap()),
            "still mounted"
        );
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.daemon.kill());
        drop(self.daemon.wait());
        drop(ggufuse(&[
            "unmount",
            "--lazy",
            self.point.path().to_str().unwrap(),
        ]));
    }
}

fn start(model: &Path, point: &Path, options: &[&str]) -> Child {
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args(["-q", "mount", "--foreground", "--view", "merged"])
        .args(options)
        .args([model, point])
        .spawn()
        .unwrap();
    let start = Instant::now();
    let mounted = || {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let ready = mounts.contains(point.to_str().unwrap());
        // All threads are there when it answers.
        ready && fs::read_dir(format!("/proc/{}/task", daemon.id())).is_ok_and(|t| t.count() >= 5)
    };
    while !mounted() {
        if start.elapsed() > Duration::from_secs(20) {
            drop(daemon.kill());
            panic!("not mounted");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    daemon
}

fn cat_as(user: u32, file: &Path) -> Output {
    let id = user.to_string();
    Command::new("setpriv")
        .args([
            "--reuid",
            &id,
            "--regid",
            &id,
            "--clear-groups",
            "--inh-caps=-all",
            "cat",
        ])
        .arg(file)
        .output()
        .unwrap()
}

#[test]
fn root_keeps_what_reading_takes() {
    if !is_root() {
        return;
    }
    let mut served = Served::new(NOBODY, &[]);
    served.assert_all("CapEff:", READS);
    served.assert_all("CapPrm:", READS);
    served.assert_all("CapBnd:", READS);
    served.assert_all("NoNewPrivs:", "1");
    assert_eq!(
        fs::read(served.view()).unwrap(),
        fs::read(served.dir.path().join("m.gguf")).unwrap()
    );
    served.end();
}

#[test]
fn confined_to_the_folders_of_the_sources() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let link = dir.path().join("m.gguf");
    let size = |model: &Path| fs::metadata(model).unwrap().len();
    let one = dir.path().join("a/one.gguf");
    let (two, far) = (dir.path().join("a/two.gguf"), dir.path().join("b/far.gguf"));
    for (n, model) in (1..).zip([&one, &two, &far]) {
        GgufBuilder::sample(n, 1000).write(model);
    }
    // The link's own folder holds neither.
    let links = dir.path().join("links");
    fs::create_dir(&links).unwrap();
    drop(link);
    let link = links.join("m.gguf");
    let lead_to = |model: &Path| {
        let new = links.join("new");
        symlink(model, &new).unwrap();
        fs::rename(&new, &link).unwrap();
    };
    for (options, reaches_far) in [(&[][..], false), (&["--no-landlock"][..], true)] {
        lead_to(&one);
        let point = tempfile::tempdir().unwrap();
        let daemon = start(&link, point.path(), options);
        let mut served = Served {
            daemon,
            point,
            dir: tempfile::tempdir().unwrap(),
        };
        let read = || fs::read(served.view()).map(|bytes| bytes.len() as u64);
        assert_eq!(read().unwrap(), size(&one));
        lead_to(&two);
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(
            read().unwrap(),
            size(&two),
            "a folder that was reached before"
        );
        lead_to(&far);
        std::thread::sleep(Duration::from_millis(1100));
        let kernel_can = fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap()
            .as_str()
            > "5.13";
        match read() {
            Ok(bytes) => assert!((reaches_far || !kernel_can) && bytes == size(&far)),
            Err(error) => {
                assert!(!reaches_far, "{error}");
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
            }
        }
        served.end();
    }
}

#[test]
fn as_another_user() {
    if !is_root() {
        return;
    }
    for how in [&["--user", "nobody"][..], &["-o", "setuid=65534:65534"][..]] {
        let mut served = Served::new(NOBODY, how);
        let id = ["65534"; 4].join("\t");
        served.assert_all("Uid:", &id);
        served.assert_all("Gid:", &id);
        served.assert_all("CapEff:", NONE);
        served.assert_all("CapPrm:", NONE);
        served.assert_all("NoNewPrivs:", "1");
        let wanted = fs::read(served.dir.path().join("m.gguf")).unwrap();
        assert_eq!(cat_as(NOBODY, &served.view()).stdout, wanted);
        assert!(
            fs::read(served.view()).is_err(),
            "root, whom nobody has let in"
        );
        served.end();
    }
}

#[test]
fn another_user_gets_no_rights_of_root() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 10).write(&model);
    fs::set_permissions(&model, Permissions::from_mode(0o600)).unwrap();
    let point = tempfile::tempdir().unwrap();
    let (model, point) = (model.to_str().unwrap(), point.path().to_str().unwrap());
    let out = ggufuse(&["mount", "--user", "nobody", model, point]);
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("Permission denied"));
    let out = ggufuse(&["mount", "--user", "nobody such", model, point]);
    assert_eq!(out.status.code(), Some(2));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(point));
}

#[test]
fn the_process_that_unmounts_ends_with_the_other() {
    let mut served = Served::new(if is_root() { 0 } else { NOBODY }, &[]);
    let children = format!("/proc/{0}/task/{0}/children", served.daemon.id());
    let unmounter = fs::read_to_string(children).unwrap().trim().to_owned();
    let there = || Path::new("/proc").join(&unmounter).exists();
    assert!(!unmounter.is_empty() && there());
    served.daemon.kill().unwrap();
    served.daemon.wait().unwrap();
    let start = Instant::now();
    while there()
        && !fs::read_to_string(format!("/proc/{unmounter}/stat")).is_ok_and(|s| s.contains(") Z "))
    {
        assert!(start.elapsed() < Duration::from_secs(10), "it lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// All files below a folder that can be read, by their path in it.
fn readable(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(dir) = folders.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "gguf") && fs::read(&path).is_ok() {
                found.push(
                    path.strip_prefix(folder)
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .to_owned(),
                );
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_library_shows_nothing_from_outside() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for folder in ["lib/sub", "outside"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    for model in ["lib/a.gguf", "lib/sub/b.gguf", "outside/secret.gguf"] {
        GgufBuilder::sample(2, 1000).write(&at(model));
    }
    symlink("../../lib/a.gguf", at("lib/sub/inner.gguf")).unwrap();
    symlink(at("outside/secret.gguf"), at("lib/file.gguf")).unwrap();
    symlink(at("outside"), at("lib/dir")).unwrap();
    // Not by Landlock, which does not tell links from the rest, and is not on every machine.
    for (options, secrets) in [
        (&["--no-landlock"][..], 0),
        (&["--follow-outside"][..], 2),
        (&[][..], 0),
    ] {
        let point = tempfile::tempdir().unwrap();
        let options = [&["--view", "merged"], options].concat();
        let mount = common::Mounted::new(&at("lib"), &options);
        drop(point);
        let found = readable(mount.path());
        let outside = found
            .iter()
            .filter(|name| name.contains("secret") || name.contains("file"));
        assert_eq!(outside.count(), secrets, "{options:?}: {found:?}");
        let inside = found.iter().filter(|name| {
            name.contains("a.gguf") || name.contains("b.gguf") || name.contains("inner")
        });
        assert_eq!(inside.count(), 3, "{options:?}: {found:?}");
        mount.unmount();
    }
}

#[test]
fn a_model_that_becomes_a_link_to_the_outside_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for folder in ["lib/sub", "outside"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    for (n, model) in (1..).zip(["lib/a.gguf", "lib/sub/b.gguf", "outside/b.gguf"]) {
        GgufBuilder::sample(n, 1000).write(&at(model));
    }
    let mount = common::Mounted::new(&at("lib"), &["--view", "merged", "--no-landlock"]);
    let secret = fs::read(at("outside/b.gguf")).unwrap();
    let before = readable(mount.path());
    assert_eq!(before.len(), 2, "{before:?}");
    // The folder, so that the file's own name is no link.
    fs::rename(at("lib/sub"), at("old")).unwrap();
    symlink(at("outside"), at("lib/sub")).unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2500) {
        for name in &before {
            let got = fs::read(mount.path().join(name)).unwrap_or_default();
            assert!(got != secret, "{name} is the outside's");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    mount.unmount();
}
