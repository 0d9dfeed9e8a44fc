//! A whole machine: the units under a real systemd, the Debian package, a stick; each in namespaces with a layer over
//! this machine's files.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::GgufBuilder;

const BINARY: &str = env!("CARGO_BIN_EXE_ggufuse");

fn project(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// Only root can do this. Where a tool is missing CI fails, others go without.
fn can(tool: &str) -> bool {
    let there = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(tool).exists()));
    common::is_root() && (there || std::env::var_os("CI").is_some())
}

fn model(dir: &Path) -> PathBuf {
    let model = dir.join("m.gguf");
    GgufBuilder::sample(3, 40_000).write(&model);
    model
}

fn run(script: &str, args: &[&Path]) -> Output {
    let out = Command::new("bash")
        .arg(project(script))
        .args(args)
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    out
}

#[test]
fn the_units_hold_under_a_real_systemd() {
    if !can("systemctl") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    run("tests/systemd.sh", &[Path::new(BINARY), &model(dir.path())]);
}

#[test]
fn the_package_installs_works_and_leaves_nothing() {
    if !can("cargo-deb") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let built = run("contrib/packaging/build-deb", &[Path::new("dev")]);
    let package = String::from_utf8(built.stdout).unwrap();
    let out = run(
        "tests/layered.sh",
        &[
            &project("tests/package_check.sh"),
            Path::new(package.trim_end()),
            &model(dir.path()),
        ],
    );
    assert!(out.stdout.ends_with(b"done\n"));
}

#[test]
fn the_models_of_a_stick_come_and_go_with_it() {
    if !can("losetup") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = run(
        "tests/layered.sh",
        &[
            &project("tests/stick_check.sh"),
            Path::new(BINARY),
            &model(dir.path()),
        ],
    );
    assert!(out.stdout.ends_with(b"done\n"));
}
