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

/// Who can read what, by the numbers of user and groups.
#[test]
fn owner_group_and_others_are_those_of_the_sources() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 1000).write(&model);
    let can_read = |view: &Path, user: u32, group: u32| {
        let (user, group) = (user.to_string(), group.to_string());
        let out = Command::new("setpriv")
            .args(["--reuid", &user, "--regid", &group, "--clear-groups"])
            .args(["--inh-caps=-all", "cat"])
            .arg(view)
            .output()
            .unwrap();
        out.status.success()
    };
    let (owner, group, other) = (61_001, 61_002, 61_003);
    for (mode, options, wanted) in [
        // Options; whether the owner, the group and others can read.
        (0o640, "allow_other", [true, true, false]),
        (0o600, "allow_other", [true, false, false]),
        (0o604, "allow_other", [true, false, true]),
        (0o644, "allow_other,umask=077", [true, false, false]),
        (0o644, "default_permissions", [false, false, false]),
    ] {
        fs::set_permissions(&model, Permissions::from_mode(mode)).unwrap();
        let options = format!("{options},uid={owner},gid={group}");
        chown(&model, Some(owner), Some(group)).unwrap();
        let mount = Mounted::new(&model, &["--view", "merged", "-o", &options]);
        let view = mount.path().join("m.gguf");
        let got = [
            can_read(&view, owner, owner),
            can_read(&view, other, group),
            can_read(&view, other, other),
        ];
        mount.unmount();
        assert_eq!(got, wanted, "mode {mode:o}, {options}");
    }
}

#[test]
fn a_mount_of_an_ordinary_user_lets_neither_root_nor_others_in() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let binary = dir.path().join("ggufuse");
    fs::copy(env!("CARGO_BIN_EXE_ggufuse"), &binary).unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 1000).write(&model);
    let point = dir.path().join("mnt");
    fs::create_dir(&point).unwrap();
    chown(&point, Some(NOBODY), Some(NOBODY)).unwrap();
    let out = as_nobody(
        r#""$1" mount "$2" "$3" --view merged"#,
        &[&binary, &model, &point],
    );
    assert!(out.status.success(), "{}", text(&out.stderr));
    let view = point.join("m.gguf");
    let by_root = fs::read(&view).map(|_| ());
    let by_other = Command::new("setpriv")
        .args([
            "--reuid",
            "61003",
            "--regid",
            "61003",
            "--clear-groups",
            "cat",
        ])
        .arg(&view)
        .output()
        .unwrap();
    let listed = common::ggufuse(&["status", "--json", point.to_str().unwrap()]);
    let by_owner = as_nobody(
        r#"cmp "$1" "$2"; rc=$?; "$3" unmount "$4" && exit $rc"#,
        &[&model, &view, &binary, &point],
    );
    assert!(by_owner.status.success(), "{}", text(&by_owner.stderr));
    assert_eq!(by_root.unwrap_err().raw_os_error(), Some(libc::EACCES));
    assert!(!by_other.status.success());
    assert!(
        text(&listed.stdout).contains("\"stale\": false"),
        "not dead, only closed"
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
