//! Overrides of keys: the view's header changes, everything else is the source's, byte for byte.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};

use common::{GgufBuilder, Mounted, ggufuse, kv};
use ggufuse::gguf::{self, Header, Value, ValueType};
use ggufuse::layout::{Overlay, Setting, parse_overrides};
use proptest::prelude::*;

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A model whose keys have many types.
fn sample() -> GgufBuilder {
    let mut b = GgufBuilder::sample(5, 100);
    b.kvs.extend([
        kv("general.name", 8, &string("before")),
        kv("llama.context_length", 4, &4096u32.to_le_bytes()),
        kv("llama.rope.freq_base", 6, &10_000f32.to_le_bytes()),
        kv("llama.wide", 10, &7u64.to_le_bytes()),
        kv("llama.signed", 5, &(-7i32).to_le_bytes()),
        kv("tokenizer.ggml.add_bos_token", 7, &[1]),
        kv("tokenizer.ggml.model", 8, &string("gpt2")),
    ]);
    b
}

fn header(path: &Path) -> Header {
    let bytes = std::fs::read(path).unwrap();
    let len = bytes.len() as u64;
    gguf::parse(bytes, len).unwrap()
}

fn entries(header: &Header) -> Vec<(Vec<u8>, Vec<u8>)> {
    header
        .kvs()
        .map(|kv| (kv.key.to_vec(), kv.entry.to_vec()))
        .collect()
}

/// Name, shape, type and bytes of a tensor.
type TensorBytes = (Vec<u8>, Vec<u64>, u32, Vec<u8>);

fn tensors(path: &Path) -> Vec<TensorBytes> {
    let bytes = std::fs::read(path).unwrap();
    let header = header(path);
    let of = |t: &gguf::Tensor| {
        let data = bytes[t.offset as usize..(t.offset + t.len) as usize].to_vec();
        (t.name.clone(), t.dims.clone(), t.ty.0, data)
    };
    header.tensors().iter().map(of).collect()
}

/// A folder with the sample in it.
fn model() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    sample().write(&path);
    (dir, path)
}

fn stderr(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn a_view_has_the_new_values_and_the_old_rest() {
    let (dir, path) = model();
    let template = dir.path().join("chat.jinja");
    std::fs::write(&template, "{{ messages }}, \"x\"\n\0end").unwrap();
    let file = format!("tokenizer.chat_template={}", template.display());
    let mount = Mounted::new(
        &path,
        &[
            "--view",
            "merged",
            "--override-kv",
            "general.name=str:after,llama.context_length=int:8192,llama.rope.freq_base=float:1e6",
            "--override-kv",
            r#"llama.list=arr[i32]:[1,-2,3],llama.words=arr[str]:["a,b","c]"],llama.new=int:5"#,
            "--remove-kv",
            "tokenizer.ggml.add_bos_token",
            "--set-kv-file",
            &file,
        ],
    );
    let view = mount.path().join("m.gguf");
    let array =
        |ty: u32, n: u64, items: &[u8]| [&ty.to_le_bytes(), &n.to_le_bytes()[..], items].concat();
    let numbers: Vec<u8> = [1i32, -2, 3].iter().flat_map(|n| n.to_le_bytes()).collect();
    let words = [string("a,b"), string("c]")].concat();
    let mut wanted = sample();
    wanted.kvs[1] = kv("general.name", 8, &string("after"));
    wanted.kvs[2] = kv("llama.context_length", 4, &8192u32.to_le_bytes());
    wanted.kvs[3] = kv("llama.rope.freq_base", 6, &1e6f32.to_le_bytes());
    wanted.kvs.remove(6);
    wanted.kvs.extend([
        kv("llama.list", 9, &array(5, 3, &numbers)),
        kv("llama.words", 9, &array(8, 2, &words)),
        kv("llama.new", 4, &5u32.to_le_bytes()),
        kv(
            "tokenizer.chat_template",
            8,
            &string("{{ messages }}, \"x\"\n\0end"),
        ),
    ]);
    assert!(std::fs::read(&view).unwrap() == wanted.bytes());
    mount.unmount();
    // The source never changes.
    assert!(std::fs::read(&path).unwrap() == sample().bytes());
}

#[test]
fn a_new_alignment_moves_the_data() {
    let (_dir, path) = model();
    for alignment in [1u64, 8, 32, 64, 4096, 65_536] {
        let value = format!("general.alignment=u32:{alignment}");
        let mount = Mounted::new(&path, &["--view", "merged", "--override-kv", &value]);
        let view = mount.path().join("m.gguf");
        let got = header(&view);
        assert_eq!(got.alignment(), alignment);
        assert!(got.tensors().iter().all(|t| t.offset % alignment == 0));
        assert_eq!(tensors(&view), tensors(&path));
        // A shard set of it: only the first shard says so, and comes out whole.
        let shards = Mounted::new(
            &path,
            &["--split-max-tensors", "2", "--override-kv", &value],
        );
        let first = shards.path().join("m-00001-of-00003.gguf");
        assert_eq!(header(&first).alignment(), alignment);
        let back = Mounted::new(&first, &["--headers", "clean"]);
        let (ours, theirs) = (back.path().join("m.gguf"), std::fs::read(&view).unwrap());
        assert!(std::fs::read(ours).unwrap() == theirs);
        back.unmount();
        shards.unmount();
        mount.unmount();
    }
    // And back to the default by removing the key.
    let mut wide = sample();
    wide.alignment = 64;
    wide.kvs
        .push(kv("general.alignment", 4, &64u32.to_le_bytes()));
    wide.write(&path);
    let mount = Mounted::new(
        &path,
        &["--view", "merged", "--remove-kv", "general.alignment"],
    );
    let view = std::fs::read(mount.path().join("m.gguf")).unwrap();
    assert!(view == sample().bytes());
    mount.unmount();
}

#[test]
fn nonsense_is_refused_by_name() {
    let (dir, path) = model();
    let before = std::fs::read(&path).unwrap();
    let missing = format!("a={}", dir.path().join("none").display());
    let cases: &[(&[&str], &str, i32)] = &[
        (&["--override-kv", "general.name"], "general.name", 2),
        (&["--override-kv", "a=int"], "a=int", 2),
        (&["--override-kv", "=int:1"], "=int:1", 2),
        (&["--override-kv", "a=i33:1"], "i33", 2),
        (&["--override-kv", "a=arr:1"], "the types are", 2),
        (&["--override-kv", "a=int:1x"], "a=int:1x", 2),
        (&["--override-kv", "a=u8:256"], "a=u8:256", 2),
        (&["--override-kv", "a=u32:-1"], "a=u32:-1", 2),
        (&["--override-kv", "a=bool:yes"], "a=bool:yes", 2),
        (&["--override-kv", "a=f32:1e39"], "a=f32:1e39", 2),
        (&["--override-kv", "a=arr[u8]:[1,300]"], "arr[u8]", 2),
        (&["--override-kv", "a=arr[u8]:[1"], "arr[u8]", 2),
        (&["--override-kv", "a=arr[arr]:[[1]]"], "arr[arr]", 2),
        (&["--override-kv", "a=arr[u8]:[1]b=u8:1"], "comma", 2),
        (&["--override-kv", "a=str:x,b"], "\"b\"", 2),
        (&["--override-kv", "a=int:1,a=int:2"], "a: changed twice", 2),
        (
            &["--override-kv", "a=u8:1", "--remove-kv", "a"],
            "a: changed twice",
            2,
        ),
        (
            &["--override-kv", "llama.context_length=float:1.5"],
            "llama.context_length: it is u32",
            2,
        ),
        (
            &["--override-kv", "llama.context_length=int:-1"],
            "llama.context_length: it is u32",
            2,
        ),
        (
            &["--override-kv", "general.name=int:1"],
            "general.name: it is str",
            2,
        ),
        (
            &["--override-kv", "general.alignment=u32:3"],
            "general.alignment",
            2,
        ),
        (
            &["--override-kv", "general.alignment=u64:64"],
            "general.alignment",
            2,
        ),
        (&["--override-kv", "split.count=u16:3"], "split.count", 2),
        (&["--remove-kv", "split.no"], "split.no", 2),
        (
            &["--remove-kv", "general.nam"],
            "general.nam: there is no such key",
            2,
        ),
        (
            &["--remove-kv", "general.architecture"],
            "general.architecture",
            2,
        ),
        (&["--set-kv-file", "general.name"], "KEY=FILE", 2),
        (&["--set-kv-file", &missing], "No such file", 1),
    ];
    let point = tempfile::tempdir().unwrap();
    for (options, named, code) in cases {
        for verb in ["plan", "inspect", "mount"] {
            let mut args = vec![verb, path.to_str().unwrap()];
            if verb == "mount" {
                args.push(point.path().to_str().unwrap());
            }
            let out = ggufuse(&[&args[..], options].concat());
            assert_eq!(
                out.status.code(),
                Some(*code),
                "{verb} {options:?}: {out:?}"
            );
            assert!(
                stderr(&out).contains(named),
                "{verb} {options:?}: {}",
                stderr(&out)
            );
        }
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn doubtful_changes_are_warned_about_by_name() {
    let (_dir, path) = model();
    for (options, warning) in [
        (
            ["--remove-kv", "llama.context_length"],
            "llama.context_length: removed",
        ),
        (
            ["--remove-kv", "tokenizer.ggml.model"],
            "tokenizer.ggml.model: removed",
        ),
        (
            ["--override-kv", "llama.context_length=u64:1"],
            "llama.context_length: was u32, is u64",
        ),
        (
            ["--override-kv", "general.name=bool:true"],
            "general.name: was str, is bool",
        ),
        (
            ["--override-kv", "general.architecture=str:qwen2"],
            "no key begins with that name",
        ),
    ] {
        let out = ggufuse(&[&["inspect", path.to_str().unwrap()], &options[..]].concat());
        assert!(out.status.success(), "{options:?}");
        assert!(
            stderr(&out).contains(warning),
            "{options:?}: {}",
            stderr(&out)
        );
        let mount = Mounted::new(&path, &options);
        mount.unmount();
    }
    // What nobody has to worry about is not warned about.
    let out = ggufuse(&[
        "inspect",
        path.to_str().unwrap(),
        "--override-kv",
        "llama.signed=int:3",
        "--remove-kv",
        "general.name",
    ]);
    assert!(out.status.success());
    assert_eq!(stderr(&out), "");
}

#[test]
fn an_overlay_file_sets_and_removes() {
    let (dir, path) = model();
    std::fs::write(dir.path().join("chat.jinja"), "{{ x }}").unwrap();
    let overlay = dir.path().join("o.toml");
    std::fs::write(
        &overlay,
        r#"
remove = ["tokenizer.ggml.add_bos_token"]
[set]
"general.name" = "from the file"
"llama.context_length" = 1024
"llama.rope.freq_base" = 2.5
"llama.flag" = true
"llama.big" = { type = "u64", value = 9223372036854775807 }
"llama.list" = { type = "arr[f64]", value = [1.5, 2] }
"tokenizer.chat_template" = { file = "chat.jinja" }
"#,
    )
    .unwrap();
    let out = ggufuse(&[
        "inspect",
        path.to_str().unwrap(),
        "--overlay",
        overlay.to_str().unwrap(),
        "--override-kv",
        "general.name=str:from the command",
        "--json",
    ]);
    assert!(out.status.success(), "{}", stderr(&out));
    let seen: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let kvs: Vec<(&str, &str, String)> = seen["kv"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kv| {
            let text = |name: &str| kv[name].as_str().unwrap();
            (text("key"), text("type"), kv["value"].to_string())
        })
        .collect();
    let wanted = [
        ("general.architecture", "str", "\"llama\""),
        ("general.name", "str", "\"from the command\""),
        ("llama.context_length", "u32", "1024"),
        ("llama.rope.freq_base", "f32", "2.5"),
        ("llama.wide", "u64", "7"),
        ("llama.signed", "i32", "-7"),
        ("tokenizer.ggml.model", "str", "\"gpt2\""),
        ("llama.flag", "bool", "true"),
        ("llama.big", "u64", "9223372036854775807"),
        ("llama.list", "arr", "{\"of\":\"f64\",\"count\":2}"),
        ("tokenizer.chat_template", "str", "\"{{ x }}\""),
    ];
    let wanted: Vec<_> = wanted
        .iter()
        .map(|&(k, t, v)| (k, t, v.to_owned()))
        .collect();
    assert_eq!(kvs, wanted);

    for (text, why) in [
        ("[set", "TOML"),
        ("sett = 1", "sett"),
        ("remove = [1]", "a list of keys"),
        ("[set]\na.b = 1", "quotes"),
        ("[set]\na = [1]", "\"a\""),
        ("[set]\na = { type = \"u8\", value = 256 }", "\"a\""),
        ("[set]\na = { type = \"u8\" }", "\"a\""),
        ("[set]\na = 2020-01-01", "\"a\""),
        ("[set]\na = nan", "\"a\""),
    ] {
        std::fs::write(&overlay, text).unwrap();
        let out = ggufuse(&[
            "plan",
            path.to_str().unwrap(),
            "--overlay",
            overlay.to_str().unwrap(),
        ]);
        assert_eq!(out.status.code(), Some(2), "{text}: {out:?}");
        assert!(stderr(&out).contains(why), "{text}: {}", stderr(&out));
    }
}

#[test]
fn mount_options_take_overrides() {
    let (_dir, path) = model();
    let mount = Mounted::new(
        &path,
        &[
            "-o",
            r"view=merged,override-kv=general.name=str:x\,llama.new=arr[u8]:[1\,2],remove-kv=llama.wide",
        ],
    );
    let got = header(&mount.path().join("m.gguf"));
    assert_eq!(
        got.get(b"general.name").unwrap().str_bytes(),
        Some(&b"x"[..])
    );
    assert_eq!(
        got.get(b"llama.new").unwrap().array(),
        Some((ValueType::U8, 2))
    );
    assert!(got.get(b"llama.wide").is_none());
    mount.unmount();
}

/// The Python package of llama.cpp, on every file of the view.
#[test]
fn the_python_package_shows_the_new_values() {
    const SCRIPT: &str = r#"
import sys
from gguf import GGUFReader
reader = GGUFReader(sys.argv[1])
for key in sys.argv[2:]:
    field = reader.get_field(key)
    print(key, field and (field.types[0].name, field.contents()))
print(len(reader.tensors), reader.alignment)
"#;
    let peers = common::peers();
    let mount = Mounted::new(
        &peers.join("archs/llama-moe.gguf"),
        &[
            "--view",
            "merged",
            "--override-kv",
            "llama.context_length=int:1234,general.new=arr[str]:[\"a\",\"é\"],general.alignment=u32:128",
            "--remove-kv",
            "tokenizer.ggml.model",
        ],
    );
    let keys = [
        "llama.context_length",
        "general.new",
        "tokenizer.ggml.model",
    ];
    let out = std::process::Command::new(peers.join("python/bin/python"))
        .args(["-c", SCRIPT])
        .arg(mount.path().join("llama-moe.gguf"))
        .args(keys)
        .output()
        .unwrap();
    let said = String::from_utf8(out.stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "llama.context_length ('UINT32', 1234)");
    assert_eq!(lines[1], "general.new ('ARRAY', ['a', 'é'])");
    assert_eq!(lines[2], "tokenizer.ggml.model None");
    assert!(lines[3].ends_with(" 128"), "{said}");
    mount.unmount();
}

#[test]
fn a_changed_source_gets_the_overrides_again() {
    let (_dir, path) = model();
    let mount = Mounted::new(
        &path,
        &["--view", "merged", "--override-kv", "general.name=str:mine"],
    );
    let mut other = sample();
    other.tensors.pop();
    std::fs::remove_file(&path).unwrap();
    other.write(&path);
    let got = header(&mount.path().join("m.gguf"));
    assert_eq!(got.tensors().len(), 4);
    assert_eq!(
        got.get(b"general.name").unwrap().str_bytes(),
        Some(&b"mine"[..])
    );
    mount.unmount();
}

#[test]
fn lists_are_divided_as_llama_cpp_divides_them() {
    let keys = |list: &str| -> Vec<(String, Setting)> {
        let found = parse_overrides(list).unwrap();
        found
            .into_iter()
            .map(|(key, value)| (String::from_utf8(key).unwrap(), value))
            .collect()
    };
    let text = |value: &str| Setting::Typed(Value::string(value.as_bytes()));
    assert_eq!(
        keys(r#"a=str:x"y,b=int:-3"#),
        [
            ("a".to_owned(), text("x\"y")),
            ("b".to_owned(), Setting::Int(-3))
        ]
    );
    assert_eq!(
        keys(r#""a=str:one, ""two""",b=str:"#),
        [
            ("a".to_owned(), text("one, \"two\"")),
            ("b".to_owned(), text(""))
        ]
    );
    assert_eq!(keys("a=str:k=v:w"), [("a".to_owned(), text("k=v:w"))]);
}

fn setting() -> impl Strategy<Value = (Value, Setting)> {
    prop_oneof![
        any::<u32>().prop_map(|n| Value::int(ValueType::U32, n.into()).unwrap()),
        any::<i64>().prop_map(|n| Value::int(ValueType::I64, n.into()).unwrap()),
        any::<bool>().prop_map(Value::bool),
        prop::collection::vec(any::<u8>(), 0..20).prop_map(|text| Value::string(&text)),
        prop::collection::vec(any::<u16>(), 0..9).prop_map(|list| {
            let of = |n: &u16| Value::int(ValueType::U16, (*n).into()).unwrap();
            let list: Vec<Value> = list.iter().map(of).collect();
            Value::array(ValueType::U16, &list).unwrap()
        }),
    ]
    .prop_map(|value| (value.clone(), Setting::Typed(value)))
}

proptest! {
    /// Any changes, against a list of keys changed the naive way and a file written from it.
    #[test]
    fn changes_equal_those_of_a_plain_list(
        changes in prop::collection::btree_map(0usize..14, prop::option::of(setting()), 0..10),
        alignment in prop::option::of(0u32..13),
    ) {
        let mut builder = sample();
        for i in 0..6 {
            builder.kvs.push(kv(&format!("k{i}"), 4, &[1, 2, 3, i]));
        }
        let bytes = builder.bytes();
        let source = gguf::parse(bytes.clone(), bytes.len() as u64).unwrap();
        let mut wanted = entries(&source);
        let mut overlay = Overlay::default();
        let named = |(i, change)| (format!("k{i}").into_bytes(), change);
        let mut all: Vec<_> = changes.into_iter().map(named).collect();
        if let Some(power) = alignment {
            let value = Value::int(ValueType::U32, 1 << power).unwrap();
            all.push((b"general.alignment".to_vec(), Some((value.clone(), Setting::Typed(value)))));
        }
        for (key, change) in all {
            let place = wanted.iter().position(|(other, _)| *other == key);
            match (change, place) {
                (Some((value, setting)), place) => {
                    overlay.set(&key, setting).unwrap();
                    let entry = (key.clone(), value.entry(&key));
                    match place {
                        Some(at) => wanted[at] = entry,
                        None => wanted.push(entry),
                    }
                }
                (None, Some(at)) => {
                    overlay.remove(&key).unwrap();
                    wanted.remove(at);
                }
                (None, None) => {}
            }
        }
        let mut headers = [source];
        overlay.apply(&mut headers).unwrap();
        prop_assert_eq!(entries(&headers[0]), wanted.clone());
        // The file of the view: what a builder with these keys would have written.
        let built = ggufuse::layout::merge(&headers, false).unwrap();
        builder.kvs = wanted.into_iter().map(|(_, entry)| entry).collect();
        builder.alignment = 1 << alignment.unwrap_or(5);
        let mut got = Vec::new();
        for piece in built.file.resolve(0, built.file.len()) {
            match piece {
                ggufuse::layout::Piece::Inline(bytes) => got.extend_from_slice(bytes),
                ggufuse::layout::Piece::Zeros(n) => got.resize(got.len() + n as usize, 0),
                ggufuse::layout::Piece::Source { source, offset, len } => {
                    assert_eq!(source, 0);
                    got.extend_from_slice(&bytes[offset as usize..(offset + len) as usize]);
                }
            }
        }
        prop_assert!(got == builder.bytes());
    }
}
