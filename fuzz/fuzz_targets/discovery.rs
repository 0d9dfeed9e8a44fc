//! Any names in a directory: each GGUF file belongs to at most one model of its own, a set names its members by the pattern
//! of the one that is there, and nothing is as long as a number in a name says.
#![no_main]

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ggufuse::model::{Place, ShardName, models_in};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let names: BTreeSet<OsString> = data
        .split(|&b| b == b'\n' || b == b'/' || b == 0)
        .filter(|name| !name.is_empty() && name.len() <= 255)
        .map(|name| OsStr::from_bytes(name).to_owned())
        .collect();
    for name in &names {
        if let Some(shard) = ShardName::parse(name) {
            assert!((1..=shard.count).contains(&shard.no));
            assert_eq!(&shard.sibling(shard.no), name);
            let first = ShardName::parse(&shard.sibling(1)).unwrap();
            assert_eq!((first.no, first.count, &first.prefix), (1, shard.count, &shard.prefix));
        }
    }
    let dir = Path::new("/models");
    let found = models_in(&Place::of(dir), names.iter().cloned());
    let mut taken = BTreeSet::new();
    for model in &found {
        assert!(!model.stem.is_empty() && !model.files.is_empty());
        let pieces: Vec<_> = model.files.iter().flatten().collect();
        assert!(pieces.len() <= 200_000, "{} files of {} names", pieces.len(), names.len());
        assert!(pieces.iter().all(|path| path.parent() == Some(dir)));
        let there: Vec<_> = pieces
            .iter()
            .filter_map(|path| path.file_name())
            .filter(|name| names.contains(*name))
            .collect();
        assert!(!there.is_empty(), "a model of names that are not there");
        for name in there {
            assert!(taken.insert(name.to_owned()), "{name:?} is of two models");
        }
    }
    // The order in which a directory gives its names does not count.
    let again = models_in(&Place::of(dir), names.iter().rev().cloned());
    assert_eq!(found, again);
});
