//! Started by others: a service manager that listens on NOTIFY_SOCKET, mount(8), /etc/fstab.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{GgufBuilder, Mounted, ggufuse};

const BINARY: &str = env!("CARGO_BIN_EXE_ggufuse");
const PATIENCE: Duration = Duration::from_secs(20);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a service manager sees of a service.
struct Manager {
    socket: UnixDatagram,
    service: Child,
    point: tempfile::TempDir,
}

impl Manager {
    /// Starts `ggufuse mount` of `source` in the foreground as a service whose watchdog allows `watchdog`.
    fn start(dir: &Path, source: &Path, watchdog: Duration) -> Manager {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let point = tempfile::tempdir().unwrap();
        let service = Command::new(BINARY)
            .args(["-q", "mount", "--foreground", "--view", "merged"])
            .args([source, point.path()])
            .env("NOTIFY_SOCKET", &path)
            .env("WATCHDOG_USEC", watchdog.as_micros().to_string())
            .env_remove("WATCHDOG_PID")
            .spawn()
            .unwrap();
        Manager {
            socket,
            service,
            point,
        }
    }

    /// The next message.
    fn told(&self) -> String {
        let mut message = [0; 4096];
        let n = self.socket.recv(&mut message).expect("a message in time");
        text(&message[..n])
    }

    /// Messages until one has `line`.
    fn wait_for(&self, line: &str) -> String {
        let start = Instant::now();
        loop {
            let message = self.told();
            if message.lines().any(|have| have == line) {
                return message;
            }
            assert!(start.elapsed() < PATIENCE, "no {line}");
        }
    }

    /// Whether nothing at all is said for `time`, once what was said before is read.
    fn is_silent_for(&self, time: Duration) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        while self.socket.recv(&mut [0; 4096]).is_ok() {}
        self.socket.set_nonblocking(false).unwrap();
        self.socket.set_read_timeout(Some(time)).unwrap();
        let got = self.socket.recv(&mut [0; 4096]);
        self.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        got.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    fn signal(&self, signal: i32) {
        signal_to(self.service.id(), signal);
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        drop(self.service.kill());
        drop(self.service.wait());
        drop(ggufuse(&[
            "unmount",
            "--lazy",
            self.point.path().to_str().unwrap(),
        ]));
    }
}

fn signal_to(pid: u32, signal: i32) {
    // SAFETY: takes no pointer; the process is a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

#[test]
fn a_service_manager_is_told_of_readiness_life_and_end() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 1000).write(&model);
    let mut manager = Manager::start(dir.path(), &model, Duration::from_millis(200));
    let ready = manager.wait_for("READY=1");
    let served = fs::read(manager.point.path().join("m.gguf")).unwrap();
    assert_eq!(served, fs::read(&model).unwrap(), "ready before it is");
    assert!(ready.contains("STATUS="), "{ready}");
    assert!(ready.contains("serving 1 file(s) (merged)"), "{ready}");
    manager.wait_for("WATCHDOG=1");
    manager.wait_for("WATCHDOG=1");
    manager.signal(libc::SIGTERM);
    manager.wait_for("STOPPING=1");
    assert!(manager.service.wait().unwrap().success());
}

#[test]
fn the_watchdog_hears_nothing_while_no_thread_can_serve() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(8, 100_000).write(&model);
    // A source that stops answering, as a network file system may: a view whose process is halted.
    let below = tempfile::tempdir().unwrap();
    let mut source = Command::new(BINARY)
        .args(["-q", "mount", "--foreground", "--view", "merged"])
        .args([&model, below.path()])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let view = below.path().join("m.gguf");
    let start = Instant::now();
    while !view.exists() {
        assert!(start.elapsed() < PATIENCE, "not mounted");
        std::thread::sleep(Duration::from_millis(5));
    }
    let manager = Manager::start(dir.path(), &view, Duration::from_millis(200));
    manager.wait_for("WATCHDOG=1");
    signal_to(source.id(), libc::SIGSTOP);
    let mut readers: Vec<Child> = (0..4)
        .map(|i| {
            Command::new("dd")
                .arg(format!("if={}/m.gguf", manager.point.path().display()))
                .args([
                    "of=/dev/null",
                    "bs=64K",
                    &format!("skip={}", i + 1),
                    "status=none",
                ])
                .spawn()
                .unwrap()
        })
        .collect();
    let start = Instant::now();
    while !manager.is_silent_for(Duration::from_secs(1)) {
        assert!(start.elapsed() < PATIENCE, "it says that it is well");
    }
    signal_to(source.id(), libc::SIGCONT);
    manager.wait_for("WATCHDOG=1");
    for reader in &mut readers {
        assert!(reader.wait().unwrap().success());
    }
    drop(manager);
    signal_to(source.id(), libc::SIGTERM);
    assert!(source.wait().unwrap().success());
}

/// Runs a shell line in a mount namespace of its own in which the program is /sbin/mount.fuse.ggufuse and `fstab`
/// is /etc/fstab. All that is mounted there is gone with the namespace.
fn in_namespace(fstab: &str, line: &str, args: &[&Path]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("fstab"), fstab).unwrap();
    let script = format!(
        r#"set -eu
        dir=$1 binary=$2; shift 2
        mkdir "$dir/layer"; mount -t tmpfs layer "$dir/layer"; mkdir "$dir/layer/upper" "$dir/layer/work"
        mount -t overlay overlay -o "lowerdir=/usr/sbin,upperdir=$dir/layer/upper,workdir=$dir/layer/work" /usr/sbin
        cp "$binary" /usr/sbin/mount.fuse.ggufuse
        [ /sbin -ef /usr/sbin ] || mount --bind /usr/sbin /sbin
        mount --bind "$dir/fstab" /etc/fstab
        trap 'for m in "$@"; do /usr/sbin/umount -q -l "$m" 2>/dev/null || umount -q -l "$m" 2>/dev/null || :; done; umount -l "$dir/layer"' EXIT
        gone() {{ if mountpoint -q "$1"; then echo "$1: still mounted" >&2; exit 9; fi; }}
        {line}"#
    );
    Command::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
            "sh",
        ])
        .args([dir.path(), Path::new(BINARY)])
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn mount_and_fstab_find_the_helper() {
    // Only root has a namespace to try this in.
    if !common::is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("a model.gguf");
    GgufBuilder::sample(3, 1000).write(&model);
    let point = dir.path().join("mnt");
    fs::create_dir(&point).unwrap();
    let fstab = format!(
        "{}/a\\040model.gguf {} fuse.ggufuse noauto,nofail,_netdev,x-systemd.automount,x-systemd.idle-timeout=60,\
         X-mount.note=1,view=merged,allow_other,fsname=named 0 0\n",
        dir.path().display(),
        point.display()
    );
    let line = r#"
        mount "$1"; cmp "$2" "$1/a model.gguf"
        grep -q "^named $1 fuse.ggufuse ro,nosuid,nodev.*allow_other" /proc/self/mounts
        umount "$1"; gone "$1"
        mount -t fuse.ggufuse -o view=merged,noatime "$2" "$1"; cmp "$2" "$1/a model.gguf"; umount "$1"
        mount -a; gone "$1"
        env -i /usr/bin/mount -t fuse.ggufuse -o view=merged "$2" "$1"; cmp "$2" "$1/a model.gguf"; env -i /usr/bin/umount "$1"
        mount --fake -t fuse.ggufuse -o view=merged "$2" "$1"; gone "$1"
        mount -v -n -s -t fuse.ggufuse -o view=merged,nonsense=1 "$2" "$1"; cmp "$2" "$1/a model.gguf"; umount "$1"
        rc=0; mount -t fuse.ggufuse -o nonsense=1 "$2" "$1" || rc=$?; [ $rc = 1 ]
        rc=0; mount -t fuse.ggufuse /nowhere.gguf "$1" || rc=$?; [ $rc = 32 ]
        echo done"#;
    let out = in_namespace(&fstab, line, &[&point, &model]);
    assert!(
        out.status.success() && text(&out.stdout).ends_with("done\n"),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    assert!(text(&out.stderr).contains("nonsense=1: unknown option"));
    assert!(text(&out.stderr).contains("/nowhere.gguf"));
}

#[test]
fn the_helper_needs_no_environment() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 1000).write(&model);
    let helper = dir.path().join("mount.fuse.ggufuse");
    std::os::unix::fs::symlink(BINARY, &helper).unwrap();
    let point = tempfile::tempdir().unwrap();
    let out = Command::new(&helper)
        .args([&model, point.path()])
        .args(["-o", "rw,view=merged,dev,suid"])
        .env_clear()
        .current_dir("/")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let mount = Mounted { dir: point };
    assert_eq!(
        fs::read(mount.path().join("m.gguf")).unwrap(),
        fs::read(&model).unwrap()
    );
    mount.unmount();
    let out = Command::new(&helper).arg(&model).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "mount(8)'s code for bad usage");
}

#[test]
fn every_verb_and_the_helper_have_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let out = ggufuse(&["man", "--dir", dir.path().to_str().unwrap()]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    assert!(page("ggufuse.1").contains(r"ggufuse\-mount(1)"));
    assert!(page("ggufuse-mount.1").contains(r"\-\-split\-max\-size"));
    assert!(page("mount.fuse.ggufuse.8").contains("/etc/fstab"));
}
