//! What the children of a probe may do, and who asks them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fuser::{Config, Filesystem, INodeNo, ReplyEntry, Request};
use ggufuse::gpu::{Backend, DEADLINE, Machine, Prober, Reason, VERB};

use crate::{driver, ggufuse, sysfs};

/// A program that does `script` instead of probing; it stays as long as the folder.
fn program(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("program");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Probes in this process, with such a program.
fn probe(script: &str, deadline: Duration) -> (Machine, Duration) {
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    let prober = Prober::new(&program(dir.path(), script), root.path(), deadline);
    let start = Instant::now();
    ((*prober.machine()).clone(), start.elapsed())
}

fn why(machine: &Machine, backend: Backend) -> &str {
    let of = |r: &&Reason| r.source == backend.name();
    &machine.reasons.iter().find(of).unwrap().text
}

#[test]
fn a_child_whose_starter_is_gone_ends_by_itself() {
    let mut child = ggufuse(&[VERB, "cuda"], &[("STANDIN_HANG", "cuInit")]);
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > 10 * DEADLINE {
            child.kill().unwrap();
            panic!("it is still there");
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.to_string().contains("SIGALRM"), "{status}");
}

#[test]
fn who_asks_never_loads_the_driver() {
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    let script = format!(
        "LD_LIBRARY_PATH={} exec {} \"$@\"",
        driver().display(),
        env!("CARGO_BIN_EXE_ggufuse")
    );
    let prober = Prober::new(&program(dir.path(), &script), root.path(), DEADLINE);
    let machine = prober.machine();
    assert_eq!(machine.devices.len(), 1, "{machine:?}");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libcuda"));
}

#[test]
fn who_asks_during_a_probe_gets_its_answer_and_who_asks_later_a_new_one() {
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    // Of the two children of a probe one leaves a line; both wait until they may go on.
    let script = format!(
        "cd {}; [ $2 = cuda ] && echo >>started; until [ -e go ]; do sleep 0.01; done; echo '{{\"devices\":[],\"reasons\":[]}}'",
        dir.path().display()
    );
    let prober = Prober::new(
        &program(dir.path(), &script),
        root.path(),
        Duration::from_secs(60),
    );
    let started = || fs::read_to_string(dir.path().join("started")).map_or(0, |text| text.len());
    let coming = AtomicUsize::new(0);
    thread::scope(|scope| {
        let asking: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    coming.fetch_add(1, Ordering::SeqCst);
                    prober.machine()
                })
            })
            .collect();
        while started() == 0 || coming.load(Ordering::SeqCst) < 8 {
            thread::sleep(Duration::from_millis(5));
        }
        // All are one instruction before their call at least.
        thread::sleep(Duration::from_millis(300));
        fs::write(dir.path().join("go"), "").unwrap();
        let answers: Vec<_> = asking.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(answers.iter().all(|a| Arc::ptr_eq(a, &answers[0])));
        assert_eq!(started(), 1);
    });
    prober.machine();
    assert_eq!(started(), 2);
}

#[test]
fn a_child_may_do_anything() {
    let second = Duration::from_secs(1);
    let (machine, _) = probe("echo ok; echo that is why >&2", 10 * second);
    assert_eq!(
        why(&machine, Backend::Cuda),
        "the answer cannot be read: that is why"
    );
    let (machine, _) = probe("echo '{\"devices\":[{\"na'", 10 * second);
    assert_eq!(why(&machine, Backend::Cuda), "the answer cannot be read");
    let (machine, _) = probe("exit 3", 10 * second);
    assert!(why(&machine, Backend::Rocm).ends_with("exit status: 3"));
    // Endless output, on both.
    let (machine, took) = probe("yes", 30 * second);
    assert!(why(&machine, Backend::Cuda).contains("more than 65536 bytes"));
    assert!(took < 20 * second, "{took:?}");
    let (machine, took) = probe("yes >&2", second);
    assert!(why(&machine, Backend::Cuda).starts_with("no answer in time"));
    assert!(took < 10 * second, "{took:?}");
    // A whole answer counts, however the child ends, and what it leaves running is ended.
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    let script = format!(
        "cd {}; sleep 1000 & echo $! >left.$2; echo '{{\"devices\":[],\"reasons\":[]}}'; kill -SEGV $$",
        dir.path().display()
    );
    let prober = Prober::new(&program(dir.path(), &script), root.path(), second);
    let machine = prober.machine();
    for backend in Backend::ALL {
        let left = dir.path().join(format!("left.{}", backend.verb_arg()));
        let pid: u32 = fs::read_to_string(left).unwrap().trim().parse().unwrap();
        let deadline = Instant::now() + 10 * second;
        while !gone(pid) {
            assert!(Instant::now() < deadline, "{pid} is still there");
            thread::sleep(Duration::from_millis(5));
        }
    }
    // `sleep` holds the pipe, so that is late here; ggufuse's own child closes it.
    assert!(machine.devices.is_empty());
    let (machine, _) = probe(
        "echo '{\"devices\":[],\"reasons\":[]}'; kill -SEGV $$",
        10 * second,
    );
    assert!(
        machine.reasons.iter().all(|r| r.source == "host"),
        "{machine:?}"
    );
    let missing = Prober::new(Path::new("/nonexistent"), Path::new("/"), second).machine();
    assert!(why(&missing, Backend::Cuda).starts_with("cannot start the probe"));
}

/// A file system that answers no lookup before it is told to: who asks hangs in the kernel, and no signal ends it.
#[derive(Debug, Clone, Default)]
struct Stuck(Arc<Mutex<Vec<ReplyEntry>>>);

impl Filesystem for Stuck {
    fn lookup(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        self.0.lock().unwrap().push(reply);
    }
}

#[test]
fn a_child_that_the_kernel_holds_is_waited_for_no_longer_than_others_and_not_started_again() {
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    let mount = tempfile::tempdir().unwrap();
    let stuck = Stuck::default();
    let session = fuser::spawn_mount(stuck.clone(), mount.path(), &Config::default()).unwrap();
    let script = format!(
        "cd {0}; [ $2 = rocm ] || [ -e go ] || exec cat {1}/file; echo '{{\"devices\":[],\"reasons\":[]}}'",
        dir.path().display(),
        mount.path().display()
    );
    let second = Duration::from_secs(1);
    let prober = Prober::new(&program(dir.path(), &script), root.path(), second);
    let start = Instant::now();
    assert_eq!(why(&prober.machine(), Backend::Cuda), "no answer in time");
    assert!(start.elapsed() < 10 * second);
    // The script would answer by now, but it is not asked.
    fs::write(dir.path().join("go"), "").unwrap();
    let held = prober.machine();
    assert!(why(&held, Backend::Cuda).contains("hangs in the kernel"));
    assert_eq!(
        held.reasons.len(),
        1,
        "the other backend was asked: {held:?}"
    );
    // Dropped replies are EIO: the kernel lets it go, and it is reaped by the next probe.
    stuck.0.lock().unwrap().clear();
    let deadline = start + 20 * second;
    while !prober.machine().reasons.is_empty() {
        assert!(Instant::now() < deadline, "{prober:?}");
        thread::sleep(Duration::from_millis(20));
    }
    session.umount_and_join().unwrap();
}

/// Whether a process is no more, or waits to be reaped by who has inherited it.
fn gone(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z "))
}
