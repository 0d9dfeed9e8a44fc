//! The units under a real systemd, booted in namespaces with a layer over this machine's files.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::Path;
use std::process::Command;

#[test]
fn the_units_hold_under_a_real_systemd() {
    // Only root can boot one. Where there is none at all, CI fails, others go without.
    let there = Path::new("/lib/systemd/systemd").exists();
    if !common::is_root() || (!there && std::env::var_os("CI").is_none()) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/systemd.sh");
    let out = Command::new("bash")
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_ggufuse"))
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}
