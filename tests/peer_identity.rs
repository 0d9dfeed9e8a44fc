//! Views through a real mount, byte for byte what the real `llama-gguf-split` writes, in both directions.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

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

fn cmp(a: &Path, b: &Path) {
    let out = Command::new("cmp").arg(a).arg(b).output().unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stdout)
    );
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
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
