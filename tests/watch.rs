//! What a mount says about itself: metrics, statistics, the log.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use common::{GgufBuilder, ggufuse};
use serde_json::Value;

/// A mount in the foreground whose log is read.
struct Watched {
    daemon: Child,
    log: BufReader<ChildStderr>,
    point: tempfile::TempDir,
}

impl Watched {
    fn new(model: &Path, options: &[&str]) -> Watched {
        let point = tempfile::tempdir().unwrap();
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_ggufuse"))
            .args(["mount", "--foreground", "--view", "merged"])
            .args(options)
            .args([model, point.path()])
            .stderr(Stdio::piped())
            .env_remove("RUST_LOG")
            .spawn()
            .unwrap();
        let log = BufReader::new(daemon.stderr.take().unwrap());
        Watched { daemon, log, point }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.log.read_line(&mut line).unwrap() > 0, "no more lines");
        line
    }

    /// The first line that has `text`.
    fn line_with(&mut self, text: &str) -> String {
        loop {
            let line = self.line();
            if line.contains(text) {
                return line;
            }
        }
    }

    fn wait(&self) {
        let start = Instant::now();
        while fs::read_dir(self.point.path()).unwrap().count() == 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "not mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it; the rest of its log.
    fn end(mut self) -> String {
        let mut rest = String::new();
        let point = self.point.path().to_str().unwrap().to_owned();
        assert!(ggufuse(&["unmount", "--lazy", &point]).status.success());
        self.log.read_to_string(&mut rest).unwrap();
        assert!(self.daemon.wait().unwrap().success());
        rest
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        drop(self.daemon.kill());
        drop(self.daemon.wait());
        drop(ggufuse(&[
            "unmount",
            "--lazy",
            self.point.path().to_str().unwrap(),
        ]));
    }
}

fn ask(address: &str, request: &str) -> String {
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

/// The metrics by name and labels; each line is of the text format.
fn metrics(address: &str) -> HashMap<String, f64> {
    let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())));
    let mut typed = Vec::new();
    let mut values = HashMap::new();
    for line in body.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            typed.push(kind.split_once(' ').unwrap().0.to_owned());
        } else if !line.starts_with("# HELP ") {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let family = typed.last().unwrap();
            assert!(name.starts_with(family.as_str()), "{line} after {family}");
            assert!(
                values
                    .insert(name.to_owned(), value.parse().unwrap())
                    .is_none(),
                "{name} twice"
            );
        }
    }
    values
}

fn model(dir: &Path) -> std::path::PathBuf {
    let model = dir.join("m.gguf");
    GgufBuilder::sample(3, 10_000).write(&model);
    model
}

#[test]
fn metrics_count_what_was_done() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut mount = Watched::new(&model, &["--metrics", "0"]);
    let line = mount.line_with("metrics at http://127.0.0.1:");
    let address = line.trim().rsplit_once("http://").unwrap().1;
    let address = address.strip_suffix("/metrics").unwrap().to_owned();
    mount.wait();
    let view = mount.point.path().join("m.gguf");
    let before = metrics(&address);
    assert_eq!(before["ggufuse_models{state=\"served\"}"], 1.0);
    assert_eq!(before["ggufuse_read_duration_seconds_count"], 0.0);
    assert!(before["ggufuse_device_memory_total_bytes{device=\"host\",description=\"\"}"] > 1e6);
    let size = fs::metadata(&model).unwrap().len();
    for _ in 0..3 {
        assert_eq!(fs::read(&view).unwrap().len() as u64, size);
    }
    let open = fs::File::open(&view).unwrap();
    let after = metrics(&address);
    assert_eq!(after["ggufuse_read_bytes_total"], 3.0 * size as f64);
    assert_eq!(after["ggufuse_opens_total"], 4.0);
    assert_eq!(after["ggufuse_open_handles"], 1.0);
    let reads = after["ggufuse_read_duration_seconds_count"];
    assert!(reads >= 3.0);
    assert_eq!(
        after["ggufuse_read_duration_seconds_bucket{le=\"+Inf\"}"],
        reads
    );
    assert!(after["ggufuse_read_duration_seconds_sum"] > 0.0);
    // A source that is cut is an error of its own, and a change.
    fs::File::options()
        .write(true)
        .open(&model)
        .unwrap()
        .set_len(100)
        .unwrap();
    let mut buffer = [0; 4096];
    let error = std::os::unix::fs::FileExt::read_at(&open, &mut buffer, 50_000).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    fs::File::open(&view).unwrap_err();
    let end = metrics(&address);
    // The kernel tries an open again that was told so.
    let errors = end["ggufuse_errors_total{errno=\"ESTALE\"}"];
    assert!((2.0..=3.0).contains(&errors), "{errors}");
    assert!(end["ggufuse_source_changes_total"] >= 1.0);
    assert_eq!(end["ggufuse_models{state=\"refused\"}"], 1.0);
    drop(open);
    // The same through the mount.
    let out = ggufuse(&["status", "--json", mount.point.path().to_str().unwrap()]);
    let status: Value = serde_json::from_slice(&out.stdout).unwrap();
    let stale = format!("errors_errno_{}", libc::ESTALE);
    assert_eq!(status[0]["stats"]["errors"], errors as u64);
    assert_eq!(status[0]["stats"][stale], errors as u64);
    assert_eq!(status[0]["stats"]["opens"], 4);
}

#[test]
fn other_requests_are_refused_and_slow_clients_do_not_keep_others_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut mount = Watched::new(&model(dir.path()), &["-o", "metrics=127.0.0.1:0"]);
    let line = mount.line_with("metrics at http://");
    let address = line.trim().rsplit_once("http://").unwrap().1;
    let address = address.strip_suffix("/metrics").unwrap();
    mount.wait();
    assert!(ask(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(ask(address, "\r\n\r\n").starts_with("HTTP/1.1 405 "));
    let mut endless = TcpStream::connect(address).unwrap();
    let chunk = [b'x'; 1 << 16];
    let sent = (0..1000)
        .take_while(|_| endless.write_all(&chunk).is_ok())
        .count();
    assert!(sent < 1000, "it reads on without end");
    let silent = TcpStream::connect(address).unwrap();
    assert!(metrics(address).len() > 10);
    drop(silent);
    // Taken already.
    let out = ggufuse(&[
        "mount",
        "--metrics",
        address,
        dir.path().join("m.gguf").to_str().unwrap(),
        tempfile::tempdir().unwrap().path().to_str().unwrap(),
    ]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains(address));
}

#[test]
fn errors_are_logged_as_json_with_path_and_offset_and_not_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let mut mount = Watched::new(&model, &["--log-format", "json"]);
    let first: Value = serde_json::from_str(&mount.line_with("serving")).unwrap();
    assert_eq!(first["level"], "info");
    assert!(first["time"].as_str().unwrap().ends_with('Z'));
    mount.wait();
    let open = fs::File::open(mount.point.path().join("m.gguf")).unwrap();
    fs::File::options()
        .write(true)
        .open(&model)
        .unwrap()
        .set_len(100)
        .unwrap();
    let mut buffer = [0; 4096];
    for _ in 0..1000 {
        std::os::unix::fs::FileExt::read_at(&open, &mut buffer, 50_000).unwrap_err();
    }
    drop(open);
    let rest = mount.end();
    let lines: Vec<Value> = rest
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let reads: Vec<&Value> = lines
        .iter()
        .filter(|line| line["operation"] == "read")
        .collect();
    assert!((50..200).contains(&reads.len()), "{} lines", reads.len());
    assert_eq!(reads[0]["path"], "m.gguf");
    assert_eq!(reads[0]["offset"], 50_000);
    assert_eq!(reads[0]["errno"], libc::ESTALE);
    assert_eq!(reads[0]["level"], "warn");
}

#[test]
fn the_journal_gets_levels() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let point = tempfile::tempdir().unwrap();
    let out = Command::new("sh")
        .args([
            "-c",
            r#"exec 2>"$1/log"; export JOURNAL_STREAM=$(stat -Lc %d:%i /proc/self/fd/2); "$2" mount -f "$3" "$4" --log-format "$5""#,
            "sh",
        ])
        .args([dir.path(), Path::new(env!("CARGO_BIN_EXE_ggufuse")), &model, point.path()])
        .arg("text")
        .stdout(Stdio::null())
        .spawn();
    let mut daemon = out.unwrap();
    let start = Instant::now();
    while fs::read_dir(point.path()).unwrap().count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "not mounted");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        ggufuse(&["unmount", point.path().to_str().unwrap()])
            .status
            .success()
    );
    assert!(daemon.wait().unwrap().success());
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(
        log.starts_with(&format!("<6>{}: serving", model.display())),
        "{log}"
    );
}
