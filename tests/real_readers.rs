//! Unmodified readers take our views: llama.cpp answers exactly as from the source file, its Python package sees the
//! same keys and tensors.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Mounted, peers};

struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    /// Ends the whole process group: a server may be the child of an xargs.
    fn drop(&mut self) {
        let group = -i32::try_from(self.child.id()).unwrap();
        // SAFETY: takes no pointer; a signal to the group that this test has started.
        unsafe { libc::kill(group, libc::SIGKILL) };
        drop(self.child.wait());
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Server {
    fn start(peers: &Path, model: &Path, mode: &str) -> Server {
        let model = model.to_str().unwrap();
        Server::with(peers, &["-m", model, "--load-mode", mode])
    }

    fn with(peers: &Path, args: &[&str]) -> Server {
        let port = free_port();
        let mut command = Command::new(peers.join("server/llama-server"));
        command
            .args(args)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["-c", "256", "-np", "1", "--no-warmup", "-t", "2"]);
        Server::run(&mut command, port)
    }

    /// Starts a command that ends in a server on `port`, and waits until it has loaded its model.
    fn run(command: &mut Command, port: u16) -> Server {
        let child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Server { child, port };
        let deadline = Instant::now() + Duration::from_secs(120);
        while !server
            .ask("GET", "/health", "")
            .is_some_and(|text| text.contains("\"ok\""))
        {
            assert!(Instant::now() < deadline, "llama-server does not answer");
            assert!(
                server.child.try_wait().unwrap().is_none(),
                "llama-server ended: {command:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        server
    }

    /// Ends it as a user would: a router then ends the servers that it has started.
    fn stop(mut self) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: takes no pointer; the process is our child and was not waited for.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
        self.child.wait().unwrap();
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let n = body.len();
        let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{head}\r\nContent-Length: {n}\r\n\r\n{body}"
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    fn complete(&self) -> String {
        self.complete_with("any")
    }

    fn complete_with(&self, model: &str) -> String {
        let rest = r#""prompt":"The capital of France is","n_predict":16,"temperature":0,"seed":1,"cache_prompt":false"#;
        let body = format!("{{\"model\":{model:?},{rest}}}");
        let answer = self.ask("POST", "/completion", &body).unwrap();
        let from = answer.find("\"content\":\"").expect("a completion") + 11;
        answer[from..].split("\",\"").next().unwrap().to_owned()
    }
}

#[test]
fn llama_server_answers_from_every_view_as_from_the_source() {
    let peers = peers();
    let model = peers.join("gemma.gguf");
    let wanted = Server::start(&peers, &model, "mmap").complete();
    assert!(!wanted.trim().is_empty());
    let shards = Mounted::new(&model, &["--split-max-tensors", "60"]);
    let first = shards.path().join("gemma-00001-of-00004.gguf");
    // A mount over a mount: the merged file of virtual shards.
    let merged = Mounted::new(&first, &[]);
    let whole = merged.path().join("gemma.gguf");
    for (path, mode) in [
        (&first, "mmap"),
        (&first, "none"),
        (&whole, "mmap"),
        (&whole, "none"),
        (&whole, "dio"),
    ] {
        let got = Server::start(&peers, path, mode).complete();
        assert_eq!(got, wanted, "{path:?} with --load-mode {mode}");
    }
    merged.unmount();
    shards.unmount();
}

#[test]
fn llama_server_takes_its_arguments_from_fit_args() {
    let peers = peers();
    let dir = tempfile::tempdir().unwrap();
    // A name that needs quotes.
    let model = dir.path().join("it's a $model \\ \"1\".gguf");
    std::os::unix::fs::symlink(peers.join("gemma.gguf"), &model).unwrap();
    let mount = Mounted::new(&model, &["--split-max-tensors", "100"]);
    let port = free_port();
    let script = r#"cat "$1" | xargs "$2" --host 127.0.0.1 --port "$3" --no-warmup -t 2"#;
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh"])
        .arg(mount.path().join("fit-args"))
        .arg(peers.join("server/llama-server"))
        .arg(port.to_string());
    let running = Server::run(&mut command, port);
    assert!(!running.complete().trim().is_empty());
    let props = running.ask("GET", "/props", "").unwrap();
    assert!(props.contains("00001-of-"), "{props}");
    drop(running);
    mount.unmount();
}

#[test]
fn llama_server_lists_and_loads_a_library() {
    let peers = peers();
    let model = peers.join("gemma.gguf");
    let wanted = Server::start(&peers, &model, "mmap").complete();
    let dir = tempfile::tempdir().unwrap();
    let link = |target: &Path, name: &str| {
        std::os::unix::fs::symlink(target, dir.path().join(name)).unwrap();
    };
    // A single file is shown as shards, a set as one file, and what is broken not as a model.
    let set = Mounted::new(&model, &["--split-max-tensors", "60"]);
    for name in files(&set) {
        let path = Path::new(&name);
        let called = path.file_name().unwrap().to_str().unwrap();
        link(path, &called.replace("gemma", "set"));
    }
    link(&model, "single.gguf");
    std::fs::write(dir.path().join("broken.gguf"), b"no model").unwrap();
    let mount = Mounted::new(dir.path(), &["--follow-outside"]);
    assert_eq!(mount.names(), ["broken", "set", "single"]);
    let router = Server::with(&peers, &["--models-dir", mount.path().to_str().unwrap()]);
    let listed = router.ask("GET", "/v1/models", "").unwrap();
    for (name, is_there) in [("set", true), ("single", true), ("broken", false)] {
        let id = format!("\"id\":\"{name}\"");
        assert_eq!(listed.contains(&id), is_there, "{name}: {listed}");
    }
    for name in ["set", "single"] {
        assert_eq!(router.complete_with(name), wanted, "{name}");
    }
    router.stop();
    mount.unmount();
    set.unmount();
}

#[test]
fn llama_server_shows_overridden_keys() {
    let peers = peers();
    let template = "{{ messages[0]['content'] }} from the overlay";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jinja");
    std::fs::write(&file, template).unwrap();
    let mount = Mounted::new(
        &peers.join("gemma.gguf"),
        &[
            "--split-max-tensors",
            "100",
            "--override-kv",
            "gemma3.context_length=int:1234,tokenizer.ggml.add_bos_token=bool:false",
            "--set-kv-file",
            &format!("tokenizer.chat_template={}", file.display()),
        ],
    );
    let server = Server::start(&peers, Path::new(&files(&mount)[0]), "mmap");
    let props = server.ask("GET", "/props", "").unwrap();
    assert!(props.contains(template), "{props}");
    let models = server.ask("GET", "/v1/models", "").unwrap();
    assert!(models.contains("\"n_ctx_train\":1234,"), "{models}");
    let body = r#"{"content":"x","add_special":true}"#;
    let tokens = |server: &Server| server.ask("POST", "/tokenize", body).unwrap();
    let without = tokens(&server);
    drop(server);
    mount.unmount();
    let with = tokens(&Server::start(&peers, &peers.join("gemma.gguf"), "mmap"));
    // The token that begins a text is gone with its key.
    assert!(with.contains("\"tokens\":[2,"), "{with}");
    assert!(
        without.contains("\"tokens\":[") && !without.contains("[2,"),
        "{without}"
    );
}

#[test]
fn the_python_package_reads_every_view_as_the_source() {
    let peers = peers();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/read_gguf.py");
    // The package takes some 10 seconds to go through the 260,000 tokens of gemma, so that is done less often.
    let models = [
        ("gemma.gguf", "60", &["peer"][..]),
        ("archs/llama-moe.gguf", "7", &["peer", "clean"]),
        ("archs/mamba-dense.gguf", "5", &["peer", "clean"]),
        ("archs/deepseek2-moe.gguf", "9", &["peer", "clean"]),
        ("archs/qwen3vl-dense.gguf", "11", &["peer", "clean"]),
    ];
    for (model, n, headers) in models {
        let model = peers.join(model);
        let options = ["--split-max-tensors", n, "--no-tensor-first-split"];
        let mut mounts = vec![Mounted::new(&model, &options)];
        if headers.len() > 1 {
            mounts.push(Mounted::new(&model, &options[..2]));
        }
        let first = files(&mounts[0])[0].clone();
        for headers in headers {
            mounts.push(Mounted::new(Path::new(&first), &["--headers", headers]));
        }
        let views: Vec<Vec<String>> = mounts.iter().map(files).collect();
        let out = Command::new(peers.join("python/bin/python"))
            .arg(&script)
            .arg(&model)
            .args(views.iter().map(|view| view.join(":")))
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{model:?}:\n{}",
            String::from_utf8_lossy(&out.stderr)
        );
        let said = String::from_utf8(out.stdout).unwrap();
        assert_eq!(said.lines().count(), views.len(), "{said}");
        for (line, view) in said.lines().zip(&views) {
            assert!(
                line.ends_with(&format!(" in {} files", view.len())),
                "{line}"
            );
        }
        assert!(views[0].len() > 2, "{views:?}");
        assert_eq!(views.last().unwrap().len(), 1, "{views:?}");
        // Those on top first.
        mounts.into_iter().rev().for_each(Mounted::unmount);
    }
}

fn files(mount: &Mounted) -> Vec<String> {
    let path = |name: &String| mount.path().join(name).to_str().unwrap().to_owned();
    mount.names().iter().map(path).collect()
}
