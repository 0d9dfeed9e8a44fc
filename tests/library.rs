//! Whole libraries: the layouts of other tools, what is found in them, and that a mount follows them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stdout, reason = "durations are printed, not asserted")]

mod common;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{GgufBuilder, Mounted, ggufuse};
use ggufuse::library::{Item, Layout, Library, Node, tree};
use serde_json::json;

fn model(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    GgufBuilder::sample(3, 100).write(path);
}

fn text(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn link(target: &str, path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

fn items(root: &Path, layout: Layout) -> BTreeMap<String, Item> {
    let library = Library {
        root: root.canonicalize().unwrap(),
        layout,
        without: None,
        follow_outside: true,
    };
    let mut found = BTreeMap::new();
    flatten(&tree(library.scan(&mut |_| {}).items), "", &mut found);
    found
}

fn flatten(nodes: &BTreeMap<OsString, Node>, at: &str, found: &mut BTreeMap<String, Item>) {
    for (name, node) in nodes {
        let path = format!("{at}{}", name.to_str().unwrap());
        match node {
            Node::Folder(nodes) => flatten(nodes, &format!("{path}/"), found),
            Node::Model(item) => drop(found.insert(path, item.clone())),
        }
    }
}

/// The paths of all models of a library, and their numbers of files and projectors.
fn found(root: &Path, layout: Layout) -> Vec<(String, usize, usize)> {
    items(root, layout)
        .into_iter()
        .map(|(path, item)| {
            let files = item.files.unwrap();
            (path, files.files.len(), files.projectors.len())
        })
        .collect()
}

fn paths(root: &Path, layout: Layout) -> Vec<String> {
    items(root, layout).into_keys().collect()
}

#[test]
fn plain_folders() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("one.gguf"));
    for no in 1..=3 {
        model(&at(&format!("set/big-0000{no}-of-00003.gguf")));
    }
    for no in 1..=2 {
        text(&at(&format!("deep/er/cut.gguf.part{no}of2")), "x");
    }
    // LM Studio's way.
    model(&at("org/repo/vision-4b-Q4_K_M.gguf"));
    model(&at("org/repo/vision-4b-Q8_0.gguf"));
    model(&at("org/repo/mmproj-vision-4b-F16.gguf"));
    for other in [
        "README.md",
        "x.gguf.part",
        "y.gguf.incomplete",
        ".hidden.gguf",
        ".cache/z.gguf",
    ] {
        text(&at(other), "x");
    }
    let wanted = [
        ("deep/er/cut", 1, 0),
        ("one", 1, 0),
        ("org/repo/vision-4b-Q4_K_M", 1, 1),
        ("org/repo/vision-4b-Q8_0", 1, 1),
        ("set/big", 3, 0),
    ];
    for layout in [Layout::Auto, Layout::Plain, Layout::LmStudio] {
        let found = found(dir.path(), layout);
        let found: Vec<_> = found.iter().map(|(p, n, m)| (p.as_str(), *n, *m)).collect();
        assert_eq!(found, wanted, "{layout:?}");
    }
    assert!(paths(dir.path(), Layout::Ollama).is_empty());
}

#[test]
fn names_that_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("m.gguf"));
    model(&at("m-00001-of-00001.gguf"));
    model(&at("m.gguf.a"));
    model(&at("n/inner.gguf"));
    model(&at("n.gguf"));
    assert_eq!(
        paths(dir.path(), Layout::Auto),
        ["m", "m.gguf", "m.gguf.a", "n.gguf", "n/inner"]
    );
}

#[test]
fn symlinks_are_followed_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("b/real.gguf"));
    // Read first by name, but a directory is shown where it really is.
    link("b", &at("a"));
    link("..", &at("b/up"));
    link(".", &at("self"));
    link("b/real.gguf", &at("alias.gguf"));
    link("nowhere", &at("broken.gguf"));
    link("loop.gguf", &at("loop.gguf"));
    let outside = tempfile::tempdir().unwrap();
    model(&outside.path().join("far.gguf"));
    link(outside.path().to_str().unwrap(), &at("x"));
    link(outside.path().to_str().unwrap(), &at("y"));
    assert_eq!(
        paths(dir.path(), Layout::Auto),
        ["alias", "b/real", "broken", "loop", "x/far"]
    );
}

/// A blob and a link to it, as the hub's client leaves them.
fn snapshot(repo: &Path, revision: &str, file: &str, blob: &str) {
    let depth = "../".repeat(2 + file.matches('/').count());
    link(
        &format!("{depth}blobs/{blob}"),
        &repo.join("snapshots").join(revision).join(file),
    );
}

#[test]
fn hugging_face_cache() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("hub/models--org--name-GGUF");
    for blob in ["old", "new", "sharded1", "sharded2"] {
        model(&repo.join("blobs").join(blob));
    }
    text(&repo.join("blobs/later.incomplete"), "x");
    let (old, new) = ("0123456789abcdef", "fedcba9876543210");
    text(&repo.join("refs/main"), new);
    snapshot(&repo, new, "m-Q4_K_M.gguf", "new");
    snapshot(&repo, new, "README.md", "new");
    snapshot(&repo, new, "Q8/m-Q8-00001-of-00002.gguf", "sharded1");
    snapshot(&repo, new, "Q8/m-Q8-00002-of-00002.gguf", "sharded2");
    snapshot(&repo, old, "m-Q4_K_M.gguf", "old");
    // The same bytes in both revisions.
    snapshot(&repo, old, "Q8/m-Q8-00001-of-00002.gguf", "sharded1");
    snapshot(&repo, old, "Q8/m-Q8-00002-of-00002.gguf", "sharded2");
    let single = dir.path().join("hub/models--gpt2/snapshots/1234");
    model(&single.join("gpt2.gguf"));
    model(
        &dir.path()
            .join("hub/datasets--org--x/snapshots/1/data.gguf"),
    );
    let wanted = [
        "datasets--org--x/snapshots/1/data",
        "gpt2/gpt2",
        "org/name-GGUF/Q8/m-Q8",
        "org/name-GGUF/m-Q4_K_M",
        "org/name-GGUF@01234567/m-Q4_K_M",
    ];
    let hub = dir.path().join("hub");
    assert_eq!(paths(&hub, Layout::Auto), wanted);
    assert_eq!(paths(&hub, Layout::HuggingFace), wanted[1..]);
    // From above, and the repository itself.
    assert_eq!(paths(dir.path(), Layout::HuggingFace)[0], "hub/gpt2/gpt2");
    assert_eq!(paths(&repo, Layout::Auto)[0], "org/name-GGUF/Q8/m-Q8");
    let plain = paths(&hub, Layout::Plain);
    assert!(plain.contains(&format!("models--org--name-GGUF/snapshots/{new}/m-Q4_K_M")));

    let mount = Mounted::new(&hub, &["--view", "merged"]);
    let model = mount.path().join("org/name-GGUF/m-Q4_K_M");
    let view = fs::read(model.join("m-Q4_K_M.gguf")).unwrap();
    assert!(view == fs::read(repo.join("blobs/new")).unwrap());
    mount.unmount();
}

#[test]
fn llama_cpp_cache() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for file in [
        "ggml-org_gemma-3-4b-it-GGUF_gemma-3-4b-it-Q4_K_M.gguf",
        "ggml-org_gemma-3-4b-it-GGUF_mmproj-model-f16.gguf",
        "ggml-org_big_big-00001-of-00002.gguf",
        "ggml-org_big_big-00002-of-00002.gguf",
        "by-url.gguf",
    ] {
        model(&at(file));
        text(&at(&format!("{file}.etag")), "x");
    }
    text(&at("x.gguf.downloadInProgress"), "x");
    text(
        &at("manifest=ggml-org=gemma-3-4b-it-GGUF=latest.json"),
        "{}",
    );
    text(&at("manifest=ggml-org=big=latest.json"), "{}");
    text(&at("manifest=ggml-org=big=Q8_0.json"), "{}");
    let wanted = [
        ("by-url".to_owned(), 1, 0),
        ("ggml-org/big/big".to_owned(), 2, 0),
        (
            "ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M".to_owned(),
            1,
            1,
        ),
    ];
    assert_eq!(found(dir.path(), Layout::Auto), wanted);
    assert_eq!(found(dir.path(), Layout::LlamaCpp), wanted);
    let plain = paths(dir.path(), Layout::Plain);
    assert!(plain.contains(&"ggml-org_big_big".to_owned()), "{plain:?}");
    let mount = Mounted::new(dir.path(), &[]);
    let gemma = mount
        .path()
        .join("ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M");
    assert_eq!(
        names(&gemma),
        [
            "fit-args",
            "fit-report",
            "gemma-3-4b-it-Q4_K_M-00001-of-00001.gguf",
            "mmproj-model-f16.gguf"
        ]
    );
    mount.unmount();
}

fn ollama(store: &Path, name: &str, layers: &[(&str, &str)]) {
    let layers: Vec<_> = layers
        .iter()
        .map(|(kind, digest)| json!({ "mediaType": format!("application/vnd.ollama.image.{kind}"), "digest": digest }))
        .collect();
    let manifest = json!({ "schemaVersion": 2, "config": {}, "layers": layers });
    text(&store.join("manifests").join(name), &manifest.to_string());
}

#[test]
fn ollama_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("models");
    model(&store.join("blobs/sha256-aa"));
    model(&store.join("blobs/sha256-bb"));
    model(&store.join("blobs/sha256:cc"));
    text(&store.join("blobs/sha256-dd-partial"), "x");
    text(&store.join("blobs/sha256-ee"), "{}");
    let own = "registry.ollama.ai/library";
    ollama(
        &store,
        &format!("{own}/llava/7b"),
        &[
            ("model", "sha256:aa"),
            ("projector", "sha256:bb"),
            ("template", "sha256:ee"),
        ],
    );
    ollama(
        &store,
        &format!("{own}/llava/latest"),
        &[("model", "sha256:aa")],
    );
    ollama(
        &store,
        "registry.ollama.ai/someone/old/1b",
        &[("model", "sha256:cc")],
    );
    ollama(&store, "hf.co/org/name/Q4_K_M", &[("model", "sha256:bb")]);
    ollama(
        &store,
        &format!("{own}/missing/1b"),
        &[("model", "sha256:ff")],
    );
    ollama(
        &store,
        &format!("{own}/evil/1b"),
        &[("model", "sha256:../../../secret")],
    );
    ollama(
        &store,
        &format!("{own}/cloud/1b"),
        &[("license", "sha256:ee")],
    );
    text(
        &store.join("manifests").join(own).join("broken/1b"),
        "not json",
    );
    let wanted = [
        "hf.co/org/name/Q4_K_M",
        "library/broken/1b",
        "library/evil/1b",
        "library/llava/7b",
        "library/llava/latest",
        "library/missing/1b",
        "someone/old/1b",
    ];
    assert_eq!(paths(&store, Layout::Auto), wanted);
    assert_eq!(paths(&store, Layout::Ollama), wanted);
    assert_eq!(
        paths(dir.path(), Layout::Auto)[0],
        "models/hf.co/org/name/Q4_K_M"
    );
    assert!(paths(&store, Layout::HuggingFace).is_empty());

    let mount = Mounted::new(&store, &["--view", "merged"]);
    let library = mount.path().join("library");
    assert!(
        fs::read(library.join("llava/7b/llava-7b.gguf")).unwrap()
            == fs::read(store.join("blobs/sha256-aa")).unwrap()
    );
    assert!(
        fs::read(library.join("llava/7b/mmproj-llava-7b.gguf")).unwrap()
            == fs::read(store.join("blobs/sha256-bb")).unwrap()
    );
    assert!(fs::read(mount.path().join("someone/old/1b/old-1b.gguf")).is_ok());
    for (name, why) in [
        ("missing", "missing"),
        ("evil", "is no digest"),
        ("broken", "not a manifest"),
    ] {
        let said = fs::read_to_string(library.join(name).join("1b/ERROR.txt")).unwrap();
        assert!(said.contains(why), "{name}: {said}");
    }
    mount.unmount();
}

#[test]
fn a_layout_needs_a_directory_and_an_empty_library_waits() {
    let dir = tempfile::tempdir().unwrap();
    let point = tempfile::tempdir().unwrap();
    let at = point.path().to_str().unwrap();
    let file = dir.path().join("m.gguf");
    model(&file);
    let out = ggufuse(&["mount", file.to_str().unwrap(), at, "--layout", "plain"]);
    assert_eq!(out.status.code(), Some(2));
    let empty = tempfile::tempdir().unwrap();
    let out = ggufuse(&["mount", empty.path().to_str().unwrap(), at]);
    assert_eq!(out.status.code(), Some(4));
    // One model in a directory is shown as the root; with a layout it is a library of one.
    let mount = Mounted::new(dir.path(), &["--view", "merged"]);
    assert_eq!(mount.names(), ["m.gguf"]);
    mount.unmount();
    let mount = Mounted::new(dir.path(), &["-o", "layout=plain"]);
    assert_eq!(mount.names(), ["m"]);
    mount.unmount();
    let mount = Mounted::new(empty.path(), &["--layout", "plain"]);
    assert!(mount.names().is_empty());
    model(&empty.path().join("new.gguf"));
    eventually("the first model", || mount.names() == ["new"]);
    mount.unmount();
}

/// A change is seen within a second; a loaded machine gets more. What is measured is printed, not asserted.
#[track_caller]
fn eventually(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(15),
            "not seen: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{what}: after {:?}", start.elapsed());
}

/// The names in a directory but for those of what fits a model into memory.
fn models(dir: &Path) -> Vec<String> {
    let mut names = names(dir);
    names.retain(|name| !name.starts_with("fit-"));
    names
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_mount_follows_its_library() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("stays.gguf"));
    model(&at("sub/goes.gguf"));
    let mount = Mounted::new(dir.path(), &["--view", "merged"]);
    let seen = |name: &str| mount.path().join(name);
    assert_eq!(mount.names(), ["stays", "sub"]);
    let open = File::open(seen("stays/stays.gguf")).unwrap();

    model(&at("new.gguf"));
    eventually("a file", || seen("new/new.gguf").is_file());
    model(&at("a/b/c/deep.gguf"));
    eventually("new folders", || seen("a/b/c/deep/deep.gguf").is_file());
    fs::rename(at("new.gguf"), at("a/moved.gguf")).unwrap();
    eventually("a moved file", || {
        seen("a/moved").is_dir() && !seen("new").exists()
    });
    fs::rename(at("a"), at("z")).unwrap();
    eventually("a moved folder", || {
        seen("z/b/c/deep/deep.gguf").is_file() && !seen("a").exists()
    });
    model(&at("z/b/late.gguf"));
    eventually("a file in a moved folder", || seen("z/b/late").is_dir());
    fs::remove_dir_all(at("sub")).unwrap();
    eventually("a folder that is gone", || !seen("sub").exists());

    // A set is refused, and says why, until its last shard is there.
    let set = tempfile::tempdir().unwrap();
    GgufBuilder::sample(4, 100).write(&set.path().join("set.gguf"));
    let shards = Mounted::new(&set.path().join("set.gguf"), &["--split-max-tensors", "2"]);
    let parts = shards.names();
    fs::copy(shards.path().join(&parts[0]), at(&parts[0])).unwrap();
    eventually("half a set", || names(&seen("set")) == ["ERROR.txt"]);
    let why = fs::read_to_string(seen("set/ERROR.txt")).unwrap();
    assert!(why.contains(&format!("{}: missing", parts[1])), "{why}");
    fs::copy(shards.path().join(&parts[1]), at(&parts[1])).unwrap();
    eventually("a whole set", || models(&seen("set")) == ["set.gguf"]);
    assert!(fs::read(seen("set/set.gguf")).is_ok());
    shards.unmount();

    // Other bytes by the same name.
    let before = fs::read(seen("stays/stays.gguf")).unwrap();
    GgufBuilder::sample(4, 200).write(&at("other"));
    fs::rename(at("other"), at("stays.gguf")).unwrap();
    let wanted = fs::read(at("stays.gguf")).unwrap();
    eventually("a file that was replaced", || {
        fs::read(seen("stays/stays.gguf")).is_ok_and(|now| now == wanted)
    });
    // Whoever had the old one open reads it to its end.
    let mut old = Vec::new();
    std::io::Read::read_to_end(&mut &open, &mut old).unwrap();
    assert!(old == before);
    drop(open);
    fs::remove_file(at("stays.gguf")).unwrap();
    eventually("a model that is gone", || !seen("stays").exists());
    mount.unmount();
}

#[test]
fn a_download_is_not_served_before_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("one.gguf"));
    let mount = Mounted::new(dir.path(), &["--layout", "plain", "--view", "merged"]);
    let seen = |name: &str| mount.path().join(name);
    let bytes = GgufBuilder::sample(3, 100_000).bytes();

    // Piece by piece under its final name.
    let mut file = File::create(at("slow.gguf")).unwrap();
    for part in bytes.chunks(bytes.len() / 4) {
        file.write_all(part).unwrap();
        file.flush().unwrap();
        eventually("a download", || names(&seen("slow")) == ["ERROR.txt"]);
    }
    // All bytes are there, but the writer may not be done.
    eventually("a writer", || {
        let why = fs::read_to_string(seen("slow/ERROR.txt"));
        why.is_ok_and(|why| why.contains("open for writing"))
    });
    assert_eq!(names(&seen("slow")), ["ERROR.txt"]);
    drop(file);
    eventually("a whole download", || {
        models(&seen("slow")) == ["slow.gguf"]
    });
    assert!(fs::read(seen("slow/slow.gguf")).unwrap() == bytes);

    // At full length from the start, and resumed later: only the file beside it tells.
    text(&at("resumed.gguf.aria2"), "x");
    fs::write(at("resumed.gguf"), &bytes).unwrap();
    eventually("a paused download", || {
        names(&seen("resumed")) == ["ERROR.txt"]
    });
    let why = fs::read_to_string(seen("resumed/ERROR.txt")).unwrap();
    assert!(why.contains("resumed.gguf.aria2 is beside it"), "{why}");
    fs::remove_file(at("resumed.gguf.aria2")).unwrap();
    eventually("a resumed download", || {
        models(&seen("resumed")) == ["resumed.gguf"]
    });

    // Under another name until it is whole.
    fs::write(at("named.gguf.part"), &bytes).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!seen("named").exists());
    fs::rename(at("named.gguf.part"), at("named.gguf")).unwrap();
    eventually("a renamed download", || {
        models(&seen("named")) == ["named.gguf"]
    });
    mount.unmount();
}

#[test]
fn a_projector_that_is_broken_does_not_take_its_model_with_it() {
    let dir = tempfile::tempdir().unwrap();
    model(&dir.path().join("m.gguf"));
    text(&dir.path().join("mmproj-m.gguf"), "no model");
    let mount = Mounted::new(dir.path(), &["--layout", "plain", "--view", "merged"]);
    let seen = mount.path().join("m");
    assert_eq!(models(&seen), ["ERROR.txt", "m.gguf"]);
    let why = fs::read_to_string(seen.join("ERROR.txt")).unwrap();
    assert!(
        why.contains("mmproj-m.gguf: ") && why.contains("not a GGUF file"),
        "{why}"
    );
    model(&dir.path().join("mmproj-m.gguf"));
    eventually("a projector", || {
        models(&seen) == ["m.gguf", "mmproj-m.gguf"]
    });
    mount.unmount();
}

#[test]
fn a_mount_point_in_its_library_and_links_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let point = tempfile::tempdir_in(dir.path()).unwrap();
    model(&dir.path().join("a.gguf"));
    model(&dir.path().join("b.gguf"));
    let own = point.path().join("a/a.gguf");
    let mount = Mounted::at(point, dir.path());
    assert_eq!(mount.names(), ["a", "b"]);
    link(own.to_str().unwrap(), &dir.path().join("again.gguf"));
    link(mount.path().to_str().unwrap(), &dir.path().join("folder"));
    model(&dir.path().join("c.gguf"));
    eventually("another model", || mount.path().join("c").is_dir());
    assert_eq!(mount.names(), ["a", "b", "c"]);
    mount.unmount();
}

#[test]
fn five_thousand_models_are_opened_when_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = GgufBuilder::sample(3, 100).bytes();
    for org in 0..50 {
        let org = dir.path().join(format!("org{org}"));
        fs::create_dir(&org).unwrap();
        for no in 0..100 {
            fs::write(org.join(format!("m{no}.gguf")), &bytes).unwrap();
        }
    }
    let start = Instant::now();
    let mount = Mounted::new(dir.path(), &[]);
    println!("mounted after {:?}", start.elapsed());
    let plans = || {
        let out = ggufuse(&["status", mount.path().to_str().unwrap(), "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        status[0]["stats"]["plans"].as_u64().unwrap()
    };
    let list = |how: &str, dir: &Path| {
        let out = Command::new("ls").arg(how).arg(dir).output().unwrap();
        assert!(out.status.success());
        String::from_utf8(out.stdout).unwrap()
    };
    let org = list("-l", &mount.path().join("org7"));
    assert_eq!(org.lines().count(), 101);
    assert_eq!(plans(), 0, "nothing was looked at");
    assert!(fs::read(mount.path().join("org7/m7/m7-00001-of-00001.gguf")).is_ok());
    assert_eq!(plans(), 1);
    let start = Instant::now();
    let all = list("-lR", mount.path());
    println!("ls -lR after {:?}", start.elapsed());
    assert_eq!(all.matches("-00001-of-00001.gguf").count(), 5000);
    assert_eq!(plans(), 5000, "one header read each");
    mount.unmount();
}
