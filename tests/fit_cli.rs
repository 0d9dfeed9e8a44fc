//! `ggufuse fit`: forms, exit codes, and lines that `xargs` and a shell read alike.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ggufuse::fit::{Device, Fraction, Line, Machine, Override, Place};
use proptest::prelude::*;
use serde_json::Value;

/// A sparse file with the header of a model of the oracle.
fn model(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(format!("{name}.gguf"));
    let (header, len) = oracle::header(name);
    std::fs::write(&path, header).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(len).unwrap();
    path
}

fn fit(model: &Path, args: &[&str]) -> Output {
    let mut words = vec!["fit", model.to_str().unwrap()];
    words.extend(args);
    common::ggufuse(&words)
}

fn stdout(out: &Output) -> String {
    String::from_utf8(out.stdout.clone()).unwrap()
}

#[test]
fn the_line_is_the_peers_form() {
    let dir = tempfile::tempdir().unwrap();
    let llama = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    // Rows of the oracle, word for word.
    let place = oracle::place("llama-3.1-8b-instruct.Q4_K_M");
    let rows = oracle::rows("decisions.jsonl.zst").into_iter();
    for row in rows.filter(|row| row.model == place && row.id % 16 == 0) {
        let devices = row.free.iter().enumerate();
        let devices: Vec<String> = devices
            .map(|(i, free)| format!("--device=CUDA{i}={free}/{}", free + (512 << 20)))
            .collect();
        let mut args: Vec<&str> = row.args.split_whitespace().collect();
        args.extend(devices.iter().map(String::as_str));
        args.push(if row.kv_unified {
            "--kv-unified"
        } else {
            "--no-kv-unified"
        });
        let out = fit(&llama, &args);
        match row.line() {
            Some(line) => assert_eq!(stdout(&out), format!("{line}\n"), "{args:?}"),
            None => assert!(out.stdout.is_empty() && !out.status.success(), "{args:?}"),
        }
    }
}

#[test]
fn json_and_print_tell_bytes_and_mebibytes() {
    let dir = tempfile::tempdir().unwrap();
    let llama = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    let device = "--device=CUDA0=24GiB";
    let out = fit(&llama, &["-c", "8192", device, "--json", "--measure"]);
    assert_eq!(out.status.code(), Some(0));
    let json: Value = serde_json::from_str(&stdout(&out)).unwrap();
    let first = &json["devices"][0];
    assert_eq!(first["name"], "CUDA0");
    assert_eq!(first["free"], 24u64 << 30);
    assert_eq!(first["total"], 24u64 << 30);
    assert_eq!(first["context"], 1u64 << 30);
    assert_eq!(json["n_ctx"], 8192);
    assert_eq!(json["flash_attn"], true);
    assert_eq!(json["fits"], true);
    let mib = |v: &Value| v.as_u64().unwrap() >> 20;
    let row = |name: &str, b: &Value| {
        format!(
            "{name} {} {} {} \n",
            mib(&b["model"]),
            mib(&b["context"]),
            mib(&b["compute"])
        )
    };
    let print = fit(&llama, &["-c", "8192", device, "--print"]);
    assert_eq!(
        stdout(&print),
        row("CUDA0", first) + &row("Host", &json["host"])
    );
    // Without --measure it is about the parameters that were found.
    let out = fit(&llama, &["--device=CUDA0=6GiB", "--json"]);
    let json: Value = serde_json::from_str(&stdout(&out)).unwrap();
    let line = json["line"].as_str().unwrap();
    assert!(
        line.starts_with(&format!("-c {} -ngl ", json["n_ctx"])),
        "{line}"
    );
}

#[test]
fn exit_codes_are_the_documented_ones() {
    let dir = tempfile::tempdir().unwrap();
    let llama = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    let code = |args: &[&str]| fit(&llama, args).status.code().unwrap();
    let device = "--device=CUDA0=24GiB";
    assert_eq!(code(&[device]), 0);
    // The user has set what would have to change.
    assert_eq!(code(&["-ngl", "99", "--device=CUDA0=1GiB"]), 3);
    let out = fit(&llama, &["-ngl", "99", "--device=CUDA0=1GiB", "--report"]);
    assert_eq!(out.status.code(), Some(3));
    assert!(stdout(&out).contains("CUDA0 lacks"), "{}", stdout(&out));
    // llama.cpp refuses the combination.
    assert_eq!(code(&["-fa", "off", "-ctv", "q8_0", device]), 1);
    for usage in [
        &["-c", "x", device][..],
        &["-ot", "a=CUDA7", device],
        &["-ot", "(=CPU", device],
        &["-sm", "row", device],
        &["-ctk", "q2_k", device],
        &["--device", "CUDA0"],
        &["--measure", device],
        &["--device=CUDA0=1GiB", "--device=CUDA0=1GiB"],
    ] {
        assert_eq!(code(usage), 2, "{usage:?}");
    }
    let bad = dir.path().join("bad.gguf");
    common::GgufBuilder::sample(2, 8).write(&bad);
    let out = fit(&bad, &[device]);
    assert_eq!(out.status.code(), Some(4));
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(error.contains("llama.context_length"), "{error}");
}

#[test]
fn host_memory_is_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let llama = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    let report = |host: &str| {
        let args = ["-c", "65536", "--device=CUDA0=4GiB", host, "--report"];
        stdout(&fit(&llama, &args))
    };
    assert!(report("--device=CPU=64GiB").contains("the host has room"));
    assert!(report("--device=CPU=8GiB").contains("without mmap they do not fit"));
    assert!(report("--device=CPU=1GiB").contains("the host lacks"));
}

/// Model, context and compute of the first device, with the parameters as given.
fn first_device(model: &Path, args: &[&str]) -> [u64; 3] {
    let all = [
        args,
        &["-c", "8192", "--device=CUDA0=400GiB", "--json", "--measure"],
    ]
    .concat();
    let out = fit(model, &all);
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{args:?}: {error}");
    let json: Value = serde_json::from_str(&stdout(&out)).unwrap();
    ["model", "context", "compute"].map(|term| json["devices"][0][term].as_u64().unwrap())
}

#[test]
fn a_draft_model_and_mtp_layers_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let large = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    let small = model(dir.path(), "llama-3.2-1b-instruct.Q4_K_M");
    let (one, other) = (first_device(&large, &[]), first_device(&small, &[]));
    let both = first_device(&large, &["-md", small.to_str().unwrap()]);
    assert_eq!(both[0], one[0] + other[0]);
    assert_eq!(both[1], one[1] + other[1]);
    // A draft needs one row of logits, not a batch of them.
    assert!(one[2] < both[2] && both[2] < one[2] + other[2], "{both:?}");
    let nextn = model(dir.path(), "glm-4.5-air.Q4_K_M");
    let (without, with) = (
        first_device(&nextn, &[]),
        first_device(&nextn, &["--spec-type", "draft-mtp"]),
    );
    assert!(
        (0..3).all(|term| without[term] < with[term]),
        "{without:?} {with:?}"
    );
}

#[test]
fn a_projector_widens_the_margin_of_the_first_device() {
    let dir = tempfile::tempdir().unwrap();
    let llama = model(dir.path(), "llama-3.1-8b-instruct.Q4_K_M");
    let projector = dir.path().join("mmproj.gguf");
    let mut gguf = common::GgufBuilder::sample(1, 16 << 20);
    let text = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    gguf.kvs = vec![common::kv("general.architecture", 8, &text("clip"))];
    gguf.write(&projector);
    let context = |args: &[&str]| {
        let all = [args, &["--device=CUDA0=8GiB"]].concat();
        let line = stdout(&fit(&llama, &all));
        line.split(' ').nth(1).unwrap().parse::<u32>().unwrap()
    };
    assert!(context(&["--mmproj", projector.to_str().unwrap()]) < context(&[]));
    let out = fit(
        &llama,
        &["--mmproj", llama.to_str().unwrap(), "--device=CUDA0=8GiB"],
    );
    assert_eq!(out.status.code(), Some(4), "a model is no projector");
}

/// What a program is called with.
fn words_of(shell: &mut Command, input: &[u8]) -> Vec<u8> {
    let mut child = shell
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    out.stdout
}

/// Words, each ended by a zero byte, as `xargs`, and as a shell's `eval`, read a line.
fn both_readings(line: &[u8]) -> [Vec<u8>; 2] {
    let print = r"printf '%s\0' ";
    let script = [print.as_bytes(), line].concat();
    let xargs = words_of(Command::new("xargs").args(["printf", r"%s\0"]), line);
    let eval = words_of(
        Command::new("sh").args(["-c", r#"IFS= read -r line; eval "$line""#]),
        &script,
    );
    [xargs, eval]
}

fn line() -> (Line, Machine) {
    let device = |i| Device {
        name: format!("CUDA{i}"),
        free: 1 << 30,
        total: 1 << 30,
    };
    let line = Line {
        n_ctx: 4096,
        n_gpu_layers: 33,
        tensor_split: vec![20.0, 13.0],
        overrides: vec![
            Override::overflow(Some(3), Fraction::Up, Place::Device(1)),
            Override::overflow(Some(4), Fraction::Moe, Place::Host),
        ],
    };
    let machine = Machine {
        devices: (0..2).map(device).collect(),
        host: None,
    };
    (line, machine)
}

fn assert_both_read(path: &[u8]) {
    let (line, machine) = line();
    let written = line.command(path, &machine).unwrap();
    let ot =
        r"blk\.3\.ffn_(gate|gate_up|down).*=CUDA1,blk\.4\.ffn_(up|down|gate_up|gate)_(ch|)exps=CPU";
    let rest = ["-c", "4096", "-ngl", "33", "-ts", "20,13", "-ot", ot];
    let words = [b"-m", path]
        .into_iter()
        .chain(rest.iter().map(|w| w.as_bytes()));
    let wanted: Vec<u8> = words.flat_map(|w| [w, b"\0"].concat()).collect();
    for read in both_readings(&written) {
        let show = |bytes: &[u8]| OsStr::from_bytes(bytes).to_string_lossy().into_owned();
        assert_eq!(read, wanted, "{}: {}", show(&written), show(&read));
    }
}

#[test]
fn xargs_and_a_shell_read_the_same_words() {
    for path in [
        &b"/models/plain.gguf"[..],
        b"/a b/c  d.gguf",
        b"/it's/\"quoted\".gguf",
        b"/$HOME/`id`/$(id)/\\n/\\\\/!!.gguf",
        b"/end\\",
        b"/\\\"",
        b"/tab\there/*?[a]/~/{a,b}/#x;y&z|<>()",
        b"/\xff\xfe/not-utf8",
        b"/'''",
        b"-m",
    ] {
        assert_both_read(path);
    }
    let (line, machine) = line();
    assert!(line.command(b"/new\nline", &machine).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_path_is_read_back(path in "[ -~\\t'\"\\\\$`!]{1,40}") {
        assert_both_read(path.as_bytes());
    }
}
