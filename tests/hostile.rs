//! Files that broke other tools: each ends in the right bytes or in one clear reason that names the file.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::{GgufBuilder, kv};
use ggufuse::gguf::{self, Header};
use ggufuse::layout::{Piece, SplitOptions, VirtualFile};
use ggufuse::model::{self, Model, ModelError};
use ggufuse::views::{self, Kind, ViewOptions};
use proptest::prelude::*;

type Contents = Vec<(Vec<u8>, Vec<u8>)>;

const U8: u32 = 0;
const U16: u32 = 2;
const U32: u32 = 4;
const I32: u32 = 5;
const STR: u32 = 8;
const ARR: u32 = 9;
const U64: u32 = 10;
const I64: u32 = 11;

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn array(element: u32, n: u64, items: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &n.to_le_bytes(), items].concat()
}

/// A header from parts, without padding: counts may lie.
fn header(n_tensors: u64, n_kv: u64, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(n_tensors.to_le_bytes());
    out.extend(n_kv.to_le_bytes());
    out.extend(parts.concat());
    out
}

fn info(name: &[u8], dims: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name);
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(ty.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i * 31 + seed * 17) % 251) as u8)
        .collect()
}

fn builder(alignment: u64) -> GgufBuilder {
    let mut b = GgufBuilder::sample(0, 0);
    b.alignment = alignment;
    if alignment != 32 {
        b.kvs.push(kv(
            "general.alignment",
            U32,
            &(alignment as u32).to_le_bytes(),
        ));
    }
    b
}

fn add(b: &mut GgufBuilder, name: &str, dims: &[u64], ty: u32, data: Vec<u8>) {
    b.tensors.push((name.to_owned(), dims.to_vec(), ty, data));
}

fn wanted(builders: &[&GgufBuilder]) -> Contents {
    builders
        .iter()
        .flat_map(|b| &b.tensors)
        .map(|(name, _, _, data)| (name.clone().into_bytes(), data.clone()))
        .collect()
}

/// Shard `no` (from 0) of `count` with one tensor per given name.
fn shard(no: u16, count: u16, total: i32, names: &[&str]) -> GgufBuilder {
    let mut b = builder(32);
    b.kvs.push(kv("split.no", U16, &no.to_le_bytes()));
    b.kvs.push(kv("split.count", U16, &count.to_le_bytes()));
    b.kvs
        .push(kv("split.tensors.count", I32, &total.to_le_bytes()));
    for (i, name) in names.iter().enumerate() {
        let data = pattern(40, usize::from(no) * 10 + i);
        add(&mut b, name, &[10], 0, data);
    }
    b
}

fn member(dir: &Path, no: usize, count: usize) -> PathBuf {
    dir.join(format!("m-{no:05}-of-{count:05}.gguf"))
}

/// Writes a set and returns its builders.
fn write_set(dir: &Path, names: &[&[&str]]) -> Vec<GgufBuilder> {
    let total = names.iter().map(|n| n.len()).sum::<usize>() as i32;
    let shards: Vec<GgufBuilder> = names
        .iter()
        .enumerate()
        .map(|(no, mine)| shard(no as u16, names.len() as u16, total, mine))
        .collect();
    for (no, b) in shards.iter().enumerate() {
        b.write(&member(dir, no + 1, names.len()));
    }
    shards
}

fn materialize(model: &Model, file: &VirtualFile) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in file.resolve(0, file.len()) {
        match piece {
            Piece::Inline(bytes) => out.extend(bytes),
            Piece::Zeros(n) => out.resize(out.len() + n as usize, 0),
            Piece::Source {
                source,
                offset,
                len,
            } => {
                let at = out.len();
                out.resize(at + len as usize, 0xee);
                model.sources[source]
                    .read_exact_at(&mut out[at..], offset)
                    .unwrap();
            }
        }
    }
    assert_eq!(out.len() as u64, file.len());
    out
}

fn parse(bytes: &[u8]) -> Header {
    gguf::parse(bytes.to_vec(), bytes.len() as u64)
        .map_err(|(error, _)| error)
        .unwrap()
}

fn contents(bytes: &[u8]) -> Contents {
    parse(bytes)
        .tensors()
        .iter()
        .map(|t| {
            let at = t.offset as usize;
            (t.name.clone(), bytes[at..at + t.len as usize].to_vec())
        })
        .collect()
}

fn view(model: &Model, kind: Kind, split: SplitOptions) -> Vec<Vec<u8>> {
    let options = ViewOptions {
        kind,
        clean: false,
        split,
    };
    let files = views::build(model, &options).unwrap().files;
    files
        .iter()
        .map(|(_, built)| materialize(model, &built.file))
        .collect()
}

fn one_each() -> SplitOptions {
    SplitOptions {
        max_tensors: Some(1),
        ..SplitOptions::default()
    }
}

/// Merged, and one tensor per shard: both have these tensors, in this order, with these bytes.
fn assert_serves(source: &Path, wanted: &Contents) {
    let model = model::load(source).unwrap();
    let merged = view(&model, Kind::Merged, SplitOptions::default());
    assert!(contents(&merged[0]) == *wanted, "merged");
    let shards = view(&model, Kind::Shards, one_each());
    assert_eq!(shards.len(), wanted.len().max(1));
    let got: Contents = shards.iter().flat_map(|s| contents(s)).collect();
    assert!(got == *wanted, "split");
}

/// Every problem of a refused model.
fn refused(source: &Path) -> Vec<(PathBuf, String)> {
    match model::load(source) {
        Err(ModelError::Invalid { problems }) => problems,
        other => panic!("wanted Invalid, got {other:?}"),
    }
}

/// The one problem of these bytes as a single file; the full message names the file.
fn refusal(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.gguf");
    fs::write(&path, bytes).unwrap();
    let message = model::load(&path).unwrap_err().to_string();
    assert!(message.contains(path.to_str().unwrap()), "{message}");
    let problems = refused(&path);
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems[0].1.clone()
}

fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// A refusal that must cost neither time nor memory.
fn refusal_fast(bytes: &[u8]) -> String {
    let started = Instant::now();
    let why = refusal(bytes);
    assert!(started.elapsed() < Duration::from_secs(2), "slow: {why}");
    why
}

fn serves(b: &GgufBuilder) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    b.write(&path);
    assert_serves(&path, &wanted(&[b]));
}

fn with_kv(entry: Vec<u8>) -> Vec<u8> {
    let mut b = GgufBuilder::sample(1, 8);
    b.kvs.push(entry);
    b.bytes()
}

#[test]
fn shard_of_zero_bytes() {
    assert_eq!(refusal(b""), "at byte 0: the file has no bytes");
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a"], &["b"]]);
    let good = fs::read(member(dir.path(), 1, 2)).unwrap();
    fs::write(member(dir.path(), 2, 2), b"").unwrap();
    let problems = refused(&member(dir.path(), 1, 2));
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].0, member(dir.path(), 2, 2));
    assert_has(&problems[0].1, &["no bytes"]);
    assert_eq!(fs::read(member(dir.path(), 1, 2)).unwrap(), good);
}

#[test]
fn git_lfs_pointer() {
    let why = refusal(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n");
    assert_has(&why, &["at byte 0", "git-lfs pointer", "git lfs pull"]);
    assert_has(&refusal(b"<html>no"), &["at byte 0", "not a GGUF", "<htm"]);
    assert_has(&refusal(b"GG"), &["at byte 0", "not a GGUF"]);
}

#[test]
fn stale_split_count_in_a_single_file() {
    let mut b = shard(0, 3, 2, &["a", "b"]);
    serves(&b);
    b.kvs.pop();
    serves(&b);
    // The rest of the model is missing: not harmless.
    let why = refusal(&shard(0, 3, 9, &["a", "b"]).bytes());
    assert_has(&why, &["one shard of 3", "2 of 9 tensors"]);
}

#[test]
fn split_keys_of_other_integer_types() {
    for ty in [U8, 1, U16, 3, U32, I32, U64, I64] {
        let value = |v: u64| {
            let size = match ty {
                U8 | 1 => 1,
                U16 | 3 => 2,
                U32 | I32 => 4,
                _ => 8,
            };
            v.to_le_bytes()[..size].to_vec()
        };
        let dir = tempfile::tempdir().unwrap();
        let mut shards = [shard(0, 2, 2, &["a"]), shard(1, 2, 2, &["b"])];
        for (no, b) in shards.iter_mut().enumerate() {
            b.kvs.truncate(1);
            b.kvs.push(kv("split.no", ty, &value(no as u64)));
            b.kvs.push(kv("split.count", ty, &value(2)));
            b.kvs.push(kv("split.tensors.count", ty, &value(2)));
            b.write(&member(dir.path(), no + 1, 2));
        }
        assert_serves(
            &member(dir.path(), 2, 2),
            &wanted(&[&shards[0], &shards[1]]),
        );
    }
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a"], &["b"]]);
    let mut b = shard(1, 2, 2, &["b"]);
    b.kvs[1] = kv("split.no", STR, &string(b"1"));
    b.write(&member(dir.path(), 2, 2));
    let problems = refused(&member(dir.path(), 1, 2));
    assert_eq!(problems[0].0, member(dir.path(), 2, 2));
    assert_eq!(problems[0].1, "split.no is not an integer");
}

#[test]
fn shards_in_the_wrong_place() {
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a"], &["b"]]);
    fs::rename(member(dir.path(), 1, 2), dir.path().join("x")).unwrap();
    fs::rename(member(dir.path(), 2, 2), member(dir.path(), 1, 2)).unwrap();
    fs::rename(dir.path().join("x"), member(dir.path(), 2, 2)).unwrap();
    let problems = refused(&member(dir.path(), 1, 2));
    assert_eq!(problems.len(), 2);
    assert_has(&problems[0].1, &["split.no is 1", "say 0"]);
    assert_has(&problems[1].1, &["split.no is 0", "say 1"]);
}

#[test]
fn duplicate_tensor_names() {
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a", "twice"], &["twice"]]);
    let problems = refused(&member(dir.path(), 1, 2));
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].0, member(dir.path(), 2, 2));
    let first = member(dir.path(), 1, 2);
    assert_has(&problems[0].1, &["\"twice\"", first.to_str().unwrap()]);
    let why = refusal(&shard(0, 1, 2, &["twice", "twice"]).bytes());
    assert_has(&why, &["at byte ", "tensor \"twice\" appears twice"]);
}

#[test]
fn duplicate_keys() {
    let mut b = GgufBuilder::sample(1, 8);
    let at = 24 + b.kvs[0].len();
    b.kvs.push(b.kvs[0].clone());
    let wanted = format!("at byte {at}: key \"general.architecture\" appears twice");
    assert_eq!(refusal(&b.bytes()), wanted);
}

#[test]
fn alignments_that_are_none() {
    let at = 24 + GgufBuilder::sample(0, 0).kvs[0].len() + 8 + "general.alignment".len() + 4;
    let place = format!("at byte {at}: general.alignment is");
    for (ty, value) in [
        (U32, 0u32.to_le_bytes().to_vec()),
        (U32, 48u32.to_le_bytes().to_vec()),
        (U32, u32::MAX.to_le_bytes().to_vec()),
        (I32, 32i32.to_le_bytes().to_vec()),
        (U64, 32u64.to_le_bytes().to_vec()),
        (STR, string(b"32")),
    ] {
        let why = refusal_fast(&with_kv(kv("general.alignment", ty, &value)));
        assert_has(&why, &[&place, "not a u32 power of two"]);
    }
}

#[test]
fn alignment_of_two_gigabytes() {
    let entry = kv("general.alignment", U32, &0x8000_0000u32.to_le_bytes());
    // The data would begin at 2 GiB; the file ends long before.
    let why = refusal_fast(&with_kv(entry.clone()));
    assert_has(&why, &["blk.0.weight", "past the end of the file"]);
    // It is a power of two, so a file that really is so long is right, and the padding costs nothing.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut b = header(1, 1, &[entry, info(b"t", &[2], 0, 0)]);
    b.resize(128, 0);
    fs::write(&path, &b).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len((1 << 31) + 8).unwrap();
    file.write_all_at(b"12345678", 1 << 31).unwrap();
    let model = model::load(&path).unwrap();
    let options = ViewOptions {
        kind: Kind::Merged,
        ..ViewOptions::default()
    };
    let built = &views::build(&model, &options).unwrap().files[0].1;
    let pieces: Vec<_> = built.file.resolve(1 << 31, 8).collect();
    let wanted = Piece::Source {
        source: 0,
        offset: 1 << 31,
        len: 8,
    };
    assert_eq!(pieces, [wanted]);
}

/// Builders at `alignment` whose header ends exactly on, one byte before and one byte after the boundary.
fn boundary_cases(alignment: u64) -> Vec<(usize, GgufBuilder)> {
    let a = alignment as usize;
    [0, 1, a - 1]
        .into_iter()
        .map(|over| {
            let mut b = builder(alignment);
            for i in 0..3 {
                add(&mut b, &format!("t{i}"), &[8], 24, pattern(8, i));
            }
            add(&mut b, "last", &[70], 24, pattern(70, 9));
            let infos: usize = b
                .tensors
                .iter()
                .map(|t| 8 + t.0.len() + 4 + 8 + 4 + 8)
                .sum();
            let body: usize = b.kvs.iter().map(Vec::len).sum();
            let fixed = 24 + body + infos + kv("pad", STR, &string(b"")).len();
            let fill = (a + over - fixed % a) % a;
            b.kvs.push(kv("pad", STR, &string(&vec![b'x'; fill])));
            assert_eq!((fixed + fill) % a, over);
            (fixed + fill, b)
        })
        .collect()
}

#[test]
fn header_that_ends_on_the_boundary() {
    for alignment in [32, 64, 128] {
        for (end, b) in boundary_cases(alignment) {
            let bytes = b.bytes();
            let wanted_offset = (end as u64).next_multiple_of(alignment);
            assert_eq!(parse(&bytes).data_offset(), wanted_offset);
            serves(&b);
            // Split to disk, then merge that set again.
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("m.gguf");
            b.write(&path);
            let shards = view(&model::load(&path).unwrap(), Kind::Shards, one_each());
            for (no, bytes) in shards.iter().enumerate() {
                fs::write(member(dir.path(), no + 1, shards.len()), bytes).unwrap();
            }
            let set = model::load(&member(dir.path(), 1, shards.len())).unwrap();
            let merged = view(&set, Kind::Merged, SplitOptions::default());
            assert!(contents(&merged[0]) == wanted(&[&b]));
            assert_eq!(parse(&merged[0]).alignment(), alignment);
            for t in parse(&merged[0]).tensors() {
                assert_eq!(t.offset % alignment, 0);
            }
        }
    }
}

#[test]
fn tensors_without_elements() {
    for empty_at in [0, 1, 2] {
        let mut b = builder(32);
        for i in 0..3 {
            let data = if i == empty_at {
                vec![]
            } else {
                pattern(40, i)
            };
            add(&mut b, &format!("t{i}"), &[data.len() as u64], 24, data);
        }
        serves(&b);
    }
    let mut b = builder(32);
    add(&mut b, "none", &[32, 0, 7], 2, vec![]);
    serves(&b);
}

#[test]
fn empty_key_and_arrays_of_other_types() {
    let mut b = GgufBuilder::sample(2, 8);
    b.kvs.push(kv("", U8, &[7]));
    b.kvs
        .push(kv("tokenizer.ggml.scores", ARR, &array(U8, 5, b"12345")));
    b.kvs.push(kv("none", ARR, &array(STR, 0, b"")));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    b.write(&path);
    assert_serves(&path, &wanted(&[&b]));
    let model = model::load(&path).unwrap();
    let shards = view(&model, Kind::Shards, one_each());
    let head = parse(&shards[0]);
    for (i, entry) in b.kvs.iter().enumerate() {
        assert_eq!(head.kvs().nth(i).unwrap().entry, entry.as_slice());
    }
    let nested = kv("k", ARR, &array(ARR, 0, b""));
    assert_has(&refusal(&with_kv(nested)), &["at byte ", "\"k\"", "type 9"]);
    let unknown = kv("k", 13, &[0; 8]);
    assert_has(&refusal(&with_kv(unknown)), &["\"k\"", "type 13"]);
}

#[test]
fn unknown_types_reach_to_the_next_offset() {
    // IQ4_KS of ik_llama.cpp: 4 bytes per row besides the blocks, so no block size gives the extent.
    for ty in [156, 4, 31, 43, 999, u32::MAX] {
        let mut b = builder(32);
        add(&mut b, "rows", &[256, 2], ty, pattern(288, 1));
        add(&mut b, "known", &[8], 24, pattern(8, 2));
        add(&mut b, "end", &[256], ty, pattern(160, 3));
        serves(&b);
    }
    // Infos in another order than the data.
    let mut bytes = header(
        2,
        0,
        &[
            info(b"second", &[256], 156, 64),
            info(b"first", &[256], 156, 0),
        ],
    );
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(pattern(64, 1));
    bytes.extend(pattern(96, 2));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    let both = vec![
        (b"second".to_vec(), pattern(96, 2)),
        (b"first".to_vec(), pattern(64, 1)),
    ];
    assert_serves(&path, &both);
}

#[test]
fn young_types_have_their_size() {
    for (ty, values, bytes) in [(39, 32, 17), (40, 64, 36), (41, 128, 18), (42, 64, 18)] {
        let mut b = builder(32);
        add(&mut b, "young", &[values, 3], ty, pattern(bytes * 3, 1));
        add(&mut b, "after", &[8], 24, pattern(8, 2));
        serves(&b);
        let mut b = builder(32);
        add(&mut b, "half", &[values / 2, 2], ty, pattern(bytes, 1));
        assert_has(&refusal(&b.bytes()), &["\"half\"", "not whole blocks"]);
    }
}

#[test]
fn counts_and_lengths_near_2_63() {
    let top = i64::MAX as u64;
    for huge in [top, top + 1, top - 1, u64::MAX, 1 << 60, 1 << 40] {
        let shown = format!(" is {huge}, more than");
        let room = vec![vec![0; 4096]];
        let why = refusal_fast(&header(huge, 0, &room));
        assert_has(&why, &["at byte 8", "number of tensors", &shown]);
        let why = refusal_fast(&header(0, huge, &room));
        assert_has(&why, &["at byte 16", "number of keys", &shown]);
        let length = vec![huge.to_le_bytes().to_vec(), vec![0; 4096]];
        let why = refusal_fast(&header(0, 1, &length));
        assert_has(&why, &["at byte 24", "a key", &shown]);
        let why = refusal_fast(&header(1, 0, &length));
        assert_has(&why, &["at byte 24", "a tensor's name", &shown]);
        let value = kv("k", STR, &huge.to_le_bytes());
        let why = refusal_fast(&header(0, 1, &[value, vec![0; 99]]));
        assert_has(&why, &["at byte 37", "a string", &shown]);
        for element in [U8, STR, U64] {
            let value = kv("k", ARR, &array(element, huge, b""));
            let why = refusal_fast(&header(0, 1, &[value, vec![0; 99]]));
            assert_has(&why, &["at byte 41", "an array's length", &shown]);
        }
    }
}

#[test]
fn dimensions_that_overflow() {
    for dims in [
        vec![1 << 32, 1 << 31],
        vec![1 << 62, 2],
        vec![u64::MAX],
        vec![1 << 32, 1 << 32],
        vec![1 << 16; 4],
        vec![1 << 63, 0],
    ] {
        let bytes = header(1, 0, &[info(b"big", &dims, 0, 0), vec![0; 64]]);
        let why = refusal_fast(&bytes);
        assert_has(&why, &["\"big\"", "number of values overflows"]);
    }
    // The count fits an i64, the bytes do not fit the file or a u64; padded, they would wrap to 0.
    for dims in [vec![1u64 << 62], vec![(1 << 62) - 1], vec![1 << 61]] {
        let bytes = header(1, 0, &[info(b"big", &dims, 0, 0), vec![0; 64]]);
        assert_has(&refusal_fast(&bytes), &["\"big\""]);
    }
    let bytes = header(1, 0, &[info(b"many", &[1; 5], 0, 0), vec![0; 64]]);
    assert_has(&refusal(&bytes), &["\"many\"", "5 dimensions"]);
}

#[test]
fn offsets_past_the_end() {
    for offset in [4096u64, 1 << 40, 1 << 63, u64::MAX - 31] {
        let bytes = header(1, 0, &[info(b"t", &[8], 24, offset), vec![0; 99]]);
        let why = refusal_fast(&bytes);
        let shown = offset.to_string();
        assert_has(
            &why,
            &["at byte 24", "tensor \"t\"", &shown, "past the end"],
        );
    }
    let bytes = header(1, 0, &[info(b"t", &[8], 24, 33), vec![0; 99]]);
    assert_has(&refusal(&bytes), &["offset 33", "not a multiple"]);
}

#[test]
fn every_truncation_is_refused() {
    let b = GgufBuilder::sample(2, 20);
    let bytes = b.bytes();
    let last = parse(&bytes).tensors()[1].clone();
    let needed = (last.offset + last.len) as usize;
    for len in 0..needed {
        let got = gguf::read(len as u64, |buf, at| {
            buf.copy_from_slice(&bytes[at as usize..at as usize + buf.len()]);
            Ok::<(), gguf::Error>(())
        });
        assert!(got.is_err(), "{len} of {needed} bytes");
    }
    let why = refusal(&bytes[..needed - 1]);
    let range = format!("needs bytes {} to {needed}", last.offset);
    assert_has(&why, &["\"blk.1.weight\"", &range, "unfinished"]);
    let head = parse(&bytes).data_offset() as usize;
    let infos: usize = 2 * (8 + "blk.0.weight".len() + 4 + 8 + 4 + 8);
    let unpadded = 24 + b.kvs[0].len() + infos;
    assert!(unpadded <= head);
    let why = refusal(&bytes[..unpadded - 1]);
    assert_has(&why, &["ends inside its header", "a tensor's offset"]);
    // Only padding is missing: nothing is lost.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, &bytes[..needed]).unwrap();
    assert_serves(&path, &wanted(&[&b]));
}

#[test]
fn set_in_download() {
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a"], &["b"], &["c"]]);
    let last = member(dir.path(), 3, 3);
    let len = fs::metadata(&last).unwrap().len();
    let file = File::options().write(true).open(&last).unwrap();
    // 40 bytes of data, 24 of padding.
    file.set_len(len - 24 - 1).unwrap();
    fs::write(dir.path().join("x.incomplete"), b"..").unwrap();
    let problems = refused(&member(dir.path(), 1, 3));
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].0, last);
    assert_has(&problems[0].1, &["\"c\"", "unfinished"]);
}

#[test]
fn offsets_above_4_and_8_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let places = [0u64, 1 << 31, (1 << 32) + 32, (1 << 33) + 64];
    let names = ["t0", "t1", "t2", "t3"];
    let infos: Vec<Vec<u8>> = names
        .iter()
        .zip(places)
        .map(|(name, at)| info(name.as_bytes(), &[64], 24, at))
        .collect();
    let mut head = header(4, 0, &infos);
    head.resize(head.len().next_multiple_of(32), 0);
    fs::write(&path, &head).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len((1 << 33) + 64 + 64 + head.len() as u64)
        .unwrap();
    let mut wanted = Contents::new();
    for (i, (name, at)) in names.iter().zip(places).enumerate() {
        let data = pattern(64, i + 1);
        file.write_all_at(&data, head.len() as u64 + at).unwrap();
        wanted.push((name.as_bytes().to_vec(), data));
    }
    assert_serves(&path, &wanted);
    file.set_len((1 << 33) + 64 + 63 + head.len() as u64)
        .unwrap();
    assert_has(&refused(&path)[0].1, &["\"t3\"", "unfinished"]);
}

#[test]
fn tensor_longer_than_8_gigabytes_keeps_its_extent() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let long = (1u64 << 33) + 5;
    let after = long.next_multiple_of(32);
    let infos = [info(b"long", &[long], 24, 0), info(b"t", &[8], 24, after)];
    let mut head = header(2, 0, &infos);
    head.resize(head.len().next_multiple_of(32), 0);
    fs::write(&path, &head).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let end = head.len() as u64 + after + 8;
    file.set_len(end).unwrap();
    file.write_all_at(b"12345678", end - 8).unwrap();
    let model = model::load(&path).unwrap();
    let options = ViewOptions {
        kind: Kind::Shards,
        clean: false,
        split: one_each(),
    };
    let files = views::build(&model, &options).unwrap().files;
    assert_eq!(files.len(), 2);
    assert_eq!(files[0].1.tensor_bytes, long);
    let second = contents(&materialize(&model, &files[1].1.file));
    assert_eq!(second, [(b"t".to_vec(), b"12345678".to_vec())]);
}

#[test]
fn big_endian_and_old_versions() {
    let mut bytes = GgufBuilder::sample(1, 8).bytes();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert_has(&refusal(&bytes), &["at byte 4", "big-endian"]);
    for version in [1u32, 4, 99] {
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        let shown = format!("version {version} is not supported");
        assert_has(&refusal(&bytes), &["at byte 4", &shown]);
    }
    bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, &bytes).unwrap();
    assert_serves(&path, &wanted(&[&GgufBuilder::sample(1, 8)]));
}

#[test]
fn header_of_16_megabytes() {
    let tokens: Vec<u8> = (0..250_000u32)
        .flat_map(|i| string(format!("token-{i:050}").as_bytes()))
        .collect();
    assert!(tokens.len() >= 16_000_000);
    let mut b = GgufBuilder::sample(3, 100);
    let entry = kv("tokenizer.ggml.tokens", ARR, &array(STR, 250_000, &tokens));
    b.kvs.push(entry.clone());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    b.write(&path);
    let started = Instant::now();
    assert_serves(&path, &wanted(&[&b]));
    assert!(started.elapsed() < Duration::from_secs(20));
    let model = model::load(&path).unwrap();
    let shards = view(&model, Kind::Shards, one_each());
    let head = parse(&shards[0]);
    assert!(head.get(b"tokenizer.ggml.tokens").unwrap().entry == entry);
    assert!(shards[1].len() < 2000, "later shards carry no vocabulary");
}

#[test]
fn tensor_names_longer_than_64_bytes() {
    let mut b = builder(32);
    let stem = "n".repeat(99);
    add(&mut b, &format!("{stem}1"), &[8], 24, pattern(8, 1));
    add(&mut b, &format!("{stem}2"), &[8], 24, pattern(8, 2));
    serves(&b);
}

#[test]
fn metadata_only_first_shard() {
    let dir = tempfile::tempdir().unwrap();
    let shards = write_set(dir.path(), &[&[], &["a", "b"], &["c"]]);
    let all = wanted(&shards.iter().collect::<Vec<_>>());
    assert_eq!(all.len(), 3);
    assert_serves(&member(dir.path(), 1, 3), &all);
    let model = model::load(&member(dir.path(), 3, 3)).unwrap();
    let split = SplitOptions {
        no_tensor_first: true,
        ..one_each()
    };
    let files = view(&model, Kind::Shards, split);
    let counts: Vec<usize> = files.iter().map(|f| contents(f).len()).collect();
    assert_eq!(counts, [0, 1, 1, 1]);
}

#[test]
fn hugging_face_cache_of_symlinks() {
    let dir = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (dir.path().join("blobs"), dir.path().join("snapshots/ab"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let names: [&[&str]; 3] = [&["a"], &["b"], &["c"]];
    let shards = write_set(&blobs, &names);
    // Blob names sort in another order than the shards.
    for (no, blob) in [(1, "ff"), (2, "00"), (3, "77")] {
        fs::rename(member(&blobs, no, 3), blobs.join(blob)).unwrap();
        let target = Path::new("../../blobs").join(blob);
        symlink(target, member(&snapshot, no, 3)).unwrap();
    }
    let all = wanted(&shards.iter().collect::<Vec<_>>());
    assert_serves(&member(&snapshot, 2, 3), &all);
    assert_serves(&snapshot, &all);
    // Only shard 2 is there.
    fs::remove_file(member(&snapshot, 1, 3)).unwrap();
    fs::remove_file(member(&snapshot, 3, 3)).unwrap();
    for source in [snapshot.clone(), member(&snapshot, 2, 3)] {
        let missing = "missing".to_owned();
        let wanted = [
            (member(&snapshot, 1, 3), missing.clone()),
            (member(&snapshot, 3, 3), missing),
        ];
        assert_eq!(refused(&source), wanted);
    }
    // A link to a blob that is not there yet.
    symlink("../../blobs/gone", member(&snapshot, 1, 3)).unwrap();
    assert_eq!(refused(&member(&snapshot, 2, 3)).len(), 2);
}

const ODD: [&[u8]; 8] = [
    b"with space, comma",
    b"it's \"quoted\"",
    b"100%s $HOME `id`",
    b"(paren) [x] {y}",
    b"new\nline\ttab",
    b"back\\slash\\040",
    b"-starts-with-dash",
    b"not utf-8 \xff\xfe",
];

#[test]
fn odd_paths() {
    for odd in ODD {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(OsStr::from_bytes(odd));
        fs::create_dir(&dir).unwrap();
        let b = GgufBuilder::sample(2, 30);
        let name = [odd, b".gguf"].concat();
        let path = dir.join(OsStr::from_bytes(&name));
        b.write(&path);
        assert_serves(&path, &wanted(&[&b]));
        let model = model::load(&path).unwrap();
        let options = ViewOptions {
            split: one_each(),
            ..ViewOptions::default()
        };
        let files = views::build(&model, &options).unwrap().files;
        let first = [odd, b"-00001-of-00002.gguf"].concat();
        assert_eq!(files[0].0.as_bytes(), first);
    }
}

fn command(args: &[&OsStr]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args(args)
        .output()
        .unwrap()
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let args = ["unmount".as_ref(), "--lazy".as_ref(), self.0.as_os_str()];
        drop(command(&args));
    }
}

fn assert_ok(what: &str, odd: &[u8], out: &Output) {
    let (odd, err) = (
        String::from_utf8_lossy(odd),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(out.status.success(), "{what} with {odd:?}: {err}");
}

#[test]
fn odd_paths_through_the_command_and_the_kernel() {
    assert!(Path::new("/dev/fuse").exists(), "this test needs /dev/fuse");
    for odd in ODD {
        let root = tempfile::tempdir().unwrap();
        let mount = root.path().join(OsStr::from_bytes(odd));
        fs::create_dir(&mount).unwrap();
        let b = GgufBuilder::sample(2, 30);
        let name = [odd, b".gguf"].concat();
        let path = root.path().join(OsStr::from_bytes(&name));
        b.write(&path);
        assert_ok("check", odd, &command(&["check".as_ref(), path.as_ref()]));
        let args = [
            "mount".as_ref(),
            path.as_os_str(),
            mount.as_os_str(),
            "--split-max-tensors".as_ref(),
            "1".as_ref(),
        ];
        let guard = Unmount(mount.clone());
        assert_ok("mount", odd, &command(&args));
        let mut got = Contents::new();
        for no in 1..=2 {
            let name = [odd, format!("-0000{no}-of-00002.gguf").as_bytes()].concat();
            let bytes = fs::read(mount.join(OsStr::from_bytes(&name))).unwrap();
            got.extend(contents(&bytes));
        }
        assert!(got == wanted(&[&b]));
        let args = ["status".as_ref(), mount.as_os_str()];
        assert_ok("status", odd, &command(&args));
        let args = ["unmount".as_ref(), mount.as_os_str()];
        assert_ok("unmount", odd, &command(&args));
        assert_eq!(fs::read_dir(&mount).unwrap().count(), 0);
        drop(guard);
    }
}

#[test]
fn the_command_names_file_offset_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(OsStr::from_bytes(b"bad \xff.gguf"));
    fs::write(&path, header(1 << 62, 0, &[vec![0; 64]])).unwrap();
    let out = command(&["check".as_ref(), path.as_ref()]);
    assert_eq!(out.status.code(), Some(4));
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert_has(&said, &["bad ", ".gguf", "at byte 8", "number of tensors"]);
}

/// Names, F32 or I8 or unknown type, number of values.
fn tensors() -> impl Strategy<Value = Vec<(u32, u64)>> {
    let one = (prop_oneof![Just(0u32), Just(24), Just(8)], 0u64..40);
    proptest::collection::vec(one, 0..25)
}

fn random_model(tensors: &[(u32, u64)], alignment: u64) -> GgufBuilder {
    let mut b = builder(alignment);
    for (i, &(ty, n)) in tensors.iter().enumerate() {
        let (dim, bytes) = match ty {
            0 => (n, n * 4),
            8 => (n * 32, n * 34),
            _ => (n, n),
        };
        add(
            &mut b,
            &format!("t{i}"),
            &[dim],
            ty,
            pattern(bytes as usize, i),
        );
    }
    b
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        file_len in prop_oneof![0u64..400, any::<u64>()],
        magic in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if magic {
            let start = b"GGUF\x03\0\0\0".iter().take(bytes.len()).copied().collect::<Vec<_>>();
            bytes[..start.len()].copy_from_slice(&start);
        }
        drop(gguf::parse(bytes, file_len));
    }

    #[test]
    fn mutated_headers_never_panic_and_stay_in_bounds(
        given in tensors(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        cutting in any::<bool>(),
    ) {
        let mut bytes = random_model(&given, 64).bytes();
        let head = parse(&bytes).data_offset() as usize;
        for (at, value) in changes {
            bytes[at.index(head)] = value;
        }
        if cutting {
            bytes.truncate(cut.index(bytes.len()));
        }
        let len = bytes.len() as u64;
        if let Ok(header) = gguf::parse(bytes, len) {
            for t in header.tensors() {
                prop_assert!(t.len == 0 || t.offset.checked_add(t.len).is_some_and(|end| end <= len));
                prop_assert_eq!((t.offset - header.data_offset()) % header.alignment(), 0);
            }
        }
    }

    #[test]
    fn split_models_have_each_tensor_once(
        given in tensors(),
        alignment in prop_oneof![Just(8u64), Just(32), Just(64), Just(256)],
        max_tensors in proptest::option::of(1u64..9),
        max_size in proptest::option::of(1u64..3000),
        max_file_size in proptest::option::of(700u64..6000),
        no_tensor_first in any::<bool>(),
    ) {
        let b = random_model(&given, alignment);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        b.write(&path);
        let model = model::load(&path).unwrap();
        let split = SplitOptions { max_tensors, max_size, max_file_size, no_tensor_first };
        let options = ViewOptions { kind: Kind::Shards, clean: false, split };
        let Ok(files) = views::build(&model, &options) else {
            // Only the strict limit may be impossible, and one below the largest single-tensor file.
            let limit = max_file_size.unwrap();
            prop_assert!(limit < 40 * 34 + 800, "refused at {}", limit);
            return Ok(());
        };
        let mut got = Contents::new();
        let count = files.files.len();
        for (no, (name, built)) in files.files.iter().enumerate() {
            let bytes = materialize(&model, &built.file);
            if let Some(limit) = max_file_size {
                prop_assert!(bytes.len() as u64 <= limit, "{} > {}", bytes.len(), limit);
            }
            let head = parse(&bytes);
            for (key, value) in [("split.no", no), ("split.count", count), ("split.tensors.count", given.len())] {
                prop_assert_eq!(head.get(key.as_bytes()).unwrap().int(), Some(value as i128));
            }
            prop_assert_eq!(head.data_offset(), built.header_len);
            prop_assert_eq!(head.tensors().len() as u64, built.n_tensors);
            if let Some(limit) = max_tensors {
                prop_assert!(built.n_tensors <= limit);
            }
            got.extend(contents(&bytes));
            fs::write(dir.path().join(name), &bytes).unwrap();
        }
        prop_assert!(got == wanted(&[&b]));
        // The set that these bytes form is again a model with the same tensors.
        let set = model::load(&dir.path().join(&files.files[0].0)).unwrap();
        let merged = view(&set, Kind::Merged, SplitOptions::default());
        prop_assert!(contents(&merged[0]) == got);
    }
}

/// Its length comes from the next offset, so nothing else would notice.
#[test]
fn unknown_type_past_the_end_is_refused() {
    for offset in [4096u64, 1 << 40] {
        let bytes = header(1, 0, &[info(b"t", &[256], 156, offset), vec![0; 99]]);
        let why = refusal(&bytes);
        assert_has(&why, &["tensor \"t\"", "past the end"]);
    }
}

/// A download cut off exactly where (or before) an unknown-type tensor begins.
#[test]
fn unknown_type_cut_off_whole_is_refused() {
    let mut b = builder(32);
    add(&mut b, "known", &[64], 24, pattern(64, 1));
    add(&mut b, "gone", &[256], 156, pattern(160, 2));
    let bytes = b.bytes();
    let at = parse(&bytes).tensors()[1].offset as usize;
    assert_has(&refusal(&bytes[..at]), &["\"gone\""]);
}

/// Of two tensors at one offset the one without elements has no bytes.
#[test]
fn empty_tensor_of_unknown_type_has_no_bytes() {
    let mut b = builder(32);
    add(&mut b, "none", &[0], 156, vec![]);
    add(&mut b, "some", &[256], 156, pattern(160, 2));
    serves(&b);
}

/// Version 0 is no big-endian file.
#[test]
fn version_0() {
    let mut bytes = GgufBuilder::sample(1, 8).bytes();
    bytes[4..8].copy_from_slice(&0u32.to_le_bytes());
    assert_has(&refusal(&bytes), &["version 0"]);
}

/// The offset of a duplicate tensor is that of its entry, as for all other tensor problems.
#[test]
fn duplicate_tensor_offset() {
    let infos = [info(b"twice", &[8], 24, 0), info(b"twice", &[8], 24, 32)];
    let at = 24 + infos[0].len();
    let why = refusal(&header(2, 0, &[infos.concat(), vec![0; 99]]));
    assert_has(&why, &[&format!("at byte {at}:")]);
}

#[test]
fn overlapping_tensors() {
    let infos = [info(b"a", &[64], 24, 0), info(b"b", &[64], 24, 32)];
    let why = refusal(&header(2, 0, &[infos.concat(), vec![0; 199]]));
    assert_has(&why, &["overlap"]);
}

#[test]
fn a_header_of_gigabytes_is_refused_before_it_fills_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let entry = kv("huge", ARR, &array(U64, 1 << 30, &[]));
    fs::write(&path, header(0, 1, &[entry])).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 34)
        .unwrap();
    let mut most = 0;
    let file = File::open(&path).unwrap();
    let read = gguf::read(1 << 34, |buf, at| {
        most = most.max(at + buf.len() as u64);
        // The rest is a hole: reading it would only cost time.
        if at == 0 {
            file.read_exact_at(&mut buf[..4096], 0).unwrap()
        }
        Ok::<(), gguf::Error>(())
    });
    assert!(
        read.unwrap_err()
            .to_string()
            .contains("the header's length")
    );
    assert!(most <= 1 << 30, "{most} bytes were read");
}

#[test]
fn a_set_is_judged_as_a_whole_even_if_a_shard_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    write_set(dir.path(), &[&["a"], &["b"], &["c"]]);
    fs::remove_file(member(dir.path(), 3, 3)).unwrap();
    shard(7, 5, 3, &["a"]).write(&member(dir.path(), 2, 3));
    let why = model::load(&member(dir.path(), 1, 3))
        .unwrap_err()
        .to_string();
    for part in [
        "split.no is 7",
        "split.count is 5",
        "tensor \"a\" is also in",
        "00003-of-00003.gguf: missing",
    ] {
        assert!(why.contains(part), "{part} is not in {why}");
    }
}

#[test]
fn a_name_that_promises_thousands_of_shards_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m-00001-of-65535.gguf");
    shard(0, 65535, 1, &["a"]).write(&path);
    let why = model::load(&path).unwrap_err().to_string();
    assert!(
        why.contains("(65534 files)") && why.lines().count() < 5,
        "{why}"
    );
}
