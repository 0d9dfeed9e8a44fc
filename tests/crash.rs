//! `split` and `merge` killed, out of room, on disks that fail: nothing is lost, and no half file has a final name.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::disk::{LoopDisk, Tmpfs, can_mount};
use common::trace::{Stop, Traced};
use common::{GgufBuilder, ggufuse};

const SHARDS: usize = 6;

/// A model, its shards and the file that they merge to.
struct Model {
    shards: BTreeMap<String, Vec<u8>>,
    whole: Vec<u8>,
}

impl Model {
    /// Of `SHARDS` tensors of some `len` bytes, one a shard.
    fn new(len: u64) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        GgufBuilder::sample(SHARDS, len / 4).write(path("m.gguf").as_ref());
        let split = [
            "split",
            &path("m.gguf"),
            &path("m"),
            "--split-max-tensors",
            "1",
        ];
        assert!(ggufuse(&split).status.success());
        fs::remove_file(path("m.gguf")).unwrap();
        let shards = files(dir.path());
        let merge = ["merge", &path("m-00001-of-00006.gguf"), &path("whole")];
        assert!(ggufuse(&merge).status.success());
        let whole = fs::read(path("whole")).unwrap();
        assert_eq!(shards.len(), SHARDS);
        Model { shards, whole }
    }

    fn lay_out(&self, dir: &Path) {
        for (name, bytes) in &self.shards {
            fs::write(dir.join(name), bytes).unwrap();
        }
    }

    /// After any crash: each final name stands for all of its bytes; what is gone of the shards is elsewhere, as the
    /// run that follows has to show.
    fn check(&self, dir: &Path, context: &str) {
        let there = files(dir);
        if let Some(out) = there.get("out.gguf") {
            assert!(
                *out == self.whole,
                "{context}: half a file under its final name"
            );
        }
        for (name, bytes) in &self.shards {
            match there.get(name) {
                Some(found) => assert!(found == bytes, "{context}: {name} was changed"),
                None => assert!(
                    there.contains_key(".out.gguf.ggufuse-journal")
                        || there.contains_key("out.gguf"),
                    "{context}: {name} is gone, and nothing says where to: {:?}",
                    there.keys()
                ),
            }
        }
    }
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    files(dir).into_keys().collect()
}

fn clear(dir: &Path) {
    for name in names(dir) {
        fs::remove_file(dir.join(name)).unwrap();
    }
}

fn changes_files(stop: &Stop) -> bool {
    let calls = [
        libc::SYS_pwrite64,
        libc::SYS_copy_file_range,
        libc::SYS_fsync,
        libc::SYS_renameat2,
        libc::SYS_rename,
        libc::SYS_unlink,
        libc::SYS_unlinkat,
    ];
    let creates = stop.nr == libc::SYS_openat && stop.args[2] & libc::O_CREAT as u64 != 0;
    let writes = stop.nr == libc::SYS_write && stop.args[0] > 2;
    creates || writes || calls.contains(&stop.nr)
}

/// All stops of an undisturbed run.
fn record(args: &[&str]) -> Vec<Stop> {
    let mut traced = Traced::start(args);
    let stops = std::iter::from_fn(|| traced.step()).collect();
    assert_eq!(traced.finish(), 0, "{args:?}");
    stops
}

/// Kills a run at its stop number `at`. False if it has ended before.
fn kill_at(args: &[&str], at: usize) -> bool {
    let mut traced = Traced::start(args);
    for _ in 0..at {
        if traced.step().is_none() {
            traced.finish();
            return false;
        }
    }
    traced.kill();
    true
}

/// A small generator of numbers, so that a failure can be had again.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap()
    }
}

/// Kills `merge --delete-splits` at every system call of a run that changes files, and at random ones of the runs that
/// follow, until one comes to its end; again and again, until there were more than enough kills.
fn killed_merges(model: &Model, dir: &Path, cleared: &dyn Fn()) -> usize {
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (first, out) = (path("m-00001-of-00006.gguf"), path("out.gguf"));
    let args = ["merge", &first, &out, "--delete-splits"];
    model.lay_out(dir);
    let stops = record(&args);
    assert_eq!(names(dir), ["out.gguf"]);
    // Before the first look for a journal nothing has begun.
    let points: Vec<usize> = (0..stops.len())
        .filter(|&i| changes_files(&stops[i]))
        .map(|i| i + 1)
        .collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut kills, mut round) = (0, 0);
    while round < points.len() || kills < 220 {
        let at = points[round % points.len()];
        round += 1;
        clear(dir);
        cleared();
        model.lay_out(dir);
        let mut at = at;
        while kill_at(&args, at) {
            kills += 1;
            model.check(
                dir,
                &format!("kill {kills} at stop {at} of {}", stops.len()),
            );
            // Every other run comes to its end.
            if random.below(2) == 0 {
                break;
            }
            at = 1 + random.below(stops.len());
        }
        let done = || names(dir) == ["out.gguf"];
        let last = ggufuse(&args);
        assert!(
            last.status.success() || done(),
            "after a kill at stop {at}: {last:?}"
        );
        assert!(done(), "after a kill at stop {at}: {:?}", names(dir));
        assert!(
            fs::read(&out).unwrap() == model.whole,
            "after a kill at stop {at}"
        );
    }
    kills
}

#[test]
fn merges_that_delete_lose_nothing_when_killed() {
    let model = Model::new(100_000);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let kills = killed_merges(&model, dir.path(), &|| ());
    assert!(kills >= 200, "only {kills} kills");
}

#[test]
fn nor_where_room_is_short() {
    if !can_mount() {
        return;
    }
    let model = Model::new(1 << 20);
    // All shards and a half of the merged file.
    let room = 9 << 20;
    let disk = Tmpfs::new(room);
    let kills = killed_merges(&model, disk.path(), &|| disk.wait_until_empty());
    assert!(kills >= 200, "only {kills} kills");
}

#[test]
fn nothing_is_deleted_before_it_is_synced() {
    let model = Model::new(100_000);
    let roomy = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut places = vec![(roomy.path().to_owned(), 1)];
    let tight = can_mount().then(|| Tmpfs::new(300 << 10));
    places.extend(tight.iter().map(|disk| (disk.path().to_owned(), 4)));
    for (dir, wanted) in places {
        let model = if wanted == 1 {
            &model
        } else {
            &Model::new(30_000)
        };
        model.lay_out(&dir);
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        let stops = record(&[
            "merge",
            &path("m-00001-of-00006.gguf"),
            &path("out.gguf"),
            "--delete-splits",
        ]);
        let (mut dirty, mut deleted, mut syncs) = (false, 0, 0);
        for stop in stops.iter().filter(|stop| stop.before) {
            match stop.nr {
                libc::SYS_pwrite64 | libc::SYS_copy_file_range => dirty = true,
                libc::SYS_write if stop.args[0] > 2 => dirty = true,
                libc::SYS_fsync => (dirty, syncs) = (false, syncs + 1),
                libc::SYS_unlink | libc::SYS_unlinkat => {
                    assert!(!dirty, "a file goes before all that was written is synced");
                    deleted += 1;
                }
                _ => {}
            }
        }
        // The shards and the journal, in each case; and there are more syncs where room is short.
        assert!(deleted > SHARDS, "{deleted}");
        assert!(syncs > 4 * wanted, "{syncs}");
    }
}

#[test]
fn plain_writes_leave_no_half_file_when_killed() {
    let model = Model::new(30_000);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let whole = path("whole.gguf");
    let merge = ["merge", &path("m-00001-of-00006.gguf"), &path("out.gguf")];
    let split = ["split", &whole, &path("m"), "--split-max-tensors", "1"];
    let mut kills = 0;
    for (args, is_split) in [(&merge[..], false), (&split[..], true)] {
        let lay_out = || {
            clear(dir.path());
            if is_split {
                fs::write(&whole, &model.whole).unwrap();
            } else {
                model.lay_out(dir.path());
            }
        };
        lay_out();
        let stops = record(args);
        let wanted = files(dir.path());
        for at in (0..stops.len()).filter(|&i| changes_files(&stops[i])) {
            lay_out();
            assert!(kill_at(args, at + 1));
            kills += 1;
            for (name, bytes) in files(dir.path()) {
                assert!(
                    name.starts_with('.') || wanted[&name] == bytes,
                    "half of {name} at stop {at} of {args:?}"
                );
            }
            let again = ggufuse(args);
            let there = String::from_utf8_lossy(&again.stderr).contains("there already");
            assert!(again.status.success() || (there && !is_split), "{again:?}");
            assert_eq!(
                names(dir.path()),
                wanted.keys().cloned().collect::<Vec<_>>()
            );
        }
    }
    assert!(kills >= 100, "only {kills} points");
}

/// Runs until the first byte is about to be copied, then fills the disk.
fn out_of_room(args: &[&str], disk: &Tmpfs) -> i32 {
    let mut traced = Traced::start(args);
    while let Some(stop) = traced.step() {
        if stop.before && stop.nr == libc::SYS_copy_file_range {
            disk.fill();
            break;
        }
    }
    traced.finish()
}

#[test]
fn a_full_disk_leaves_everything_as_it_was() {
    if !can_mount() {
        return;
    }
    let model = Model::new(1 << 20);
    let elsewhere = tempfile::tempdir().unwrap();
    model.lay_out(elsewhere.path());
    let source = |name: &str| elsewhere.path().join(name).to_str().unwrap().to_owned();
    let (first, whole) = (source("m-00001-of-00006.gguf"), source("whole"));
    fs::write(&whole, &model.whole).unwrap();
    let before = files(elsewhere.path());

    // Too small from the start: said before anything is written.
    let small = Tmpfs::new(4 << 20);
    let target = |disk: &Tmpfs, name: &str| disk.path().join(name).to_str().unwrap().to_owned();
    for args in [
        &["merge", &first, &target(&small, "out.gguf")][..],
        &[
            "merge",
            &first,
            &target(&small, "out.gguf"),
            "--delete-splits",
        ],
        &["split", &whole, &target(&small, "s")],
    ] {
        let out = ggufuse(args);
        assert_eq!(out.status.code(), Some(3), "{args:?}: {out:?}");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(said.contains("bytes are needed"), "{said}");
        assert!(names(small.path()).is_empty());
    }

    // Full while it is written.
    let disk = Tmpfs::new(16 << 20);
    for args in [
        &["merge", &first, &target(&disk, "out.gguf")][..],
        &[
            "merge",
            &first,
            &target(&disk, "out.gguf"),
            "--delete-splits",
        ],
        &[
            "split",
            &whole,
            &target(&disk, "s"),
            "--split-max-tensors",
            "2",
        ],
    ] {
        assert_eq!(out_of_room(args, &disk), 1, "{args:?}");
        assert_eq!(names(disk.path()), ["filler"], "{args:?}");
        fs::remove_file(disk.path().join("filler")).unwrap();
    }
    assert!(files(elsewhere.path()) == before);

    // Full after some of the shards were deleted: what was done stays, and the same command goes on.
    let tight = Tmpfs::new(9 << 20);
    model.lay_out(tight.path());
    let out = target(&tight, "out.gguf");
    let args = [
        "merge",
        &target(&tight, "m-00001-of-00006.gguf"),
        &out,
        "--delete-splits",
    ];
    let mut traced = Traced::start(&args);
    let mut deleted = 0;
    while let Some(stop) = traced.step() {
        deleted += usize::from(!stop.before && stop.nr == libc::SYS_unlink);
        if deleted > 0 && stop.before && stop.nr == libc::SYS_copy_file_range {
            tight.fill();
            break;
        }
    }
    assert_eq!(traced.finish(), 1);
    assert!(deleted > 0);
    model.check(tight.path(), "a full disk");
    fs::remove_file(tight.path().join("filler")).unwrap();
    // Without the option it is refused, by name.
    let refused = ggufuse(&args[..3]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--delete-splits"));
    assert!(ggufuse(&args).status.success());
    assert_eq!(names(tight.path()), ["out.gguf"]);
    assert!(fs::read(&out).unwrap() == model.whole);
}

#[test]
fn a_disk_that_fails_loses_nothing() {
    if !can_mount() {
        return;
    }
    let model = Model::new(4 << 20);
    let sound = tempfile::tempdir().unwrap();
    let target = sound.path().join("out.gguf").to_str().unwrap().to_owned();
    let cases: [&[&str]; 3] = [&[], &["--verify"], &["--delete-splits"]];

    // The sources cannot be read to their end.
    let disk = LoopDisk::new(&std::env::temp_dir());
    model.lay_out(&disk.path());
    let first = disk.path().join("m-00001-of-00006.gguf");
    let first = first.to_str().unwrap();
    // Their headers stay in memory, the rest is only on the disk.
    for name in model.shards.keys() {
        common::forget_tail(&disk.path().join(name), 1 << 20);
    }
    disk.fail();
    for options in cases {
        let out = ggufuse(&[&["merge", first, &target][..], options].concat());
        assert_eq!(out.status.code(), Some(1), "{options:?}: {out:?}");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            said.contains("m-0000") && said.contains("os error 5"),
            "{said}"
        );
        assert!(names(sound.path()).is_empty());
        let there = fs::read_dir(disk.path()).unwrap().count();
        assert!(there >= SHARDS, "{options:?}");
    }

    // What was written cannot be brought to the disk: the loop device has less below it than it claims.
    model.lay_out(sound.path());
    let first = sound.path().join("m-00001-of-00006.gguf");
    let first = first.to_str().unwrap();
    for options in cases {
        let below = Tmpfs::new(12 << 20);
        let disk = LoopDisk::new(below.path());
        let target = disk.path().join("out.gguf").to_str().unwrap().to_owned();
        let out = ggufuse(&[&["merge", first, &target][..], options].concat());
        assert_eq!(out.status.code(), Some(1), "{options:?}: {out:?}");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(said.contains("out.gguf"), "{said}");
        assert!(!Path::new(&target).exists());
        assert!(files(sound.path()) == model.shards, "{options:?}");
    }
}
