//! Views through a real mount, byte for byte what the real `llama-gguf-split` writes, in both directions.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Mounted, ggufuse, peers};

fn tool(peers: &Path, args: &[&str], input: &Path, output: &Path) -> String {
    let out = Command::new(peers.join("bin/llama-gguf-split"))
        .args(args)
        .arg(input)
        .arg(output)
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "llama-gguf-split {args:?} {input:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

/// Byte for byte, in this process: thousands of small files are compared here.
fn cmp(a: &Path, b: &Path) {
    let (mut left, mut right) = (File::open(a).unwrap(), File::open(b).unwrap());
    let len = left.metadata().unwrap().len();
    assert_eq!(
        len,
        right.metadata().unwrap().len(),
        "length of {a:?} and {b:?}"
    );
    let (mut x, mut y) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut at = 0;
    while at < len {
        let n = (len - at).min(1 << 20) as usize;
        left.read_exact(&mut x[..n]).unwrap();
        right.read_exact(&mut y[..n]).unwrap();
        assert!(
            x[..n] == y[..n],
            "{a:?} and {b:?} differ in bytes {at} to {}",
            at + n as u64
        );
        at += n as u64;
    }
}

/// The GGUF files of a folder.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    files
}

/// Splits with the tool and with a mount, compares plan lines and every shard; then merges both ways.
fn round_trip(peers: &Path, model: &Path, options: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let stem = model.file_stem().unwrap();
    let printed = tool(
        peers,
        &[&["--split"], options].concat(),
        model,
        &dir.path().join(stem),
    );
    let shards = files(dir.path());
    let plan = ggufuse(&[&["plan", model.to_str().unwrap()], options].concat());
    let plan = String::from_utf8(plan.stdout).unwrap();
    let theirs: Vec<&str> = printed
        .lines()
        .filter(|l| l.starts_with("n_split") || l.starts_with("split "))
        .collect();
    assert_eq!(
        plan.lines().collect::<Vec<_>>(),
        theirs,
        "plan of {model:?} {options:?}"
    );

    let split = Mounted::new(model, options);
    let ours = files(split.path());
    assert_eq!(ours.len(), shards.len(), "{model:?} {options:?}");
    for (ours, theirs) in ours.iter().zip(&shards) {
        assert_eq!(ours.file_name(), theirs.file_name());
        cmp(ours, theirs);
    }
    split.unmount();

    // Back: the tool's merge of its shards against our view of them, named by their last member.
    let merged = dir.path().join("merged.out");
    tool(peers, &["--merge"], &shards[0], &merged);
    let back = Mounted::new(shards.last().unwrap(), &["--view", "merged"]);
    cmp(&back.path().join(model.file_name().unwrap()), &merged);
    back.unmount();
    let clean = Mounted::new(&shards[0], &["--view", "merged", "--headers", "clean"]);
    let mut original = std::fs::read(model).unwrap();
    // What is written is always version 3, whatever was read.
    original[4] = 3;
    let cleaned = std::fs::read(clean.path().join(model.file_name().unwrap())).unwrap();
    // The original's own padding at the end is optional; everything else comes back as it was.
    assert!(
        cleaned.starts_with(&original) && cleaned.len() - original.len() < 32,
        "{model:?} does not come back"
    );
    clean.unmount();
}

#[test]
fn gemma_with_several_limits() {
    let peers = peers();
    let model = peers.join("gemma.gguf");
    for options in [
        &[][..],
        &["--split-max-tensors", "50"],
        &["--split-max-tensors", "100", "--no-tensor-first-split"],
    ] {
        round_trip(&peers, &model, options);
    }
    // The first tensor is larger than the limit: the tool gives up there, we give it a shard of its own.
    let mount = Mounted::new(&model, &["--split-max-size", "60M"]);
    assert!(mount.names().len() > 2);
    mount.unmount();
}

#[test]
fn every_vocabulary_of_the_peer() {
    let peers = peers();
    let models = files(&peers.join("vocab"));
    assert!(models.len() >= 15, "only {} vocabularies", models.len());
    for model in models {
        round_trip(&peers, &model, &[]);
    }
}

/// The tool gives up when the first tensor alone is over the size limit: it would have to leave a shard empty. A view
/// gives that tensor a shard of its own.
fn first_tensor_over_the_limit(peers: &Path, model: &Path, options: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new(peers.join("bin/llama-gguf-split"))
        .arg("--split")
        .args(options)
        .arg(model)
        .arg(dir.path().join("out"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && said.contains("one of splits have 0 tensors"),
        "{model:?} {options:?}: {:?} {said}",
        out.status
    );
    let split = Mounted::new(model, options);
    let shards = files(split.path());
    let alone = usize::from(options.contains(&"--no-tensor-first-split"));
    let sizes: Vec<usize> = shards
        .iter()
        .map(|shard| {
            let header = ggufuse::gguf::parse(std::fs::read(shard).unwrap(), u64::MAX);
            header.unwrap().tensors().len()
        })
        .collect();
    assert_eq!(sizes[alone], 1, "{model:?} {options:?}: {sizes:?}");
    // No tool has written these shards, so the way back is the check: it must be the model again.
    let back = Mounted::new(&shards[0], &["--view", "merged", "--headers", "clean"]);
    cmp(&back.path().join(model.file_name().unwrap()), model);
    back.unmount();
    split.unmount();
}

/// Models as llama.cpp loads them, of all architectures that its own test can make up.
#[test]
fn tiny_models_of_a_hundred_architectures() {
    const LIMITED: [(&[&str], u64); 3] = [
        (&["--split-max-size", "1M"], 1_000_000),
        (&["--split-max-tensors", "7"], u64::MAX),
        (
            &["--split-max-size", "2M", "--no-tensor-first-split"],
            2_000_000,
        ),
    ];
    let peers = peers();
    let models = files(&peers.join("archs"));
    let (next, oversized) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let one = |model: &Path| {
        let header = ggufuse::model::load(model).unwrap().headers.remove(0);
        let first = header.tensors()[0].len.next_multiple_of(32);
        for (options, limit) in LIMITED {
            if first > limit {
                oversized.fetch_add(1, Ordering::Relaxed);
                first_tensor_over_the_limit(&peers, model, options);
            } else {
                round_trip(&peers, model, options);
            }
        }
        let arch = header.get(b"general.architecture").unwrap();
        arch.str_bytes().unwrap().to_vec()
    };
    let work = || {
        let mut archs = BTreeSet::new();
        while let Some(model) = models.get(next.fetch_add(1, Ordering::Relaxed)) {
            archs.insert(one(model));
        }
        archs
    };
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    let archs: BTreeSet<Vec<u8>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        running
            .into_iter()
            .flat_map(|w| w.join().unwrap())
            .collect()
    });
    assert!(archs.len() >= 100, "only {} architectures", archs.len());
    let oversized = oversized.into_inner();
    assert!(
        oversized * 10 < models.len() * LIMITED.len(),
        "{oversized} cases have no files of the tool to compare with"
    );
}

#[test]
fn small_models_with_odd_sizes() {
    let peers = peers();
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("odd name.gguf");
    common::GgufBuilder::sample(23, 90_001).write(&model);
    for options in [
        &["--split-max-tensors", "1"][..],
        &["--split-max-tensors", "7"],
        &["--split-max-size", "1M"],
        &["--split-max-size", "1M", "--no-tensor-first-split"],
        &["--split-max-tensors", "5", "--no-tensor-first-split"],
    ] {
        round_trip(&peers, &model, options);
    }
}

#[test]
fn the_tool_merges_our_virtual_shards() {
    let peers = peers();
    let model = peers.join("gemma.gguf");
    let mount = Mounted::new(&model, &["--split-max-tensors", "40"]);
    let dir = tempfile::tempdir().unwrap();
    let merged = dir.path().join("merged.gguf");
    tool(&peers, &["--merge"], &files(mount.path())[0], &merged);
    mount.unmount();
    let clean = Mounted::new(&merged, &["--view", "merged", "--headers", "clean"]);
    cmp(&clean.path().join("merged.gguf"), &model);
    clean.unmount();
}
