//! The one-way flow of ARCHITECTURE.md: which modules of the crate a module may name.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A module of `src/` and what it may name as `crate::X`, besides itself.
const ALLOWED: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("confine", &[]),
    ("source", &[]),
    ("gpu", &[]),
    ("gguf", &["units"]),
    ("layout", &["gguf", "units"]),
    ("arch", &["gguf"]),
    ("fit", &["arch", "gguf", "units"]),
    ("model", &["gguf", "source", "units"]),
    ("library", &["model"]),
    ("views", &["layout", "model", "source"]),
    ("diff", &["gguf", "layout", "model", "source"]),
    ("export", &["layout", "source"]),
    ("vfs", &["layout", "source"]),
    ("mount", &["vfs", "source"]),
    (
        "cli",
        &[
            "arch", "confine", "diff", "export", "fit", "gguf", "gpu", "layout", "library",
            "model", "mount", "source", "units", "vfs", "views",
        ],
    ),
];

/// The crate's root names every module, the command only `ggufuse::cli`.
const ROOTS: &[&str] = &["lib", "main"];

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The module of the crate that a file under `src/` belongs to.
fn module_of(file: &Path) -> String {
    let first = file.components().next().unwrap();
    let name = first.as_os_str().to_str().unwrap();
    name.strip_suffix(".rs").unwrap_or(name).to_owned()
}

/// A line of code up to its `//`. A `//` in a string cuts too much off; no import stands behind one.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

/// What follows each `crate::` in a line of code: a name, or `{` for a group, which hides its names from this test.
fn named(line: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for (at, found) in code(line).match_indices("crate::") {
        let before = code(line)[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code(line)[at + found.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        names.push(match end {
            Some(0) => "{",
            Some(end) => &rest[..end],
            None => rest,
        });
    }
    names
}

/// Why `module` may not name `name`, if it may not.
fn refusal(allowed: &BTreeMap<&str, &[&str]>, module: &str, name: &str) -> Option<String> {
    let Some(may) = allowed.get(module) else {
        return Some(format!("{module} is not in the table of tests/layering.rs"));
    };
    if name == module || may.contains(&name) {
        return None;
    }
    Some(if name == "{" {
        "write one `crate::NAME` per import, no group".to_owned()
    } else {
        format!("{module} may name {may:?} only, not crate::{name}")
    })
}

#[test]
fn modules_name_only_what_they_may() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let mut files = Vec::new();
    rust_files(&src, &mut files);
    let (mut problems, mut seen) = (Vec::new(), 0);
    for path in files {
        let file = path.strip_prefix(&src).unwrap();
        let module = module_of(file);
        if ROOTS.contains(&module.as_str()) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for (no, line) in (1..).zip(text.lines()) {
            for name in named(line) {
                seen += 1;
                if let Some(why) = refusal(&allowed, &module, name) {
                    problems.push(format!("src/{}:{no}: {why}", file.display()));
                }
            }
        }
    }
    assert!(seen > 0, "no import was found at all: the scan is broken");
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn the_table_has_every_module_and_no_cycle() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut declared: Vec<&str> = lib
        .lines()
        .filter_map(|line| code(line).trim().strip_suffix(';'))
        .filter_map(|line| {
            line.strip_prefix("pub ")
                .unwrap_or(line)
                .strip_prefix("mod ")
        })
        .collect();
    declared.sort_unstable();
    let mut listed: Vec<&str> = ALLOWED.iter().map(|(module, _)| *module).collect();
    // A row names only rows above it, so there is no cycle.
    for (i, (module, may)) in ALLOWED.iter().enumerate() {
        for name in *may {
            assert!(listed[..i].contains(name), "{module}: {name} is not above");
        }
    }
    listed.sort_unstable();
    assert_eq!(declared, listed);
}

#[test]
fn violations_are_found() {
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let refused = |module: &str, line: &str| {
        named(line)
            .into_iter()
            .any(|name| refusal(&allowed, module, name).is_some())
    };
    assert!(refused("gguf", "use crate::source::Source;"));
    assert!(refused("layout", "    let v = crate::vfs::View::new();"));
    assert!(refused("layout", "f(crate::gguf::X, crate::model::Y)"));
    assert!(refused("vfs", "use crate::{layout, gguf};"));
    assert!(refused("vfs", "use crate::*;"));
    assert!(refused("new", "use crate::units;"));
    assert!(!refused("gguf", "use crate::units::align_up;"));
    assert!(!refused("gguf", "pub(crate) fn f() {} // crate::source"));
    assert!(!refused("gguf", "/// See [`crate::source`]."));
    assert!(!refused("vfs", "use crate::vfs::ViewFile;"));
    assert!(!refused("vfs", "use other_crate::mount;"));
}
