//! Raw pieces of a file: every way they are named, the joined bytes, and joins that the header disproves.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{GgufBuilder, Mounted, ggufuse, kv, peers};
use ggufuse::layout::{Piece, SplitOptions};
use ggufuse::model::{self, Model, ModelError};
use ggufuse::views::{self, Kind, ViewOptions};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

/// Ways to name three pieces of `m.gguf`.
const FORMS: &[[&str; 3]] = &[
    ["m.gguf.part1of3", "m.gguf.part2of3", "m.gguf.part3of3"],
    ["m.gguf.part00", "m.gguf.part01", "m.gguf.part02"],
    ["m.gguf.part1", "m.gguf.part2", "m.gguf.part3"],
    ["m.gguf.partaa", "m.gguf.partab", "m.gguf.partac"],
    ["m.gguf-split-a", "m.gguf-split-b", "m.gguf-split-c"],
    ["m.gguf.a", "m.gguf.b", "m.gguf.c"],
    ["m.gguf.aa", "m.gguf.ab", "m.gguf.ac"],
    ["m.gguf.001", "m.gguf.002", "m.gguf.003"],
    [
        "m.gguf-00001-of-00003",
        "m.gguf-00002-of-00003",
        "m.gguf-00003-of-00003",
    ],
    [
        "m-chunk-001-of-003.gguf",
        "m-chunk-002-of-003.gguf",
        "m-chunk-003-of-003.gguf",
    ],
];

fn write(dir: &Path, names: &[&str], bytes: &[u8], cuts: &[usize]) -> Vec<PathBuf> {
    let ends = cuts.iter().copied().chain([bytes.len()]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let paths: Vec<_> = names.iter().map(|name| dir.join(name)).collect();
    for ((path, from), to) in paths.iter().zip(starts).zip(ends) {
        fs::write(path, &bytes[from..to]).unwrap();
    }
    paths
}

fn view(model: &Model, kind: Kind) -> Vec<(String, Vec<u8>)> {
    let options = ViewOptions {
        kind,
        clean: false,
        split: SplitOptions {
            max_tensors: Some(2),
            ..SplitOptions::default()
        },
    };
    let files = views::build(model, &options).unwrap().files;
    let bytes = |file: &ggufuse::layout::VirtualFile| {
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
                    let part = &mut out[at..];
                    model.sources[source].read_exact_at(part, offset).unwrap();
                }
            }
        }
        out
    };
    files
        .iter()
        .map(|(name, built)| (name.to_str().unwrap().to_owned(), bytes(&built.file)))
        .collect()
}

/// File name and reason of every problem.
fn refused(source: &Path) -> Vec<(String, String)> {
    match model::load(source) {
        Err(ModelError::Invalid { problems }) => problems
            .into_iter()
            .map(|(path, why)| (path.file_name().unwrap().to_str().unwrap().to_owned(), why))
            .collect(),
        other => panic!("wanted Invalid, got {other:?}"),
    }
}

#[track_caller]
fn refused_for(source: &Path, file: &str, why: &str) {
    let problems = refused(source);
    assert!(
        problems.iter().any(|(f, w)| f == file && w.contains(why)),
        "no {why:?} of {file} in {problems:?}"
    );
}

#[test]
fn every_form_of_name_is_joined_and_sharded() {
    let whole = GgufBuilder::sample(5, 1000).bytes();
    let single = tempfile::tempdir().unwrap();
    fs::write(single.path().join("m.gguf"), &whole).unwrap();
    let single = model::load(single.path()).unwrap();
    let third = whole.len().div_ceil(3);
    for names in FORMS {
        let dir = tempfile::tempdir().unwrap();
        let paths = write(dir.path(), names, &whole, &[third, 2 * third]);
        for source in paths.iter().map(PathBuf::as_path).chain([dir.path()]) {
            let model = model::load(source).unwrap_or_else(|e| panic!("{source:?}: {e}"));
            assert!(
                view(&model, Kind::Auto) == [("m.gguf".to_owned(), whole.clone())],
                "{names:?}"
            );
            assert!(
                view(&model, Kind::Merged) == view(&single, Kind::Merged),
                "{names:?}"
            );
            assert!(
                view(&model, Kind::Shards) == view(&single, Kind::Shards),
                "{names:?}"
            );
        }
        // A piece alone is not the model.
        fs::remove_file(&paths[1]).unwrap();
        refused_for(&paths[2], names[1], "missing");
        fs::rename(&paths[0], dir.path().join("elsewhere")).unwrap();
        let problems = model::load(&paths[2]);
        // Alone, `m.gguf.ac` is no piece: many names end in two letters.
        let says = if names[0].ends_with("aa") {
            "not a GGUF"
        } else {
            "missing"
        };
        let why = problems.unwrap_err().to_string();
        assert!(why.contains(says), "{names:?}: {why}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn cut_anywhere(
        tensors in 1usize..5, len in 1u64..300, alignment in prop::sample::select(vec![8u64, 32, 4096]),
        cuts in prop::collection::vec(0.0f64..1.0, 1..5),
    ) {
        let sample = GgufBuilder { alignment, ..GgufBuilder::sample(tensors, len) };
        let sample = if alignment == 32 { sample } else {
            let mut sample = sample;
            sample.kvs.push(kv("general.alignment", 4, &(alignment as u32).to_le_bytes()));
            sample
        };
        let whole = sample.bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * whole.len() as f64) as usize).collect();
        cuts.sort_unstable();
        let mut lens: Vec<usize> = cuts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        lens.extend([cuts[0], whole.len() - cuts[cuts.len() - 1]]);
        // One shorter piece before the last is taken for a wrong order.
        let most = lens.iter().max().unwrap();
        prop_assume!(lens.iter().filter(|len| *len < most).count() != 1 || lens.len() == 2);
        prop_assume!(cuts[0] >= 4);
        let names: Vec<String> = (0..=cuts.len()).map(|no| format!("m.gguf.{no:03}")).collect();
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &names.iter().map(String::as_str).collect::<Vec<_>>(), &whole, &cuts);
        let model = model::load(dir.path()).unwrap();
        prop_assert!(view(&model, Kind::Auto)[0].1 == whole);
        let one = tempfile::tempdir().unwrap();
        fs::write(one.path().join("m.gguf"), &whole).unwrap();
        let single = model::load(one.path()).unwrap();
        prop_assert!(view(&model, Kind::Shards) == view(&single, Kind::Shards));
        prop_assert!(view(&model, Kind::Merged) == view(&single, Kind::Merged));
    }
}

#[test]
fn a_wrong_order_is_refused() {
    let whole = GgufBuilder::sample(5, 1000).bytes();
    let cut = whole.len() / 3 + 100;
    let names = FORMS[1];
    for swapped in [[0, 1], [0, 2], [1, 2]] {
        let dir = tempfile::tempdir().unwrap();
        let mut order = names;
        order.swap(swapped[0], swapped[1]);
        write(dir.path(), &order, &whole, &[cut, 2 * cut]);
        let problems = refused(dir.path());
        assert!(
            problems.iter().any(|(_, why)| why.contains("wrong")),
            "{swapped:?}: {problems:?}"
        );
    }
}

#[test]
fn missing_and_foreign_pieces_are_refused() {
    let whole = GgufBuilder::sample(5, 1000).bytes();
    let third = whole.len().div_ceil(3);
    let cuts = [third, 2 * third];
    let dir = tempfile::tempdir().unwrap();
    let paths = write(dir.path(), &FORMS[1], &whole, &cuts);
    let keep = fs::read(&paths[2]).unwrap();
    // Without a count in the names only the header knows that the last one is missing.
    fs::remove_file(&paths[2]).unwrap();
    refused_for(dir.path(), "m.gguf.part00", "one is missing at the end");
    fs::write(&paths[2], &keep[..keep.len() - 64]).unwrap();
    refused_for(dir.path(), "m.gguf.part00", "cut short");
    fs::write(&paths[2], [&keep[..], &[7; 64]].concat()).unwrap();
    refused_for(dir.path(), "m.gguf.part02", "64 bytes too many");
    fs::write(&paths[2], &keep).unwrap();
    fs::write(dir.path().join("m.gguf.part03"), b"more").unwrap();
    refused_for(dir.path(), "m.gguf.part03", "4 bytes too many");
    fs::write(dir.path().join("m.gguf.part03"), &whole).unwrap();
    refused_for(dir.path(), "m.gguf.part03", "header of its own");
    fs::remove_file(dir.path().join("m.gguf.part03")).unwrap();
    assert!(model::load(dir.path()).is_ok());
    fs::write(dir.path().join("m.gguf.part05"), b"more").unwrap();
    refused_for(dir.path(), "m.gguf.part03", "missing");
    // The refusal is exit 4, with every reason.
    let out = ggufuse(&["check", paths[0].to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(4));
}

#[test]
fn names_that_are_only_like_those_of_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let whole = GgufBuilder::sample(2, 100);
    whole.write(&dir.path().join("m.gguf"));
    for name in [
        "m.gguf.md",
        "m.gguf.txt",
        "m.gguf.bak",
        "m.gguf.part",
        "m.gguf.aria2",
    ] {
        fs::write(dir.path().join(name), b"text").unwrap();
    }
    let model = model::load(dir.path()).unwrap();
    assert_eq!(model.sources.len(), 1);
    // A piece of a name that is taken is another model.
    fs::write(dir.path().join("m.gguf.a"), whole.bytes()).unwrap();
    assert!(matches!(
        model::load(dir.path()),
        Err(ModelError::ManyModels { n: 2, .. })
    ));
    assert!(model::load(&dir.path().join("m.gguf")).is_ok());
    assert!(model::load(&dir.path().join("m.gguf.a")).is_ok());
}

#[test]
fn shards_in_pieces_and_shards_that_are_called_chunks() {
    let whole = tempfile::tempdir().unwrap();
    let path = whole.path().join("m.gguf");
    GgufBuilder::sample(5, 1000).write(&path);
    let single = model::load(&path).unwrap();
    let shards = view(&single, Kind::Shards);
    let dir = tempfile::tempdir().unwrap();
    let cut = shards[1].1.len() / 2;
    let pieces = ["1of2", "2of2"].map(|no| format!("{}.part{no}", shards[1].0));
    write(
        dir.path(),
        &pieces.each_ref().map(String::as_str),
        &shards[1].1,
        &[cut],
    );
    for (name, bytes) in [&shards[0], &shards[2]] {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let set = model::load(dir.path()).unwrap();
    assert_eq!((set.headers.len(), set.sources.len()), (3, 4));
    assert!(view(&set, Kind::Shards) == shards);
    assert_eq!(view(&set, Kind::Auto)[0].0, "m.gguf");
    let piece = dir.path().join(&pieces[1]);
    assert!(view(&model::load(&piece).unwrap(), Kind::Shards) == shards);
    fs::remove_file(&piece).unwrap();
    refused_for(dir.path(), &pieces[1], "missing");

    let chunks = tempfile::tempdir().unwrap();
    for (no, (_, bytes)) in (1..).zip(&shards) {
        let name = format!("m-chunk-{no:05}-of-00003.gguf");
        fs::write(chunks.path().join(name), bytes).unwrap();
    }
    let set = model::load(chunks.path()).unwrap();
    assert!(set.is_set);
    assert_eq!(view(&set, Kind::Auto)[0].0, "m-chunk.gguf");
}

#[test]
fn the_pieces_of_gemma_have_the_published_sum() {
    let whole = peers().join("gemma.gguf");
    let dir = tempfile::tempdir().unwrap();
    // The names and lengths of the four that the package has.
    let name = "gemma-3-270m-q4_k_m.gguf";
    let bytes = fs::read(&whole).unwrap();
    let names = ["00", "01", "02", "03"].map(|no| format!("{name}.part{no}"));
    let cuts = [1, 2, 3].map(|n| n * 63_963_136);
    let paths = write(
        dir.path(),
        &names.each_ref().map(String::as_str),
        &bytes,
        &cuts,
    );
    let mount = Mounted::new(&paths[2], &[]);
    assert_eq!(mount.names(), [name]);
    let seen = fs::read(mount.path().join(name)).unwrap();
    let sum = Sha256::digest(&seen);
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    );
    mount.unmount();
    // Divided, and merged again by the peer's own tool.
    let shards = Mounted::new(
        dir.path(),
        &["--view", "shards", "--split-max-size", "100M"],
    );
    let first = shards.path().join(&shards.names()[0]);
    let back = Mounted::new(&first, &["--headers", "clean"]);
    let again = fs::read(back.path().join(name)).unwrap();
    assert!(again == bytes);
    back.unmount();
    shards.unmount();
}
