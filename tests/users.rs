//! Other users: mounting without privileges through fusermount3, and who may enter a mount.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::{GgufBuilder, Mounted, is_root};

const NOBODY: u32 = 65534;

/// Runs a shell line as an ordinary user. These tests are for root, who alone can become someone else.
fn as_nobody(line: &str, args: &[&Path]) -> Output {
    let id = NOBODY.to_string();
    Command::new("setpriv")
        .args([
            "--reuid",
            &id,
            "--regid",
            &id,
            "--clear-groups",
            "--inh-caps=-all",
            "sh",
            "-c",
            line,
            "sh",
        ])
        .args(args)
        .output()
        .expect("setpriv of util-linux")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn open_to_all(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn an_ordinary_user_mounts_reads_and_unmounts() {
    if !is_root() {
        return;
    }
    let device = fs::metadata("/dev/fuse").unwrap().permissions().mode();
    assert!(
        device & 0o006 == 0o006,
        "/dev/fuse is closed to ordinary users (mode {device:o}): chmod 666 /dev/fuse"
    );
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    // The build folder need not be open to others.
    let binary = dir.path().join("ggufuse");
    fs::copy(env!("CARGO_BIN_EXE_ggufuse"), &binary).unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 10_000).write(&model);
    let point = dir.path().join("mnt");
    fs::create_dir(&point).unwrap();
    chown(&point, Some(NOBODY), Some(NOBODY)).unwrap();
    let line = r#""$1" mount "$2" "$3" --view merged && cmp "$2" "$3/m.gguf" && "$1" status "$3"; rc=$?; "$1" unmount "$3" && exit $rc"#;
    let out = as_nobody(line, &[&binary, &model, &point]);
    assert!(
        out.status.success(),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    assert!(text(&out.stdout).contains("merged"));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(point.to_str().unwrap()), "still mounted");
}

#[test]
fn others_enter_only_with_allow_other_and_by_the_sources_mode() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (open, secret) = (dir.path().join("open.gguf"), dir.path().join("secret.gguf"));
    GgufBuilder::sample(1, 1000).write(&open);
    GgufBuilder::sample(1, 1000).write(&secret);
    fs::set_permissions(&open, Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let can_read = |source: &Path, options: &[&str]| {
        let mount = Mounted::new(source, &[&["--view", "merged"], options].concat());
        let file = mount.path().join(source.file_name().unwrap());
        let ok = as_nobody(r#"cat "$1" > /dev/null"#, &[&file])
            .status
            .success();
        mount.unmount();
        ok
    };
    assert!(!can_read(&open, &[]), "without allow_other");
    assert!(can_read(&open, &["-o", "allow_other"]), "with allow_other");
    assert!(
        !can_read(&secret, &["-o", "allow_other"]),
        "a source that only its owner may read"
    );
}

#[test]
fn auto_unmount_takes_the_mount_of_a_killed_daemon_off() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 1000).write(&model);
    let point = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args([
            "-q",
            "mount",
            "-f",
            "--view",
            "merged",
            "-o",
            "auto_unmount,allow_other",
        ])
        .args([&model, point.path()])
        .spawn()
        .unwrap();
    let wait_for = |there: bool| {
        let start = Instant::now();
        while point.path().join("m.gguf").exists() != there {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "mounted: {there}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait_for(true);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    wait_for(false);
    // Not merely dead: the directory is the empty one from before.
    let start = Instant::now();
    while !fs::read_dir(point.path()).is_ok_and(|mut entries| entries.next().is_none()) {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "still a dead mount"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
