//! A daemon with too little memory, and sources whose file system goes away.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{GgufBuilder, Mounted, ggufuse, is_root};

const DATA: u64 = 192 << 20;

/// A control group with a limit on memory, removed at the end.
struct Group(PathBuf, &'static str);

impl Group {
    /// `None` where this machine has no controller for memory that we may use.
    fn new(limit: u64) -> Option<Group> {
        let name = format!("ggufuse-test-{}", std::process::id());
        let first = Path::new("/sys/fs/cgroup/memory");
        let group = if first.is_dir() {
            Group(first.join(name), "memory.limit_in_bytes")
        } else {
            drop(fs::write(
                "/sys/fs/cgroup/cgroup.subtree_control",
                "+memory",
            ));
            Group(Path::new("/sys/fs/cgroup").join(name), "memory.max")
        };
        fs::create_dir(&group.0).ok()?;
        group.limit(limit).ok().map(|()| group)
    }

    fn limit(&self, bytes: u64) -> std::io::Result<()> {
        fs::write(self.0.join(self.1), bytes.to_string())
    }

    fn mount(&self, model: &Path, point: &Path) -> Output {
        let line = r#"echo $$ >"$1/cgroup.procs"; shift; exec "$@" --view merged"#;
        Command::new("sh")
            .args(["-euc", line, "sh"])
            .args([&self.0, Path::new(env!("CARGO_BIN_EXE_ggufuse"))])
            .arg("mount")
            .args([model, point])
            .output()
            .unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let start = std::time::Instant::now();
        while fs::remove_dir(&self.0).is_err() && start.elapsed().as_secs() < 10 {
            for pid in fs::read_to_string(self.0.join("cgroup.procs"))
                .unwrap_or_default()
                .lines()
            {
                // SAFETY: takes no pointer; what is in our own group is ours.
                pid.parse()
                    .map(|pid| unsafe { libc::kill(pid, libc::SIGKILL) })
                    .unwrap();
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn little_memory_is_enough_and_none_ends_it_cleanly() {
    if !is_root() {
        return;
    }
    let Some(group) = Group::new(48 << 20) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    // Four times the limit; a hole on disk.
    let mut large = GgufBuilder::sample(1, 8);
    large.tensors[0].1 = vec![DATA / 4];
    large.tensors[0].3 = Vec::new();
    let head = large.bytes();
    fs::write(&model, &head).unwrap();
    let whole = File::options().write(true).open(&model).unwrap();
    whole.set_len(head.len() as u64 + DATA).unwrap();
    let point = tempfile::tempdir().unwrap();
    let out = group.mount(&model, point.path());
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let view = point.path().join("m.gguf");
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let view = &view;
            scope.spawn(move || {
                let mut file = File::open(view).unwrap();
                let mut buffer = vec![0; (64 << 10) + reader * 4096];
                let mut total = 0;
                loop {
                    match file.read(&mut buffer).unwrap() {
                        0 => break,
                        n => total += n,
                    }
                }
                assert!(total as u64 > DATA);
            });
        }
    });
    // Now there is none. It may live on without what it has let go of; if it is killed, all know.
    drop(group.limit(256 << 10));
    for _ in 0..50 {
        match fs::read_dir(point.path()).and_then(|_| File::open(&view)) {
            Ok(mut file) => drop(file.read(&mut vec![0; 1 << 20])),
            Err(error) => {
                let errno = error.raw_os_error();
                assert!(
                    matches!(errno, Some(libc::ENOTCONN | libc::ECONNABORTED)),
                    "{error}"
                );
                break;
            }
        }
    }
    drop(group);
    // Killed by the kernel or by us: what is left is cleared by the next start.
    let again = Mounted::at(point, &model);
    assert_eq!(again.names(), ["m-00001-of-00001.gguf"]);
    again.unmount();
    assert!(
        !ggufuse(&["status", dir.path().to_str().unwrap()])
            .status
            .success()
    );
}

#[test]
fn a_source_whose_file_system_is_unmounted() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    GgufBuilder::sample(3, 100_000).write(&dir.path().join("m.gguf"));
    for name in ["disk", "mnt"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let script = r#"
        cd "$2"
        mount -t tmpfs disk disk; cp m.gguf disk/
        "$1" -q mount -f disk/m.gguf mnt --view merged --no-landlock & daemon=$!
        trap 'umount -l mnt disk 2>/dev/null || :' EXIT
        until [ -e mnt/m.gguf ]; do sleep 0.02; done
        exec 7<mnt/m.gguf
        umount -l disk
        cmp m.gguf - <&7
        exec 7<&-
        sleep 1.1
        if cat mnt/m.gguf >/dev/null 2>errors; then exit 7; fi
        grep -q 'Stale file handle' errors
        # Plugged in again.
        mount -t tmpfs disk disk; cp m.gguf disk/
        sleep 1.1
        cmp m.gguf mnt/m.gguf
        kill "$daemon"; wait "$daemon"
        echo done"#;
    let out = Command::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-euc",
            script,
            "sh",
        ])
        .args([Path::new(env!("CARGO_BIN_EXE_ggufuse")), dir.path()])
        .output()
        .unwrap();
    assert!(
        out.status.success() && out.stdout.ends_with(b"done\n"),
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}
