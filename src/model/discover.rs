//! From a path to the files of one model. Names come from the directory entry, bytes from what it links to.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::ModelError;
use super::naming::{ShardName, stem};

/// The files of one model, in shard order; not yet opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The model's name, without `.gguf`.
    pub stem: OsString,
    /// The files. A missing shard's path is among them.
    pub files: Vec<PathBuf>,
    /// Whether their names are those of a shard set.
    pub is_set: bool,
}

/// Finds the model that `source` names: a file, any member of a shard set, or a directory with one model.
///
/// # Errors
/// `Io` when a path cannot be looked at; `NoModel` and `ManyModels` for a directory.
pub fn find(source: &Path) -> Result<Found, ModelError> {
    let io = |path: &Path, error| ModelError::Io {
        path: path.to_owned(),
        error,
    };
    if !std::fs::metadata(source)
        .map_err(|e| io(source, e))?
        .is_dir()
    {
        return of_file(source);
    }
    let mut models: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for entry in std::fs::read_dir(source).map_err(|e| io(source, e))? {
        let entry = entry.map_err(|e| io(source, e))?;
        let path = entry.path();
        let name = entry.file_name();
        if stem(&name) == name || path.is_dir() {
            continue;
        }
        // The whole name of member 1 stands for a set, so that two sets of one prefix stay apart.
        let key = ShardName::parse(&name).map_or(name, |shard| shard.sibling(1));
        models.entry(key).or_insert(path);
    }
    let mut names = models
        .keys()
        .map(|n| n.to_string_lossy().into_owned())
        .collect::<Vec<_>>();
    match (models.into_values().next(), names.len()) {
        (Some(path), 1) => of_file(&path),
        (None, _) => Err(ModelError::NoModel {
            path: source.to_owned(),
        }),
        (Some(_), n) => {
            names.truncate(5);
            Err(ModelError::ManyModels {
                path: source.to_owned(),
                n,
                some: names.join(", "),
            })
        }
    }
}

/// No set has more members: `split.count` is a u16. A name that claims more is a single file's.
const MAX_SHARDS: u32 = 65_535;

fn of_file(path: &Path) -> Result<Found, ModelError> {
    let name = path.file_name().unwrap_or_default();
    let Some(shard) = ShardName::parse(name).filter(|s| s.count <= MAX_SHARDS) else {
        return Ok(Found {
            stem: stem(name),
            files: vec![path.to_owned()],
            is_set: false,
        });
    };
    let dir = path.parent().unwrap_or(Path::new(""));
    let files = (1..=shard.count).map(|no| {
        // The given name itself may end in .GGUF.
        if no == shard.no {
            path.to_owned()
        } else {
            dir.join(shard.sibling(no))
        }
    });
    Ok(Found {
        stem: shard.stem(),
        files: files.collect(),
        is_set: true,
    })
}
