//! `split` and `merge` in the place of `llama-gguf-split`: the same files, the same words; and `verify`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::disk::{LoopDisk, can_mount};
use common::trace::Traced;
use common::{GgufBuilder, Mounted, ggufuse, kv, peers};
use ggufuse::export::{self, Event, Output as ToWrite, Watch};
use ggufuse::layout::{Piece, VirtualFile};
use ggufuse::source::Source;
use proptest::prelude::*;

fn tool(peers: &Path, args: &[&str]) -> Output {
    Command::new(peers.join("bin/llama-gguf-split"))
        .args(args)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    files(dir).into_keys().collect()
}

/// A folder and the paths of names in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// Where a sync costs nothing.
    fn in_memory() -> Folder {
        Folder(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn names(&self) -> Vec<String> {
        names(self.path())
    }
}

/// Splits with both, compares files and stdout; then merges with both, and compares.
fn both_ways(peers: &Path, model: &Path, options: &[&str], folder: fn() -> Folder) {
    let (theirs, ours) = (folder(), folder());
    let model = model.to_str().unwrap();
    let context = format!("{model} {options:?}");
    let said = tool(
        peers,
        &[&["--split"], options, &[model, &theirs.at("m")]].concat(),
    );
    assert!(said.status.success(), "{context}: {said:?}");
    let prefix = ours.at("m");
    let dry = ggufuse(&[&["split", model, &prefix, "--dry-run"], options].concat());
    assert!(dry.status.success() && ours.names().is_empty(), "{context}");
    let done = ggufuse(&[&["split", model, &ours.at("m")], options].concat());
    assert!(done.status.success(), "{context}: {done:?}");
    let wanted = text(&said.stdout).replace(&theirs.at("m"), &ours.at("m"));
    assert_eq!(text(&done.stdout), wanted, "{context}");
    assert!(wanted.starts_with(&text(&dry.stdout)), "{context}");
    assert!(files(ours.path()) == files(theirs.path()), "{context}");

    let shards = ours.names();
    let (first, last) = (&shards[0], shards.last().unwrap());
    let said = tool(peers, &["--merge", &theirs.at(first), &theirs.at("whole")]);
    assert!(said.status.success(), "{context}: {said:?}");
    let wanted = fs::read(theirs.at("whole")).unwrap();
    for (out, more) in [("whole", "--verify"), ("deleted", "--delete-splits")] {
        let done = ggufuse(&["merge", &ours.at(last), &ours.at(out), more]);
        assert!(done.status.success(), "{context}: {done:?}");
        assert_eq!(text(&done.stdout), text(&said.stdout), "{context}");
        assert!(fs::read(ours.at(out)).unwrap() == wanted, "{context}");
    }
    assert_eq!(ours.names(), ["deleted", "whole"], "{context}");
}

#[test]
fn files_and_words_are_those_of_the_tool() {
    let peers = peers();
    for options in [
        &["--split-max-tensors", "50"][..],
        &["--split-max-size", "200M", "--no-tensor-first-split"],
        &["--split_max_size", "180M", "--no_tensor_first_split"],
    ] {
        both_ways(&peers, &peers.join("gemma.gguf"), options, Folder::new);
    }
    let archs = fs::read_dir(peers.join("archs")).unwrap();
    let archs: Vec<PathBuf> = archs.map(|entry| entry.unwrap().path()).collect();
    assert!(archs.len() >= 100);
    // Views of all of them are compared through mounts; the files come from the same layout.
    for (i, model) in archs.iter().enumerate().step_by(4) {
        let n = (3 + i % 9).to_string();
        both_ways(
            &peers,
            model,
            &["--split-max-tensors", &n],
            Folder::in_memory,
        );
    }
    let folder = Folder::new();
    let odd = folder.path().join("odd name.gguf");
    GgufBuilder::sample(23, 90_001).write(&odd);
    both_ways(&peers, &odd, &["--split-max-size", "1M"], Folder::new);
    both_ways(&peers, &odd, &[], Folder::new);
}

#[test]
fn a_file_that_was_split_comes_back_as_it_was() {
    let folder = Folder::new();
    // Alignments at which the tool damages its own output, among them one at which blocks can be shared.
    for alignment in [32u64, 64, 4096] {
        let mut model = GgufBuilder::sample(9, 5_000);
        model.alignment = alignment;
        let value = u32::try_from(alignment).unwrap().to_le_bytes();
        model.kvs.push(kv("general.alignment", 4, &value));
        let path = folder.path().join("m.gguf");
        model.write(&path);
        let split = [
            "split",
            path.to_str().unwrap(),
            &folder.at("s"),
            "--split-max-tensors",
            "4",
        ];
        assert!(ggufuse(&split).status.success());
        let merge = [
            "merge",
            &folder.at("s-00001-of-00003.gguf"),
            &folder.at("back"),
        ];
        let clean = [
            &merge[..],
            &["--headers", "clean", "--verify", "--delete-splits"],
        ]
        .concat();
        let out = ggufuse(&clean);
        assert!(out.status.success(), "{out:?}");
        assert_eq!(folder.names(), ["back", "m.gguf"]);
        assert!(fs::read(folder.at("back")).unwrap() == model.bytes());
        fs::remove_file(folder.at("back")).unwrap();
    }
}

#[test]
fn pieces_are_joined_and_deleted() {
    let folder = Folder::new();
    let bytes = GgufBuilder::sample(7, 30_000).bytes();
    let lay_out = || {
        for (i, piece) in bytes.chunks(bytes.len().div_ceil(4)).enumerate() {
            fs::write(folder.at(&format!("x.gguf.part{}of4", i + 1)), piece).unwrap();
        }
    };
    lay_out();
    let merge = ["merge", &folder.at("x.gguf.part2of4"), &folder.at("out")];
    assert!(
        ggufuse(&[&merge[..], &["--delete-splits", "--verify"]].concat())
            .status
            .success()
    );
    assert!(fs::read(folder.at("out")).unwrap() == bytes);
    assert_eq!(folder.names(), ["out"]);
    lay_out();
    let out = ggufuse(&["verify", &folder.at("out"), &folder.at("x.gguf.part1of4")]);
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn nothing_is_overwritten() {
    let folder = Folder::new();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(9, 500).write(model.as_ref());
    let split = |prefix: &str| {
        ggufuse(&[
            "split",
            &model,
            &folder.at(prefix),
            "--split-max-tensors",
            "3",
        ])
    };
    assert!(split("s").status.success());
    let before = files(folder.path());

    // The very same bytes may stay; other ones are an error, and no other shard is written.
    assert!(split("s").status.success());
    assert!(files(folder.path()) == before);
    for damage in ["longer", "other"] {
        let shard = folder.at("s-00002-of-00003.gguf");
        let mut bytes = fs::read(&shard).unwrap();
        match damage {
            "longer" => bytes.push(0),
            _ => *bytes.last_mut().unwrap() ^= 1,
        }
        fs::write(&shard, &bytes).unwrap();
        fs::remove_file(folder.at("s-00003-of-00003.gguf")).unwrap();
        let damaged = files(folder.path());
        let out = split("s");
        assert_eq!(out.status.code(), Some(1), "{damage}: {out:?}");
        assert!(text(&out.stderr).contains("s-00002-of-00003.gguf: there already"));
        assert!(files(folder.path()) == damaged, "{damage}");
        fs::remove_file(&shard).unwrap();
        assert!(split("s").status.success());
        assert!(files(folder.path()) == before, "{damage}");
    }

    // Files, folders and links that lead nowhere are all in the way of a merge.
    fs::write(folder.at("file"), b"mine").unwrap();
    fs::create_dir(folder.at("folder")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.at("link")).unwrap();
    for (name, options) in [
        ("file", &[][..]),
        ("folder", &[]),
        ("link", &[]),
        ("file", &["--delete-splits"]),
    ] {
        let merge = [
            "merge",
            &folder.at("s-00001-of-00003.gguf"),
            &folder.at(name),
        ];
        let out = ggufuse(&[&merge[..], options].concat());
        assert_eq!(out.status.code(), Some(1), "{name}: {out:?}");
        assert!(text(&out.stderr).contains("there already"), "{out:?}");
    }
    assert_eq!(fs::read(folder.at("file")).unwrap(), b"mine");
    assert!(!Path::new(&folder.at("nowhere")).exists());
    fs::remove_dir(folder.at("folder")).unwrap();
    fs::remove_file(folder.at("link")).unwrap();
    fs::remove_file(folder.at("file")).unwrap();
    assert!(files(folder.path()) == before);
}

#[test]
fn bad_arguments_and_places_are_refused() {
    let folder = Folder::new();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(9, 500).write(model.as_ref());
    let limits = ["--split-max-size", "1M", "--split-max-tensors", "2"];
    let (nowhere, slash) = (folder.at("none/s"), format!("{}/", folder.at("")));
    for (args, code) in [
        (&[&["split", &model, &nowhere][..], &limits].concat()[..], 2),
        (&["split", &model, &slash], 2),
        (&["split", &model, &nowhere], 1),
        (
            &["split", &model, &folder.at("s"), "--split-max-tensors", "0"],
            2,
        ),
        (
            &["split", &model, &folder.at("s"), "--max-file-size", "1K"],
            3,
        ),
        (&["split", &folder.at("x"), &folder.at("s")], 1),
        (&["merge", &model, &nowhere], 1),
        (&["merge", &model, "/"], 2),
        (&["merge", &model], 2),
        (
            &["merge", &model, &folder.at("out"), "--override-kv", "a=b"],
            2,
        ),
    ] {
        let out = ggufuse(args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {out:?}");
        assert_eq!(folder.names(), ["m.gguf"]);
    }
}

#[test]
fn overrides_reach_the_files() {
    let folder = Folder::new();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(6, 500).write(model.as_ref());
    let overrides = ["--override-kv", "general.name=str:new"];
    let split = ["split", &model, &folder.at("s"), "--split-max-tensors", "2"];
    assert!(ggufuse(&[&split[..], &overrides].concat()).status.success());
    let merge = ["merge", &model, &folder.at("out.gguf")];
    assert!(ggufuse(&[&merge[..], &overrides].concat()).status.success());
    let shards = folder.at("s-00002-of-00003.gguf");
    let same = ggufuse(&["verify", &shards, &folder.at("out.gguf")]);
    assert!(same.status.success(), "{same:?}");
    let other = ggufuse(&["verify", &shards, &model]);
    assert_eq!(other.status.code(), Some(1));
    assert_eq!(
        text(&other.stdout),
        "key general.name: only in A: str \"new\"\n"
    );
}

#[test]
fn a_signal_leaves_nothing() {
    let folder = Folder::in_memory();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(6, 100_000).write(model.as_ref());
    let split = ["split", &model, &folder.at("s"), "--split-max-tensors", "2"];
    assert!(ggufuse(&split).status.success());
    let before = files(folder.path());
    let merge = [
        "merge",
        &folder.at("s-00001-of-00003.gguf"),
        &folder.at("out"),
    ];
    let drain = [&merge[..], &["--delete-splits"]].concat();
    let again = ["split", &model, &folder.at("t"), "--split-max-tensors", "2"];
    for args in [&merge[..], &drain, &again] {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            let mut traced = Traced::start(args);
            let mut copies = 0;
            while copies < 2 {
                let stop = traced.step().expect("it is not over yet");
                copies += usize::from(stop.before && stop.nr == libc::SYS_copy_file_range);
            }
            traced.signal(signal);
            assert_eq!(traced.finish(), 1, "{args:?}");
            assert!(files(folder.path()) == before, "{args:?}");
        }
    }
}

#[test]
fn memory_stays_below_64_mib() {
    let folder = Folder::in_memory();
    let model = folder.at("m.gguf");
    // One tensor of 80 MB, which the tool holds whole.
    GgufBuilder::sample(1, 20_000_000).write(model.as_ref());
    for args in [
        ["merge", &model, &folder.at("out"), "--verify"],
        ["split", &model, &folder.at("s"), "--verify"],
        [
            "merge",
            &folder.at("out"),
            &folder.at("moved"),
            "--delete-splits",
        ],
        ["verify", &model, &folder.at("moved"), "--hash"],
    ] {
        let mut traced = Traced::start(&args);
        let mut most = 0;
        while let Some(stop) = traced.step() {
            if stop.nr == libc::SYS_exit_group {
                most = traced.peak_kib();
            }
        }
        assert_eq!(traced.finish(), 0, "{args:?}");
        assert!(most > 0 && most < 64 << 10, "{args:?}: {most} KiB");
    }
}

#[test]
fn two_at_once_do_not_share_a_file() {
    let folder = Folder::new();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(6, 100_000).write(model.as_ref());
    let merge = ["merge", &model, &folder.at("out")];
    let mut first = Traced::start(&merge);
    while first.step().expect("it is not over yet").nr != libc::SYS_copy_file_range {}
    let second = ggufuse(&merge);
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    assert!(text(&second.stderr).contains("another process is writing it"));
    assert_eq!(first.finish(), 0);
    assert_eq!(folder.names(), ["m.gguf", "out"]);
}

#[test]
fn verify_names_what_differs() {
    let folder = Folder::new();
    let mut model = GgufBuilder::sample(4, 1_000);
    let array = |last: u8| {
        let head = [
            &5u32.to_le_bytes()[..],
            &2u64.to_le_bytes(),
            &[1, 0, 0, 0, last, 0, 0, 0],
        ];
        kv("a.list", 9, &head.concat())
    };
    model.kvs.extend([
        kv("a.one", 4, &[1, 0, 0, 0]),
        kv("a.two", 4, &[2, 0, 0, 0]),
        array(7),
    ]);
    model.write(folder.at("a.gguf").as_ref());
    let mut other = model.clone();
    // Another order of keys and tensors is no difference.
    other.kvs.rotate_left(1);
    other.tensors.rotate_left(2);
    other.write(folder.at("same.gguf").as_ref());
    let same = ggufuse(&["verify", &folder.at("a.gguf"), &folder.at("same.gguf")]);
    assert!(same.status.success(), "{same:?}");
    assert_eq!(
        text(&same.stdout),
        "the same: 4 tensors, 16072 bytes, and all keys\n"
    );

    other.kvs = vec![
        model.kvs[0].clone(),
        kv("a.one", 10, &[1, 0, 0, 0, 0, 0, 0, 0]),
        array(8),
        kv("a.new", 7, &[1]),
    ];
    other.tensors = model.tensors.clone();
    other.tensors[0].3[77] ^= 1;
    other.tensors[1].1 = vec![17, 59];
    other.tensors[2].0 = "renamed".to_owned();
    other.write(folder.at("b.gguf").as_ref());
    let differ = ggufuse(&["verify", &folder.at("a.gguf"), &folder.at("b.gguf")]);
    assert_eq!(differ.status.code(), Some(1));
    assert!(
        text(&differ.stderr).contains("8 difference(s)"),
        "{differ:?}"
    );
    let lines = [
        "key a.one: A has u32 1, B has u64 1",
        "key a.two: only in A: u32 2",
        "key a.list: A has arr {\"of\":\"i32\",\"count\":2}, B has arr {\"of\":\"i32\",\"count\":2}, not the same further in",
        "key a.new: only in B: bool true",
        "tensor blk.0.weight: byte 77 of its data differs",
        "tensor blk.1.weight: A is F32 [1003], B is F32 [17, 59]",
        "tensor blk.2.weight: only in A",
        "tensor renamed: only in B",
    ];
    assert_eq!(text(&differ.stdout).lines().collect::<Vec<_>>(), lines);
}

/// Hashes as sha256sum gives them, from a file, its shards on disk, and a mount of those.
#[test]
fn verify_hashes_tensors_wherever_they_lie() {
    let folder = Folder::new();
    let model = GgufBuilder::sample(5, 700_000);
    model.write(folder.at("m.gguf").as_ref());
    let split = [
        "split",
        &folder.at("m.gguf"),
        &folder.at("s"),
        "--split-max-tensors",
        "2",
    ];
    assert!(ggufuse(&split).status.success());
    let mount = Mounted::new(folder.at("s-00001-of-00003.gguf").as_ref(), &[]);
    let mut wanted = String::new();
    for (name, _, _, data) in &model.tensors {
        fs::write(folder.at("data"), data).unwrap();
        let sum = Command::new("sha256sum")
            .arg(folder.at("data"))
            .output()
            .unwrap();
        wanted += &format!("{}  {name}\n", &text(&sum.stdout)[..64]);
    }
    let total: usize = model.tensors.iter().map(|t| t.3.len()).sum();
    wanted += &format!("the same: 5 tensors, {total} bytes, and all keys\n");
    let seen = mount.path().join("s.gguf");
    for other in [&folder.at("s-00003-of-00003.gguf"), seen.to_str().unwrap()] {
        let out = ggufuse(&["verify", &folder.at("m.gguf"), other, "--hash"]);
        assert!(out.status.success(), "{out:?}");
        assert_eq!(text(&out.stdout), wanted);
    }
    mount.unmount();
}

/// Bytes that are free where a file lies.
fn free(folder: &Path) -> u64 {
    let out = Command::new("stat")
        .args(["-f", "-c", "%f %S"])
        .arg(folder)
        .output()
        .unwrap();
    let text = text(&out.stdout);
    text.split_whitespace()
        .map(|n| n.parse::<u64>().unwrap())
        .product()
}

/// Where data lies alike in source and output, and the file system can, it is there once.
#[test]
fn blocks_are_shared_where_that_is_possible() {
    for (make, magic) in [("mkfs.xfs -q", "xfs"), ("mkfs.btrfs -q", "btrfs")] {
        let tool = make.split(' ').next().unwrap();
        let there = Command::new(tool).arg("-V").output().is_ok();
        if !there || !can_mount() {
            eprintln!("not run on {magic}: needs {tool}");
            continue;
        }
        let disk = LoopDisk::with(Path::new("/dev/shm"), "400M", make);
        let at = |name: &str| disk.path().join(name).to_str().unwrap().to_owned();
        let mut model = GgufBuilder::sample(3, 16 << 20);
        model.alignment = 65_536;
        model
            .kvs
            .push(kv("general.alignment", 4, &65_536u32.to_le_bytes()));
        model.write(at("m.gguf").as_ref());
        sync(&disk.path());
        // Some 190 MiB of model; a second copy would still fit, a third not.
        let before = free(&disk.path());
        for (args, out) in [
            (
                &[
                    "merge",
                    &at("m.gguf"),
                    &at("one.gguf"),
                    "--override-kv",
                    "general.name=str:x",
                ][..],
                "one.gguf",
            ),
            (
                &["split", &at("m.gguf"), &at("two"), "--verify"],
                "two-00001-of-00001.gguf",
            ),
            (&["merge", &at("m.gguf"), &at("three.gguf")], "three.gguf"),
        ] {
            let done = ggufuse(args);
            assert!(done.status.success(), "{magic}: {done:?}");
            let same = ggufuse(&["verify", &at("m.gguf"), &at(out)]);
            let only = if out == "one.gguf" { Some(1) } else { Some(0) };
            assert_eq!(same.status.code(), only, "{magic}: {same:?}");
            assert!(!text(&same.stdout).contains("tensor "), "{magic}: {same:?}");
        }
        sync(&disk.path());
        let used = before.saturating_sub(free(&disk.path()));
        assert!(used < 32 << 20, "{magic}: {used} bytes for three copies");
    }
}

fn sync(folder: &Path) {
    assert!(
        Command::new("sync")
            .arg("-f")
            .arg(folder)
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn progress_is_a_bar_on_a_terminal_and_lines_elsewhere() {
    let folder = Folder::in_memory();
    let model = folder.at("m.gguf");
    GgufBuilder::sample(2, 5_000_000).write(model.as_ref());
    let merge = |out: &str| {
        format!(
            "{} merge {model} {}",
            env!("CARGO_BIN_EXE_ggufuse"),
            folder.at(out)
        )
    };
    // A terminal of its own, of which script(1) writes down what is shown.
    let shown = Command::new("script")
        .args(["-qec", &merge("one"), "/dev/null"])
        .env("TERM", "xterm")
        .output()
        .unwrap();
    assert!(shown.status.success());
    let shown = text(&shown.stdout);
    assert!(
        shown.contains("of 38.15 MiB") && shown.contains("left"),
        "{shown:?}"
    );
    assert!(
        shown.contains("merged from 1 split with 2 tensors."),
        "{shown:?}"
    );
    // A slow copy without a terminal: stopped for longer than it takes until a line is due.
    let merge = ["merge", &model, &folder.at("two")];
    let log = folder.at("log");
    let mut slow = Traced::logging(&merge, log.as_ref());
    while slow.step().expect("it is not over yet").nr != libc::SYS_copy_file_range {}
    std::thread::sleep(std::time::Duration::from_millis(5_100));
    assert_eq!(slow.finish(), 0);
    let lines = fs::read_to_string(&log).unwrap();
    let line = lines.lines().next().unwrap();
    assert!(
        line.contains(" of 38.15 MiB, ") && line.ends_with(" left"),
        "{lines}"
    );
    assert!(
        !lines.contains('\r') && !lines.contains('\u{1b}'),
        "{lines:?}"
    );
}

/// Reads what a virtual file says, the naive way.
fn naive(content: &VirtualFile, sources: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in content.resolve(0, content.len()) {
        match piece {
            Piece::Inline(inline) => bytes.extend_from_slice(inline),
            Piece::Zeros(n) => bytes.resize(bytes.len() + n as usize, 0),
            Piece::Source {
                source,
                offset,
                len,
            } => {
                bytes.extend_from_slice(&sources[source][offset as usize..][..len as usize]);
            }
        }
    }
    bytes
}

struct Quiet;

impl Watch for Quiet {
    fn event(&mut self, _: Event<'_>) {}

    fn stopped(&self) -> bool {
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any virtual file comes out byte for byte; one whose sources follow one another also takes them with it.
    #[test]
    fn what_is_written_equals_a_byte_vector(
        lens in prop::collection::vec(1usize..20_000, 1..5),
        parts in prop::collection::vec((0u8..4, 0usize..5, any::<u64>(), 0u64..9_000), 0..12),
        verify in any::<bool>(),
    ) {
        let folder = Folder::in_memory();
        let bytes: Vec<Vec<u8>> = lens
            .iter()
            .enumerate()
            .map(|(no, &len)| (0..len).map(|i| (i * 7 + no * 31) as u8).collect())
            .collect();
        let paths: Vec<PathBuf> = (0..lens.len()).map(|no| folder.path().join(no.to_string())).collect();
        for (path, bytes) in paths.iter().zip(&bytes) {
            fs::write(path, bytes).unwrap();
        }
        let mut content = VirtualFile::default();
        let mut last = 0;
        let mut ordered = true;
        for (kind, source, offset, len) in parts {
            let source = source % lens.len();
            match kind {
                0 => content.push_inline(vec![len as u8; len as usize % 300]).unwrap(),
                1 => content.push_zeros(len % 300).unwrap(),
                _ => {
                    let offset = offset % lens[source] as u64;
                    let len = len.min(lens[source] as u64 - offset);
                    if len > 0 {
                        ordered &= source >= last;
                        last = source;
                    }
                    content.push_source(source, offset, len).unwrap();
                }
            }
        }
        let wanted = naive(&content, &bytes);
        let open = || paths.iter().map(|path| Source::open(path).unwrap()).collect::<Vec<_>>();
        let output = |name: &str| ToWrite { path: folder.path().join(name), content: content.clone() };
        export::write(&[output("out")], &open(), false, verify, &mut Quiet).unwrap();
        prop_assert!(fs::read(folder.path().join("out")).unwrap() == wanted);
        if ordered {
            export::drain(&output("drained"), open(), verify, &mut Quiet).unwrap();
            prop_assert!(fs::read(folder.path().join("drained")).unwrap() == wanted);
            prop_assert_eq!(folder.names(), ["drained", "out"]);
        }
    }
}
