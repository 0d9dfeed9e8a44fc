//! `fit-args` and `fit-report` in a mount.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{GgufBuilder, Mounted, ggufuse};

/// A sparse file with the header of a model of the oracle.
fn model(path: PathBuf, name: &str) -> PathBuf {
    let (header, len) = oracle::header(name);
    fs::write(&path, header).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(len).unwrap();
    path
}

const LLAMA: &str = "llama-3.1-8b-instruct.Q4_K_M";

fn read(mount: &Mounted, name: &str) -> String {
    fs::read_to_string(mount.path().join(name)).unwrap()
}

/// The words of a line, as `xargs` and as a shell's `eval` read them: the same.
fn words(file: &Path) -> Vec<String> {
    let read = |script: &str| {
        let out = Command::new("sh")
            .args(["-ec", script, "sh"])
            .arg(file)
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
        out.stdout
    };
    let xargs = read(r#"xargs printf '%s\0' < "$1""#);
    let eval = read(r#"eval "printf '%s\0' $(cat "$1")""#);
    assert_eq!(xargs, eval);
    let text = String::from_utf8(xargs).unwrap();
    text.trim_end_matches('\0')
        .split('\0')
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_line_is_that_of_the_verb_with_the_path_of_the_view() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path().join("a $b 'c' \"d\" \\e.gguf"), LLAMA);
    let devices = ["--fit-device", "CUDA0=3GiB", "--fit-device", "CUDA1=3GiB"];
    for (view, name) in [
        ("merged", "a $b 'c' \"d\" \\e.gguf"),
        ("shards", "a $b 'c' \"d\" \\e-00001-of-00003.gguf"),
    ] {
        let options = [&["--view", view][..], &devices].concat();
        let mount = Mounted::new(&source, &options);
        let args = mount.path().join("fit-args");
        let words = words(&args);
        let path = mount.path().join(name);
        assert!(path.exists(), "{path:?}");
        assert_eq!(
            words[..2],
            ["-m".to_owned(), path.to_str().unwrap().to_owned()]
        );
        // The verb, told what a server assumes.
        let out = ggufuse(&[
            "fit",
            source.to_str().unwrap(),
            "-np",
            "4",
            "-kvu",
            "--device",
            "CUDA0=3GiB",
            "--device",
            "CUDA1=3GiB",
        ]);
        let line = String::from_utf8(out.stdout).unwrap();
        assert_eq!(words[2..].join(" "), line.trim_end().replace('"', ""));
        let size = fs::metadata(&args).unwrap().len();
        assert_eq!(
            size,
            fs::read(&args).unwrap().len() as u64,
            "stat shows what was read last"
        );
        let report = read(&mount, "fit-report");
        assert!(report.contains("4 sequences, one cache"), "{report}");
        assert!(
            report.contains("this fits") && report.contains("CUDA1"),
            "{report}"
        );
        mount.unmount();
    }
}

#[test]
fn what_does_not_fit_is_enomem_and_the_report_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path().join("m.gguf"), LLAMA);
    let mount = Mounted::new(
        &source,
        &["-o", "fit-device=CUDA0=1GiB,fit-ngl=33,view=merged"],
    );
    let error = fs::read(mount.path().join("fit-args")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    let report = read(&mount, "fit-report");
    assert!(
        report.contains("n_gpu_layers already set by user to 33"),
        "{report}"
    );
    assert!(report.contains("CUDA0 lacks"), "{report}");
    mount.unmount();
}

#[test]
fn flags_that_the_server_has_to_know_are_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path().join("m.gguf"), LLAMA);
    let mount = Mounted::new(
        &source,
        &[
            "--fit-device",
            "CUDA0=24GiB",
            "--fit-ctk",
            "q8_0",
            "--fit-np",
            "2",
            "-o",
            "fit-fa=on,fit-fitt=512,fit-c=9000",
        ],
    );
    let words = words(&mount.path().join("fit-args")).join(" ");
    let (_, rest) = words.split_once(" -c ").unwrap();
    assert_eq!(
        rest,
        "9000 -ngl -1 --cache-type-k q8_0 --parallel 2 --flash-attn on"
    );
    mount.unmount();
}

#[test]
fn flags_that_make_no_sense_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&source);
    let point = tempfile::tempdir().unwrap();
    let (source, point) = (source.to_str().unwrap(), point.path().to_str().unwrap());
    for bad in [
        &["--fit-c", "x"][..],
        &["--fit-device", "CUDA0"],
        &["--fit-ctk", "q2_k"],
        &["--fit-spec-type", "ngram"],
        &["-o", "fit-c"],
        &["-o", "fit-kvu=1"],
        &["-o", "fit-nonsense=1"],
    ] {
        let out = ggufuse(&[&["mount", source, point], bad].concat());
        assert_eq!(out.status.code(), Some(2), "{bad:?}");
    }
}

#[test]
fn a_model_without_the_keys_is_shown_and_its_report_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("m.gguf");
    GgufBuilder::sample(2, 100).write(&source);
    let mount = Mounted::new(&source, &["--view", "merged"]);
    let error = fs::read(mount.path().join("fit-args")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let report = read(&mount, "fit-report");
    assert!(report.contains("llama.context_length"), "{report}");
    mount.unmount();
}

#[test]
fn a_handle_keeps_its_line_when_the_model_changes() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path().join("m.gguf"), LLAMA);
    let mount = Mounted::new(
        &source,
        &["--view", "merged", "--fit-device", "CUDA0=24GiB"],
    );
    let args = mount.path().join("fit-args");
    let before = fs::read_to_string(&args).unwrap();
    let mut open = fs::File::open(&args).unwrap();
    let other = model(dir.path().join("next"), "gemma-3-1b-it.Q4_K_M");
    fs::rename(other, &source).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while fs::read_to_string(&args).unwrap_or_default() == before {
        assert!(
            std::time::Instant::now() < deadline,
            "still the line of the old model"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let mut kept = String::new();
    open.read_to_string(&mut kept).unwrap();
    assert_eq!(kept, before);
    drop(open);
    mount.unmount();
}

#[test]
fn a_projector_beside_the_model_is_passed_on_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    model(
        dir.path().join("gemma-3-4b-it-Q4_K_M.gguf"),
        "gemma-3-4b-it.Q4_K_M",
    );
    let options = [
        "--view",
        "merged",
        "--fit-device",
        "CUDA0=8GiB",
        "--fit-c",
        "8192",
    ];
    let alone = Mounted::new(dir.path(), &options);
    let report = |mount: &Mounted| {
        let text = read(mount, "fit-report");
        let row = text
            .lines()
            .find(|line| line.starts_with("CUDA0"))
            .unwrap()
            .to_owned();
        let margin = row.split_whitespace().last().unwrap().to_owned();
        margin.parse::<u64>().unwrap()
    };
    assert_eq!(report(&alone), 1024);
    alone.unmount();
    // 64 MiB of vision tensors.
    let mut projector = GgufBuilder::sample(0, 0);
    projector.kvs = vec![common::kv(
        "general.architecture",
        8,
        &[4u64.to_le_bytes().as_slice(), b"clip"].concat(),
    )];
    projector
        .tensors
        .push(("v.weight".into(), vec![16 << 20], 0, vec![0; 64 << 20]));
    projector.write(&dir.path().join("mmproj-gemma-3-4b-it-F32.gguf"));
    let both = Mounted::new(dir.path(), &options);
    let words = words(&both.path().join("fit-args"));
    let at = words.iter().position(|word| word == "--mmproj").unwrap();
    assert_eq!(
        words[at + 1],
        both.path()
            .join("mmproj-gemma-3-4b-it-F32.gguf")
            .to_str()
            .unwrap()
    );
    assert_eq!(report(&both), 1024 + 64);
    both.unmount();
}
