//! The file system through the kernel: attributes, ways to read, sources that change, the ends of a mount.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{GgufBuilder, Mounted, ggufuse};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_mounted(path: &Path) -> bool {
    fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .contains(&format!(" {} ", path.display()))
}

#[test]
fn every_way_to_read_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(9, 50_000).write(&model);
    let wanted = fs::read(&model).unwrap();
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let path = mount.path().join("m.gguf");

    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), wanted.len() as u64);
    assert_eq!(meta.mode() & 0o222, 0, "nothing is writable");
    assert_eq!(meta.mtime(), fs::metadata(&model).unwrap().mtime());
    assert!(meta.blocks() * 512 >= meta.len());

    assert!(fs::read(&path).unwrap() == wanted, "read");
    let mut file = File::open(&path).unwrap();
    for (offset, len) in [
        (0, 1),
        (31, 70_000),
        (200_001, 13),
        (wanted.len() - 3, 100),
        (wanted.len() + 5, 10),
    ] {
        let mut got = vec![0; len];
        let n = file.read_at(&mut got, offset as u64).unwrap();
        let end = (offset + len).min(wanted.len());
        assert_eq!(&got[..n], &wanted[offset.min(end)..end], "at {offset}");
    }
    file.seek(SeekFrom::Start(7)).unwrap();
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert!(rest == wanted[7..], "after a seek");

    for command in [
        "cp {} {}.out",
        "dd if={} of={}.out bs=4097 status=none",
        "dd if={} of={}.out bs=1M iflag=direct status=none",
        "python3 -c 'import mmap,sys; f=open(sys.argv[1],\"rb\"); open(sys.argv[2]+\".out\",\"wb\").write(mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ))' {} {}",
        "python3 -c 'import mmap,sys; f=open(sys.argv[1],\"rb\"); open(sys.argv[2]+\".out\",\"wb\").write(mmap.mmap(f.fileno(),0,flags=mmap.MAP_PRIVATE,prot=mmap.PROT_READ))' {} {}",
    ] {
        let copy = dir.path().join("copy");
        let line = command.replacen("{}", path.to_str().unwrap(), 1).replacen(
            "{}",
            copy.to_str().unwrap(),
            1,
        );
        let out = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert!(out.status.success(), "{line}: {}", text(&out.stderr));
        assert!(
            fs::read(dir.path().join("copy.out")).unwrap() == wanted,
            "{line}"
        );
        fs::remove_file(dir.path().join("copy.out")).unwrap();
    }

    let script = r#"
import mmap, os, sys
view, out = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
size, how, done = os.fstat(view).st_size, sys.argv[3], 0
if how == "sendfile":
    while done < size: done += os.sendfile(out, view, done, size - done)
elif how == "copy_file_range":
    try:
        while done < size: done += os.copy_file_range(view, out, size - done, done, done)
    except OSError:  # another file system: the caller falls back
        os.sendfile(out, view, done, size - done)
else:
    flags = {"populate": mmap.MAP_PRIVATE | mmap.MAP_POPULATE, "shared": mmap.MAP_SHARED, "willneed": mmap.MAP_PRIVATE}[how]
    with mmap.mmap(view, 0, flags=flags, prot=mmap.PROT_READ) as m:
        if how == "willneed": m.madvise(mmap.MADV_WILLNEED)
        os.write(out, m)
"#;
    for how in [
        "sendfile",
        "copy_file_range",
        "populate",
        "shared",
        "willneed",
    ] {
        let copy = dir.path().join(how);
        let out = Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .arg(&copy)
            .arg(how)
            .output()
            .unwrap();
        assert!(out.status.success(), "{how}: {}", text(&out.stderr));
        assert!(fs::read(&copy).unwrap() == wanted, "{how}");
        fs::remove_file(&copy).unwrap();
    }

    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (file, wanted) = (&file, &wanted);
            scope.spawn(move || {
                for i in 0..200usize {
                    let offset = (i * 7919 + thread * 104_729) % wanted.len();
                    let mut got = vec![0; 5000];
                    let n = file.read_at(&mut got, offset as u64).unwrap();
                    assert!(
                        got[..n] == wanted[offset..offset + n],
                        "one descriptor, several readers, at {offset}"
                    );
                }
            });
        }
    });
    drop(file);
    mount.unmount();
}

#[test]
fn nothing_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let path = mount.path().join("m.gguf");
    let is_read_only =
        |r: std::io::Result<()>| assert_eq!(r.unwrap_err().raw_os_error(), Some(libc::EROFS));
    is_read_only(File::options().write(true).open(&path).map(drop));
    is_read_only(File::create(mount.path().join("new")).map(drop));
    is_read_only(fs::remove_file(&path));
    is_read_only(fs::rename(&path, mount.path().join("other")));
    is_read_only(fs::create_dir(mount.path().join("d")));
    is_read_only(fs::set_permissions(
        &path,
        fs::metadata(&model).unwrap().permissions(),
    ));
    assert_eq!(
        fs::metadata(mount.path().join("none"))
            .unwrap_err()
            .raw_os_error(),
        Some(libc::ENOENT)
    );
    mount.unmount();
}

#[test]
fn a_changed_source_is_estale_for_readers_and_new_for_a_new_open() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 50_000).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let path = mount.path().join("m.gguf");
    let old = File::open(&path).unwrap();
    let mut buf = vec![0; 1000];
    old.read_exact_at(&mut buf, 100_000).unwrap();

    // The same file with other bytes: the handle must not mix.
    GgufBuilder::sample(4, 60_000).write(&model);
    assert_eq!(
        old.read_at(&mut buf, 100_000).unwrap_err().raw_os_error(),
        Some(libc::ESTALE)
    );
    assert!(
        fs::read(&path).unwrap() == fs::read(&model).unwrap(),
        "a new open sees the new file"
    );

    // Truncated: an error for that read, the daemon lives.
    let open = File::open(&path).unwrap();
    File::options()
        .write(true)
        .open(&model)
        .unwrap()
        .set_len(5000)
        .unwrap();
    assert_eq!(
        open.read_at(&mut buf, 100_000).unwrap_err().raw_os_error(),
        Some(libc::ESTALE)
    );
    assert_eq!(
        File::open(&path).unwrap_err().raw_os_error(),
        Some(libc::ESTALE)
    );

    // Whole again, then deleted: open handles go on.
    GgufBuilder::sample(3, 50_000).write(&model);
    let kept = File::open(&path).unwrap();
    let wanted = fs::read(&model).unwrap();
    fs::remove_file(&model).unwrap();
    kept.read_exact_at(&mut buf, 100_000).unwrap();
    assert!(buf == wanted[100_000..101_000]);
    drop((old, open, kept));
    mount.unmount();
}

#[test]
fn an_external_unmount_ends_the_daemon_and_takes_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let point = tempfile::tempdir().unwrap();
    // Something of someone else's beneath.
    let run = |args: &[&str]| {
        let out = Command::new(args[0]).args(&args[1..]).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    };
    let at = point.path().to_str().unwrap();
    run(&["mount", "-t", "tmpfs", "beneath", at]);
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args(["mount", "-f", model.to_str().unwrap(), at])
        .spawn()
        .unwrap();
    wait_for("the mount", || {
        point.path().join("m-00001-of-00001.gguf").exists()
    });
    run(&["umount", at]);
    wait_for("the end of the daemon", || {
        daemon.try_wait().unwrap().is_some()
    });
    assert!(is_mounted(point.path()), "the mount beneath was taken too");
    run(&["umount", at]);
}

#[test]
fn signals_unmount() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    for signal in ["-INT", "-TERM", "-HUP"] {
        let point = tempfile::tempdir().unwrap();
        let at = point.path().to_str().unwrap();
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
            .args(["mount", "-f", model.to_str().unwrap(), at])
            .spawn()
            .unwrap();
        wait_for("the mount", || {
            point.path().join("m-00001-of-00001.gguf").exists()
        });
        let pid = daemon.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()
                .unwrap()
                .success()
        );
        wait_for("the end of the daemon", || {
            daemon.try_wait().unwrap().is_some()
        });
        assert!(daemon.wait().unwrap().success());
        assert!(!is_mounted(point.path()), "{signal}");
    }
}

#[test]
fn bad_mount_points_are_refused_with_exit_5() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let refused = |point: &Path, word: &str| {
        let out = ggufuse(&["mount", model.to_str().unwrap(), point.to_str().unwrap()]);
        assert_eq!(out.status.code(), Some(5), "{word}: {}", text(&out.stderr));
        assert!(
            text(&out.stderr).contains(point.to_str().unwrap()),
            "{}",
            text(&out.stderr)
        );
    };
    refused(&dir.path().join("missing"), "missing");
    refused(&model, "a file");
    refused(dir.path(), "not empty, and it holds the source");
    let mount = Mounted::new(&model, &[]);
    refused(mount.path(), "already mounted");
    mount.unmount();
}

#[test]
fn exit_codes_are_an_interface() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 100_000).write(&model);
    let name = model.to_str().unwrap();
    let bad = dir.path().join("bad.gguf");
    fs::write(&bad, b"GGUF").unwrap();
    let cases: [(&[&str], i32); 9] = [
        (&["--help"], 0),
        (&["check", name], 0),
        (&["check", "/nonexistent/m.gguf"], 1),
        (&["frobnicate"], 2),
        (
            &[
                "plan",
                name,
                "--split-max-size",
                "1M",
                "--split-max-tensors",
                "3",
            ],
            2,
        ),
        (&["plan", name, "--split-max-size", "1.5X"], 2),
        (&["mount", name, "/nonexistent", "-o", "no_such_option"], 2),
        (&["plan", name, "--max-file-size", "300K"], 3),
        (&["check", bad.to_str().unwrap()], 4),
    ];
    for (args, code) in cases {
        let out = ggufuse(args);
        assert_eq!(
            out.status.code(),
            Some(code),
            "{args:?}: {}",
            text(&out.stderr)
        );
    }
    let out = ggufuse(&["plan", name, "--max-file-size", "300K"]);
    assert!(
        text(&out.stderr).contains("blk.0.weight"),
        "the tensor is named: {}",
        text(&out.stderr)
    );
}

#[test]
fn options_set_owner_and_mode() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 1000).write(&model);
    let mount = Mounted::new(
        &model,
        &[
            "-o",
            "uid=1234,gid=4321,umask=077,view=merged",
            "-o",
            r"fsname=a\,b",
        ],
    );
    for path in [mount.path().to_owned(), mount.path().join("m.gguf")] {
        let meta = fs::metadata(path).unwrap();
        assert_eq!(
            (meta.uid(), meta.gid(), meta.mode() & 0o077),
            (1234, 4321, 0)
        );
    }
    let out = ggufuse(&["status", mount.path().to_str().unwrap(), "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value[0]["source"], "a,b");
    mount.unmount();
}

#[test]
fn status_and_xattrs_tell_what_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 1000).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let wanted = fs::read(mount.path().join("m.gguf")).unwrap();
    let out = ggufuse(&["status", mount.path().to_str().unwrap(), "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value[0]["source"], model.to_str().unwrap());
    assert_eq!(value[0]["view"], "merged");
    assert_eq!(value[0]["stats"]["bytes"], wanted.len());
    mount.unmount();
}

#[test]
fn more_shards_than_the_soft_limit_of_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1148, 8).write(&model);
    let split = Mounted::new(&model, &["--split-max-tensors", "1"]);
    assert_eq!(split.names().len(), 1148);
    let set = tempfile::tempdir().unwrap();
    for name in split.names() {
        fs::copy(split.path().join(&name), set.path().join(&name)).unwrap();
    }
    split.unmount();
    // The soft limit is raised; beyond a hard one descriptors are closed and opened again.
    for limit in ["-S -n 1024", "-n 128"] {
        let point = tempfile::tempdir().unwrap();
        let (source, at) = (set.path().to_str().unwrap(), point.path().to_str().unwrap());
        let line = format!("ulimit {limit} && exec \"$0\" mount \"$1\" \"$2\" --headers clean");
        let out = Command::new("sh")
            .args(["-c", &line, env!("CARGO_BIN_EXE_ggufuse"), source, at])
            .output()
            .unwrap();
        assert!(out.status.success(), "{limit}: {}", text(&out.stderr));
        let merged = fs::read(point.path().join("m.gguf"));
        assert!(ggufuse(&["unmount", at]).status.success());
        assert!(merged.unwrap() == fs::read(&model).unwrap(), "{limit}");
    }
}

#[test]
fn a_sparse_model_of_a_terabyte() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    // Two I8 tensors: 2^40 bytes, then 64 that say something.
    let head = GgufBuilder {
        alignment: 32,
        tensors: vec![
            ("big".into(), vec![1 << 40], 24, Vec::new()),
            ("small".into(), vec![64], 24, Vec::new()),
        ],
        ..GgufBuilder::default()
    };
    let mut bytes = head.bytes();
    let second = bytes
        .len()
        .min(bytes.windows(5).rposition(|w| w == b"small").unwrap() + 5 + 4 + 8 + 4);
    bytes[second..second + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    let data = bytes.len() as u64;
    let file = File::create(&model).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let tail: Vec<u8> = (1..=64).collect();
    file.write_all_at(&tail, data + (1 << 40)).unwrap();
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let view = File::open(mount.path().join("m.gguf")).unwrap();
    assert_eq!(view.metadata().unwrap().len(), data + (1 << 40) + 64);
    let mut got = vec![1; 96];
    view.read_exact_at(&mut got, data + (1 << 40) - 32).unwrap();
    assert_eq!(got, [vec![0; 32], tail].concat());
    drop(view);
    mount.unmount();
}

/// A writer overwrites the source again and again while a reader reads: one handle never shows two states.
#[test]
fn a_handle_never_mixes_two_states_of_its_source() {
    const LEN: usize = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    let tensor = ("t".to_owned(), vec![LEN as u64], 24, vec![0u8; LEN]);
    let built = GgufBuilder {
        alignment: 32,
        tensors: vec![tensor],
        ..GgufBuilder::default()
    };
    built.write(&model);
    let data = built.bytes().len() - LEN;
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let path = mount.path().join("m.gguf");
    let done = std::sync::atomic::AtomicBool::new(false);
    let (mut whole, mut stale) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for state in 1..60u8 {
                let file = File::options().write(true).open(&model).unwrap();
                for part in 0..8 {
                    file.write_all_at(&vec![state; LEN / 8], (data + part * LEN / 8) as u64)
                        .unwrap();
                }
                drop(file);
                std::thread::sleep(Duration::from_millis(u64::from(state % 7) * 4));
            }
            done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        let mut buf = vec![0; 256 << 10];
        while !done.load(std::sync::atomic::Ordering::SeqCst) {
            let Ok(file) = File::open(&path) else {
                stale += 1;
                continue;
            };
            let mut state = None;
            for offset in (data..data + LEN).step_by(buf.len()) {
                let Ok(n) = file.read_at(&mut buf, offset as u64) else {
                    stale += 1;
                    break;
                };
                let first = *state.get_or_insert(buf[0]);
                // A file that was opened half written is one state too, with one seam at a part's border.
                let seams = buf[..n].windows(2).filter(|w| w[0] != w[1]).count();
                assert!(
                    seams <= 1 && buf[..n].iter().all(|&b| b == first || b + 1 == first),
                    "two states in one handle"
                );
                whole += n;
            }
        }
    });
    assert!(
        whole >= LEN && stale > 0,
        "nothing was read ({whole}) or nothing changed ({stale})"
    );
    mount.unmount();
}

#[test]
fn a_writer_of_the_source_does_not_wait_for_long() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100_000).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    drop(fs::read(mount.path().join("m.gguf")).unwrap());
    let start = Instant::now();
    drop(File::options().append(true).open(&model).unwrap());
    // The kernel would break the lease by force after 45 seconds.
    assert!(start.elapsed() < Duration::from_secs(5));
    mount.unmount();
}

#[test]
fn a_file_that_is_read_in_small_pieces_goes_through_the_page_cache_next_time() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 500_000).write(&model);
    let wanted = fs::read(&model).unwrap();
    let requests = |mount: &Mounted| {
        let out = ggufuse(&["status", mount.path().to_str().unwrap(), "--json"]);
        let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        value[0]["stats"]["reads"].as_u64().unwrap()
    };
    let read_small = |mount: &Mounted| {
        let before = requests(mount);
        let mut file = File::open(mount.path().join("m.gguf")).unwrap();
        let mut got = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let n = file.read(&mut piece).unwrap();
            if n == 0 {
                break;
            }
            got.extend_from_slice(&piece[..n]);
        }
        assert!(got == wanted);
        drop(file);
        // The handle is released after close returned.
        std::thread::sleep(Duration::from_millis(100));
        requests(mount) - before
    };
    let auto = Mounted::new(&model, &["--view", "merged"]);
    let (first, second) = (read_small(&auto), read_small(&auto));
    assert!(second * 4 < first, "requests: {first}, then {second}");
    auto.unmount();
    let page = Mounted::new(&model, &["--view", "merged", "-o", "cache=page"]);
    assert!(read_small(&page) * 4 < first);
    assert_eq!(read_small(&page), 0, "all of it is cached");
    page.unmount();
    let direct = Mounted::new(&model, &["--view", "merged", "--cache", "direct"]);
    assert_eq!(read_small(&direct), read_small(&direct));
    direct.unmount();
}

#[test]
fn a_killed_daemon_leaves_a_stale_mount_that_is_named_and_cleared_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let point = tempfile::tempdir().unwrap();
    let at = point.path().to_str().unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args(["-q", "mount", "-f", model.to_str().unwrap(), at])
        .spawn()
        .unwrap();
    wait_for("the mount", || {
        point.path().join("m-00001-of-00001.gguf").exists()
    });
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let out = ggufuse(&["status", at, "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value[0]["stale"], true);
    assert_eq!(out.status.code(), Some(1), "it was asked for, and is dead");
    let again = Mounted::at(point, &model);
    let out = ggufuse(&["status", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let here = |mount: &&serde_json::Value| mount["mountpoint"] == again.path().to_str().unwrap();
    let mounts: Vec<_> = value.as_array().unwrap().iter().filter(here).collect();
    assert_eq!(mounts.len(), 1, "the stale one lies beneath: {value}");
    assert_eq!(mounts[0]["stale"], false);
    again.unmount();
}

#[test]
fn the_background_logs_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let log = dir.path().join("log");
    let mount = Mounted::new(&model, &["--log-file", log.to_str().unwrap()]);
    fs::write(&model, b"no model").unwrap();
    let open = File::open(mount.path().join("m-00001-of-00001.gguf"));
    assert_eq!(open.unwrap_err().raw_os_error(), Some(libc::ESTALE));
    mount.unmount();
    wait_for("the last line", || {
        fs::read_to_string(&log).unwrap().contains("unmounted")
    });
    let log = fs::read_to_string(&log).unwrap();
    assert!(
        log.contains("serving 1 file(s)") && log.contains("not a GGUF file"),
        "{log}"
    );
}

/// The kernel caches the pages of maps by inode: a replaced model must not share them with the old one.
#[test]
fn maps_of_a_replaced_model_stay_apart() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    let filled = |byte: u8, path: &Path| {
        let mut built = GgufBuilder::sample(1, 200_000);
        built.tensors[0].3.fill(byte);
        built.write(path);
    };
    filled(b'A', &model);
    for cache in ["auto", "page"] {
        filled(b'A', &dir.path().join("next"));
        fs::rename(dir.path().join("next"), &model).unwrap();
        let mount = Mounted::new(&model, &["--view", "merged", "--cache", cache]);
        let script = r#"
import mmap, os, sys
view, model, other = sys.argv[1:]
def opened():
    fd = os.open(view, os.O_RDONLY)
    return fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ)
f1, m1 = opened()
assert m1[4096:4100] == b"AAAA" and os.pread(f1, 4, 8192) == b"AAAA"
os.rename(other, model)
f2, m2 = opened()
for i in range(10):
    at = 4096 + 40960 * i
    assert m2[at:at + 4] == b"BBBB", (i, m2[at:at + 4])
    assert m1[at:at + 4] == b"AAAA", (i, m1[at:at + 4])
    assert os.pread(f2, 4, at + 8192) == b"BBBB" and os.pread(f1, 4, at + 8192) == b"AAAA"
assert os.fstat(f1).st_ino != os.fstat(f2).st_ino
"#;
        filled(b'B', &dir.path().join("other"));
        let out = Command::new("python3")
            .args(["-c", script])
            .args([
                mount.path().join("m.gguf"),
                model.clone(),
                dir.path().join("other"),
            ])
            .output()
            .unwrap();
        assert!(out.status.success(), "{cache}: {}", text(&out.stderr));
        mount.unmount();
    }
}

#[test]
fn bytes_that_changed_behind_a_restored_mtime_are_estale() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 100_000).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let file = File::open(mount.path().join("m.gguf")).unwrap();
    let mut buf = [0; 16];
    file.read_exact_at(&mut buf, 5000).unwrap();
    let before = fs::metadata(&model).unwrap().modified().unwrap();
    let writer = File::options().write(true).open(&model).unwrap();
    writer.write_all_at(b"other bytes", 5000).unwrap();
    writer.set_modified(before).unwrap();
    drop(writer);
    assert_eq!(
        file.read_at(&mut buf, 5000).unwrap_err().raw_os_error(),
        Some(libc::ESTALE)
    );
    // What moves ctime alone for a reason that can be seen is no change.
    let again = File::open(mount.path().join("m.gguf")).unwrap();
    fs::set_permissions(&model, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::hard_link(&model, dir.path().join("link")).unwrap();
    again.read_exact_at(&mut buf, 5000).unwrap();
    drop((file, again));
    mount.unmount();
}

#[test]
fn a_lease_is_not_left_behind_by_a_change_before_the_first_read() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(1, 100_000).write(&model);
    let mount = Mounted::new(&model, &["--view", "merged"]);
    let file = File::open(mount.path().join("m.gguf")).unwrap();
    File::open(&model)
        .unwrap()
        .set_modified(std::time::UNIX_EPOCH)
        .unwrap();
    let mut buf = [0; 16];
    assert_eq!(
        file.read_at(&mut buf, 5000).unwrap_err().raw_os_error(),
        Some(libc::ESTALE)
    );
    let start = Instant::now();
    drop(File::options().write(true).open(&model).unwrap());
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "a writer waits for a lease that nobody watches"
    );
    drop(file);
    mount.unmount();
}

#[test]
fn a_source_whose_path_leads_through_the_mount_point_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    GgufBuilder::sample(2, 100).write(&outside.join("m.gguf"));
    std::os::unix::fs::symlink("../out/m.gguf", inside.join("m.gguf")).unwrap();
    let source = inside.join("m.gguf");
    let out = ggufuse(&[
        "mount",
        source.to_str().unwrap(),
        inside.to_str().unwrap(),
        "-o",
        "nonempty",
    ]);
    assert_eq!(out.status.code(), Some(5), "{}", text(&out.stderr));
    assert!(!is_mounted(&inside));
}

#[test]
fn a_listing_shows_the_files_of_the_new_model() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(3, 100).write(&model);
    let mount = Mounted::new(&model, &["--split-max-tensors", "1"]);
    assert_eq!(mount.names().len(), 3);
    GgufBuilder::sample(8, 100).write(&model);
    let names = mount.names();
    assert_eq!(names.len(), 8);
    for name in names {
        assert!(!fs::read(mount.path().join(name)).unwrap().is_empty());
    }
    mount.unmount();
}

#[test]
fn names_links_and_options_as_people_write_them() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("-m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    let (point, link) = (dir.path().join("mnt"), dir.path().join("link"));
    fs::create_dir(&point).unwrap();
    std::os::unix::fs::symlink("mnt", &link).unwrap();
    let command = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_ggufuse"))
            .args(args)
            .current_dir(dir.path())
            .output()
            .unwrap()
    };
    let ok = |args: &[&str]| {
        let out = command(args);
        assert!(
            out.status.success(),
            "{args:?}: {}",
            text(&[out.stderr, out.stdout.clone()].concat())
        );
        text(&out.stdout)
    };
    ok(&[
        "mount",
        "-o",
        "rw,noatime,x-systemd.automount",
        "--",
        "-m.gguf",
        "link",
    ]);
    assert!(ok(&["status", "./mnt/../link"]).contains("-m.gguf"));
    ok(&["unmount", "link"]);
    assert!(!is_mounted(&point));
    for (args, code) in [
        (
            &["mount", "./-m.gguf", "mnt", "-o", "auto_unmount"][..],
            Some(2),
        ),
        (
            &["mount", "./-m.gguf", "mnt", "--log-file", "./-m.gguf"],
            Some(2),
        ),
        (&["unmount", "mnt"], Some(1)),
        (&["unmount", "/proc"], Some(1)),
    ] {
        assert_eq!(command(args).status.code(), code, "{args:?}");
    }
    assert!(
        fs::read_to_string("/proc/self/stat").is_ok(),
        "/proc was not unmounted"
    );
}

#[test]
fn an_identical_view_is_left_to_the_kernel_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    let sample = GgufBuilder::sample(5, 200_000);
    sample.write(&model);
    let reads = |mount: &Mounted| {
        let out = ggufuse(&["status", mount.path().to_str().unwrap(), "--json"]);
        let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        value[0]["stats"]["reads"].as_u64().unwrap()
    };
    let options = ["--view", "merged", "--cache", "passthrough"];
    let mount = Mounted::new(&model, &options);
    let file = mount.path().join("m.gguf");
    let (a, b) = (fs::File::open(&file).unwrap(), fs::read(&file).unwrap());
    assert!(b == sample.bytes());
    let map = {
        // SAFETY: nobody writes the model in this test.
        unsafe { memmap2::Mmap::map(&a).unwrap() }
    };
    assert!(map[..] == b[..]);
    assert_eq!(reads(&mount), 0, "the daemon saw no read");
    drop((map, a));
    // Another model under the same name: looked up and registered anew.
    let other = GgufBuilder::sample(4, 100_000);
    let next = dir.path().join("next");
    other.write(&next);
    fs::rename(&next, &model).unwrap();
    wait_for("the new model", || {
        fs::read(&file).is_ok_and(|bytes| bytes == other.bytes())
    });
    mount.unmount();
    // What is not identical is served as ever.
    let mount = Mounted::new(
        &model,
        &["--cache", "passthrough", "--split-max-tensors", "2"],
    );
    for name in mount.names() {
        fs::read(mount.path().join(name)).unwrap();
    }
    assert!(reads(&mount) > 0);
    mount.unmount();
}

#[test]
fn a_mount_that_was_moved_is_taken_off_where_it_is() {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&model);
    for name in ["from", "to"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    // Only what is below a private mount can be moved: a mount namespace of its own.
    let script = r#"
        "$1" -q mount -f "$2/m.gguf" "$2/from" --view merged & daemon=$!
        until [ -e "$2/from/m.gguf" ]; do sleep 0.02; done
        mount --move "$2/from" "$2/to"
        cmp "$2/m.gguf" "$2/to/m.gguf"
        kill "$daemon"; wait "$daemon"
        if grep "$2" /proc/self/mounts; then exit 1; fi
        [ -z "$(ls "$2/to")" ]"#;
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
        .expect("unshare of util-linux");
    assert!(
        out.status.success(),
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
}
