//! The machine's devices, without any: a stand-in for the CUDA driver, sysfs trees, and children that misbehave.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "gpu/amd.rs"]
mod amd;
#[path = "gpu/children.rs"]
mod children;
#[path = "gpu/sysfs.rs"]
mod sysfs;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Instant;

use ggufuse::gpu::DEADLINE;
use serde_json::Value;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Variables that choose devices; a test sets those it is about.
const CHOOSERS: [&str; 5] = [
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GGML_CUDA_DEVICES",
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
];

/// The folder with the stand-in, compiled once.
fn driver() -> &'static Path {
    static BUILT: OnceLock<TempDir> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/libcuda.c");
        compile(&source, dir.path());
        dir
    });
    dir.path()
}

/// Compiles `source` to a driver in `dir`, under both names that it is looked for by.
fn compile(source: &Path, dir: &Path) {
    let out = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&dir.join("libcuda.so"), source])
        .output()
        .expect("these tests need a C compiler, cc");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    fs::copy(dir.join("libcuda.so"), dir.join("libcuda.so.1")).unwrap();
}

/// A command whose driver is the stand-in, and nothing else that chooses devices.
fn ggufuse(args: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ggufuse"));
    command.args(args);
    for name in CHOOSERS {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", driver());
    command.envs(variables.iter().copied());
    command
}

fn json(out: &Output) -> Value {
    assert!(out.status.success(), "{out:?}");
    serde_json::from_slice(&out.stdout).unwrap()
}

/// What `ggufuse gpus --json` says with the stand-in and a root without AMD devices.
fn gpus(variables: &[(&str, &str)]) -> Value {
    let root = sysfs::Tree::new();
    let args = ["gpus", "--json", "--root", root.path().to_str().unwrap()];
    json(&ggufuse(&args, variables).output().unwrap())
}

fn column<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    value["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| &d[key])
        .collect()
}

/// The reason that `source` gives.
fn reason(value: &Value, source: &str) -> String {
    let reasons = value["reasons"].as_array().unwrap();
    let of = reasons.iter().find(|r| r["source"] == source);
    of.unwrap_or_else(|| panic!("no reason of {source} in {value:#}"))["text"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn devices_are_listed_as_the_driver_orders_them_with_memory_as_of_an_open_context() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let found = gpus(&[
        ("STANDIN_DEVICES", "3"),
        ("STANDIN_LOG", log.path().to_str().unwrap()),
    ]);
    assert_eq!(column(&found, "name"), ["CUDA0", "CUDA1", "CUDA2"]);
    let totals = [16 * GIB, 32 * GIB, 48 * GIB];
    assert_eq!(column(&found, "total"), totals);
    assert_eq!(
        column(&found, "free"),
        totals.map(|total| total - 512 * MIB)
    );
    assert_eq!(
        column(&found, "pci"),
        ["0000:a0:00.0", "0000:a1:00.0", "0000:a2:00.0"]
    );
    assert_eq!(column(&found, "integrated"), [false; 3]);
    assert_eq!(column(&found, "unified"), [false; 3]);
    assert_eq!(column(&found, "used"), [true; 3]);
    assert!(
        found["devices"][0]["found"]
            .as_str()
            .unwrap()
            .contains("12.8")
    );
    // As llama.cpp does it: all contexts are there before the first is measured. All are released.
    let calls = fs::read_to_string(log.path()).unwrap();
    let at = |call: &str| calls.lines().position(|line| line == call).expect(call);
    assert!(
        at("cuDevicePrimaryCtxRetain:2") < at("cuMemGetInfo_v2:0"),
        "{calls}"
    );
    for device in 0..3 {
        assert!(
            at(&format!("cuMemGetInfo_v2:{device}"))
                < at(&format!("cuDevicePrimaryCtxRelease_v2:{device}"))
        );
    }
}

#[test]
fn the_environment_chooses_devices() {
    let three = ("STANDIN_DEVICES", "3");
    let found = gpus(&[three, ("CUDA_VISIBLE_DEVICES", "2,0")]);
    assert_eq!(column(&found, "name"), ["CUDA0", "CUDA1"]);
    assert_eq!(column(&found, "pci"), ["0000:a2:00.0", "0000:a0:00.0"]);
    let found = gpus(&[three, ("CUDA_VISIBLE_DEVICES", "")]);
    assert!(column(&found, "name").is_empty());
    let why = reason(&found, "CUDA");
    assert!(
        why.contains("CUDA_ERROR_NO_DEVICE") && why.contains("CUDA_VISIBLE_DEVICES="),
        "{why}"
    );
    let found = gpus(&[("GGML_CUDA_DEVICES", "2")]);
    assert_eq!(column(&found, "total"), [8 * GIB; 2]);
    assert_eq!(column(&found, "free"), [8 * GIB - 256 * MIB; 2]);
}

#[test]
fn a_device_that_fails_is_listed_without_memory_and_says_why() {
    for (call, shown) in [
        (
            "cuDeviceGet:1",
            "cuDeviceGet: CUDA_ERROR_OUT_OF_MEMORY, out of memory",
        ),
        (
            "cuDevicePrimaryCtxRetain:1",
            "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            "cuCtxSetCurrent:1",
            "cuCtxSetCurrent: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            "cuMemGetInfo_v2:1",
            "cuMemGetInfo: CUDA_ERROR_OUT_OF_MEMORY",
        ),
    ] {
        let found = gpus(&[("STANDIN_DEVICES", "3"), ("STANDIN_FAIL", call)]);
        assert_eq!(
            column(&found, "name"),
            ["CUDA0", "CUDA1", "CUDA2"],
            "{call}"
        );
        assert_eq!(column(&found, "total"), [16 * GIB, 0, 48 * GIB], "{call}");
        assert_eq!(
            column(&found, "free"),
            [16 * GIB - 512 * MIB, 0, 48 * GIB - 512 * MIB],
            "{call}"
        );
        let problem = found["devices"][1]["problem"].as_str().unwrap();
        assert!(problem.starts_with(shown), "{call}: {problem}");
        assert_eq!(found["devices"][0]["problem"], Value::Null);
    }
    let found = gpus(&[("STANDIN_ODD", "1")]);
    assert_eq!(
        (column(&found, "free"), column(&found, "total")),
        (vec![&Value::from(0)], vec![&Value::from(0)])
    );
    assert!(
        found["devices"][0]["problem"]
            .as_str()
            .unwrap()
            .contains("cuMemGetInfo")
    );
}

#[test]
fn what_is_not_needed_may_fail() {
    for call in [
        "cuDeviceGetName",
        "cuDeviceGetPCIBusId",
        "cuDeviceGetAttribute",
        "cuDriverGetVersion",
        "cuDevicePrimaryCtxRelease_v2",
    ] {
        let found = gpus(&[("STANDIN_FAIL", call)]);
        assert_eq!(column(&found, "total"), [16 * GIB], "{call}");
        assert_eq!(column(&found, "problem"), [&Value::Null], "{call}");
    }
}

#[test]
fn a_driver_that_fails_crashes_or_talks_is_a_reason_and_no_error() {
    for (variable, call, shown) in [
        ("STANDIN_FAIL", "cuInit", "cuInit: CUDA_ERROR_OUT_OF_MEMORY"),
        (
            "STANDIN_FAIL",
            "cuDeviceGetCount",
            "cuDeviceGetCount: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        ("STANDIN_DEVICES", "0", "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("STANDIN_CRASH", "load", "SIGSEGV"),
        ("STANDIN_CRASH", "cuInit", "SIGSEGV"),
        ("STANDIN_CRASH", "cuMemGetInfo_v2", "SIGSEGV"),
        ("STANDIN_ABORT", "cuDevicePrimaryCtxRetain", "SIGABRT"),
    ] {
        let found = gpus(&[(variable, call)]);
        assert!(column(&found, "name").is_empty(), "{variable}={call}");
        let why = reason(&found, "CUDA");
        assert!(why.contains(shown), "{variable}={call}: {why}");
        // Nothing else is lost by it.
        assert!(found["host"]["total"].as_u64().unwrap() > 0);
    }
    let found = gpus(&[("STANDIN_ABORT", "cuInit")]);
    assert!(reason(&found, "CUDA").ends_with("driver: assertion failed"));
    for call in [
        "load",
        "cuInit",
        "cuMemGetInfo_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ] {
        let found = gpus(&[("STANDIN_NOISE", call)]);
        assert_eq!(column(&found, "total"), [16 * GIB], "{call}");
    }
}

#[test]
fn a_driver_that_hangs_costs_the_deadline_and_nothing_is_left_of_it() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let start = Instant::now();
    let found = gpus(&[
        ("STANDIN_HANG", "cuDevicePrimaryCtxRetain"),
        ("STANDIN_LOG", log.path().to_str().unwrap()),
    ]);
    let took = start.elapsed();
    assert!(took >= DEADLINE, "{took:?}");
    assert_eq!(reason(&found, "CUDA"), "no answer in time");
    let log = fs::read_to_string(log.path()).unwrap();
    let pid = log.lines().find_map(|line| line.strip_prefix("pid:"));
    // Reaped, not only killed.
    assert!(!Path::new("/proc").join(pid.unwrap()).exists());
    // What AMD has is known all the same; here that there is nothing.
    assert!(reason(&found, "ROCm").contains("no amdgpu device"));
}

#[test]
fn without_a_driver_or_with_a_broken_one_there_is_a_reason() {
    let (dir, root) = (tempfile::tempdir().unwrap(), sysfs::Tree::new());
    let args = ["gpus", "--json", "--root", root.path().to_str().unwrap()];
    let library = [("LD_LIBRARY_PATH", dir.path().to_str().unwrap())];
    let ask = || json(&ggufuse(&args, &library).output().unwrap());
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(dir.path().join(name), "not a library").unwrap();
    }
    assert!(reason(&ask(), "CUDA").contains("libcuda cannot be loaded"));
    // One that lacks what every driver has had for years.
    let source = dir.path().join("old.c");
    fs::write(&source, "int cuInit(unsigned flags) { return 0; }").unwrap();
    compile(&source, dir.path());
    let why = reason(&ask(), "CUDA");
    assert!(why.contains("Missing symbol cuDeviceGetCount"), "{why}");
}

#[test]
fn more_devices_than_llama_cpp_takes_are_left_out() {
    let found = gpus(&[("STANDIN_DEVICES", "20")]);
    assert_eq!(column(&found, "name").len(), 16);
    assert!(reason(&found, "CUDA").contains("more than the 16 devices"));
    // A count that cannot be.
    let found = gpus(&[("STANDIN_DEVICES", "2000000000")]);
    assert_eq!(column(&found, "name").len(), 16);
}

#[test]
fn an_integrated_device_has_what_the_host_has_and_is_not_used_beside_a_card() {
    let root = sysfs::Tree::new();
    root.meminfo("MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\nHugePages_Total: 0\n");
    let args = ["gpus", "--json", "--root", root.path().to_str().unwrap()];
    let ask = |variables: &[(&str, &str)]| json(&ggufuse(&args, variables).output().unwrap());
    let found = ask(&[("STANDIN_DEVICES", "2"), ("STANDIN_INTEGRATED", "0")]);
    assert_eq!(column(&found, "integrated"), [true, false]);
    assert_eq!(column(&found, "unified"), [true, false]);
    assert_eq!(column(&found, "free"), [40 * GIB, 32 * GIB - 512 * MIB]);
    assert_eq!(column(&found, "used"), [false, true]);
    let found = ask(&[("STANDIN_INTEGRATED", "0")]);
    assert_eq!(column(&found, "used"), [true]);
    let found = ask(&[("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1")]);
    assert_eq!(
        (column(&found, "integrated"), column(&found, "unified")),
        (vec![&Value::from(false)], vec![&Value::from(true)])
    );
    assert_eq!(column(&found, "free"), [40 * GIB]);
}

#[test]
fn the_table_shows_the_same_and_no_control_characters() {
    let root = sysfs::Tree::new();
    root.meminfo("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n");
    let args = ["gpus", "--root", root.path().to_str().unwrap()];
    let out = ggufuse(&args, &[("STANDIN_DEVICES", "2")])
        .output()
        .unwrap();
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        !text.chars().any(|c| c.is_control() && c != '\n'),
        "{text:?}"
    );
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[1][..4],
        ["CUDA0", "16384", "15872", "discrete"],
        "{text}"
    );
    assert_eq!(
        lines[2][..4],
        ["CUDA1", "32768", "32256", "discrete"],
        "{text}"
    );
    assert_eq!((lines[3][0], lines[3][2]), ("host", "1024"), "{text}");
    assert_eq!(lines[4][0], "ROCm:", "{text}");
}

#[test]
fn no_gpu_at_all_leaves_the_host() {
    let root = sysfs::Tree::new();
    root.meminfo("MemTotal: 1 kB\nMemAvailable: 512 kB\n");
    let args = ["gpus", "--json", "--root", root.path().to_str().unwrap()];
    let found = json(
        &ggufuse(&args, &[("STANDIN_DEVICES", "0")])
            .output()
            .unwrap(),
    );
    // As sysconf tells it, whatever /proc says: llama.cpp's rule.
    let pages = Command::new("getconf").arg("_PHYS_PAGES").output().unwrap();
    let size = Command::new("getconf").arg("PAGE_SIZE").output().unwrap();
    let number = |out: Output| {
        String::from_utf8(out.stdout)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    assert_eq!(found["host"]["total"], number(pages) * number(size));
    assert_eq!(found["host"]["available"], 512 * 1024);
    reason(&found, "ROCm");
}

#[test]
fn the_script_for_real_machines_holds_what_it_is_given_against_nvidia_smi() {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/check-gpu");
    let path = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    let check = |total: u64, free: u64| {
        let text = format!(
            "#!/bin/sh\necho '00000000:A0:00.0, Stand-in \u{1b}[31m0, {total}, {free}, Disabled'\n"
        );
        let smi = dir.path().join("nvidia-smi");
        fs::write(&smi, text).unwrap();
        fs::set_permissions(&smi, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(&script);
        command
            .arg(env!("CARGO_BIN_EXE_ggufuse"))
            .env("PATH", &path);
        for name in CHOOSERS {
            command.env_remove(name);
        }
        command.env("LD_LIBRARY_PATH", driver()).output().unwrap()
    };
    let out = check(16500, 16384);
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        text.contains("CUDA0") && text.contains("all checks hold"),
        "{text}"
    );
    assert_eq!(check(16500, 12000).status.code(), Some(1));
    assert_eq!(check(99999, 16384).status.code(), Some(1));
}
