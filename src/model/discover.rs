//! From names to the files of models. Names come from directory entries, bytes from what they link to.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::ModelError;
use super::companions::{is_projector, owners};
use super::naming::{ShardName, stem};
use super::pieces::{PieceName, Series};

/// The files of one model, in shard order; not yet opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The model's name, without `.gguf`.
    pub stem: OsString,
    /// The files, each as its pieces (one, where it is whole). A missing one's path is among them.
    pub files: Vec<Vec<PathBuf>>,
    /// Whether their names are those of a shard set.
    pub is_set: bool,
    /// Its projectors: the name to show each by, and its path.
    pub projectors: Vec<(OsString, PathBuf)>,
}

/// Where files lie, and what their names there begin with that is not part of what they are called.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// The beginning of the names.
    pub prefix: &'a OsStr,
}

impl Place<'_> {
    /// Files whose names are what they are called.
    pub fn of(dir: &Path) -> Place<'_> {
        Place {
            dir,
            prefix: OsStr::new(""),
        }
    }

    fn path(&self, name: &OsStr) -> PathBuf {
        let mut full = self.prefix.to_owned();
        full.push(name);
        self.dir.join(full)
    }
}

impl Found {
    /// The paths of all pieces of all files, and of the projectors.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let projectors = self.projectors.iter().map(|(_, path)| path);
        (self.files.iter().flatten())
            .chain(projectors)
            .map(PathBuf::as_path)
    }
}

/// Finds the model that `source` names: a file, any member of a shard set, any piece of a file, or a directory with
/// one model.
///
/// # Errors
/// `Io` when a path cannot be looked at; `NoModel` and `ManyModels` for a directory.
pub fn find(source: &Path) -> Result<Found, ModelError> {
    let io = |error| ModelError::Io {
        path: source.to_owned(),
        error,
    };
    if !std::fs::metadata(source).map_err(io)?.is_dir() {
        return Ok(of_file(source));
    }
    let mut models = models_in(&Place::of(source), files_in(source).map_err(io)?);
    match (models.pop(), models.len()) {
        (Some(model), 0) => Ok(model),
        (None, _) => Err(ModelError::NoModel {
            path: source.to_owned(),
        }),
        (Some(last), n) => {
            let all = models.iter().chain([&last]).take(5);
            let some: Vec<_> = all.map(|model| model.stem.to_string_lossy()).collect();
            Err(ModelError::ManyModels {
                path: source.to_owned(),
                n: n.saturating_add(1),
                some: some.join(", "),
            })
        }
    }
}

/// The names in a directory that are not those of directories.
fn files_in(dir: &Path) -> std::io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if is_model_file(&name) && !entry.path().is_dir() {
            names.push(name);
        }
    }
    Ok(names)
}

/// Whether a name may be that of a model's file, or of a piece of one.
pub fn is_model_file(name: &OsString) -> bool {
    stem(name) != *name || PieceName::parse(name).is_some()
}

fn of_file(path: &Path) -> Found {
    let name = path.file_name().unwrap_or_default().to_owned();
    let single = || Found {
        stem: stem(&name),
        files: vec![vec![path.to_owned()]],
        is_set: false,
        projectors: Vec::new(),
    };
    if PieceName::parse(&name).is_none() && ShardName::parse(&name).is_none() {
        return single();
    }
    let dir = path.parent().unwrap_or(Path::new(""));
    let here = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        dir
    };
    // Where the directory cannot be listed the name alone tells the others.
    let mut names = files_in(here).unwrap_or_default();
    if !names.contains(&name) {
        names.push(name.clone());
    }
    let names = names.into_iter().filter(|name| !is_projector(name));
    models_in(&Place::of(dir), names)
        .into_iter()
        .find(|model| model.paths().any(|member| member == path))
        .unwrap_or_else(single)
}

/// No set has more members: `split.count` is a u16. A name that claims more is a single file's.
const MAX_SHARDS: u32 = 65_535;

/// A file, whole or in pieces.
struct Logical {
    name: OsString,
    /// Not in pieces.
    whole: bool,
    pieces: Vec<PathBuf>,
}

/// The models whose files are called so in a place, by name, each with its projectors; a projector of none is a model
/// of its own. Names of other files are passed over.
pub fn models_in(place: &Place<'_>, names: impl IntoIterator<Item = OsString>) -> Vec<Found> {
    let (projectors, names) = names
        .into_iter()
        .partition::<Vec<_>, _>(|name| is_projector(name));
    let mut models = group(place, names);
    let stems: Vec<OsString> = models.iter().map(|model| model.stem.clone()).collect();
    let mut alone = Vec::new();
    for name in projectors {
        let owners = owners(&name, &stems);
        for &owner in &owners {
            if let Some(model) = models.get_mut(owner) {
                let path = place.path(&name);
                model.projectors.push((name.clone(), path));
            }
        }
        if owners.is_empty() {
            alone.push(name);
        }
    }
    for model in &mut models {
        model.projectors.sort();
    }
    models.extend(group(place, alone));
    models
}

fn group(place: &Place<'_>, names: Vec<OsString>) -> Vec<Found> {
    let (mut whole, mut series) = (Vec::new(), BTreeMap::<Series, Vec<_>>::new());
    for name in names {
        match PieceName::parse(&name) {
            Some(piece) => series
                .entry(piece.series.clone())
                .or_default()
                .push((piece, name)),
            None if stem(&name) != name => whole.push(Logical {
                pieces: vec![place.path(&name)],
                whole: true,
                name,
            }),
            None => {}
        }
    }
    let joined = series
        .into_values()
        .filter_map(|pieces| join(place, pieces));
    whole.extend(joined);
    // The whole name of member 1 stands for a set, so that two sets of one prefix stay apart. A file in pieces has its
    // first piece's name beside it, so that it stays apart from a whole file of its name.
    let mut models = BTreeMap::<(OsString, Option<PathBuf>), (Option<ShardName>, Vec<_>)>::new();
    for file in whole {
        let shard = ShardName::parse(&file.name).filter(|shard| shard.count <= MAX_SHARDS);
        let key = match &shard {
            Some(shard) => (shard.sibling(1), None),
            None if file.whole => (file.name.clone(), None),
            None => (file.name.clone(), file.pieces.first().cloned()),
        };
        let (_, files) = models
            .entry(key)
            .or_insert_with(|| (shard.clone(), Vec::new()));
        files.push((shard.map_or(1, |shard| shard.no), file));
    }
    models
        .into_values()
        .filter_map(|(shard, files)| model(place, shard, files))
        .collect()
}

/// A file from its pieces. Those between the first and the last, or up to the number that the names tell, belong to
/// it even where they are missing. `None` where the names were no pieces' after all.
fn join(place: &Place<'_>, mut pieces: Vec<(PieceName, OsString)>) -> Option<Logical> {
    pieces.sort_by_key(|(piece, _)| piece.no);
    let any = pieces.first()?.0.clone();
    let by_no: BTreeMap<u32, &OsString> = pieces
        .iter()
        .rev()
        .map(|(piece, name)| (piece.no, name))
        .collect();
    let lowest = *by_no.keys().next()?;
    let highest = *by_no.keys().next_back()?;
    if any.series.needs_first && lowest > 0 {
        return None;
    }
    // Letters begin with a, digits with 0 or 1.
    let first = if lowest == 0 || any.series.is_lettered() {
        0
    } else {
        1
    };
    let last = match any.series.count {
        Some(count) => count.saturating_add(first).saturating_sub(1).max(highest),
        None => highest,
    };
    let path = |no| match by_no.get(&no) {
        Some(&name) => place.path(name),
        None => place.path(&any.sibling(no)),
    };
    Some(Logical {
        name: any.whole.clone(),
        whole: false,
        pieces: (first..=last).map(path).collect(),
    })
}

/// A model from its files, by shard number. A member that is there whole and in pieces is taken whole.
fn model(place: &Place<'_>, shard: Option<ShardName>, files: Vec<(u32, Logical)>) -> Option<Found> {
    let Some(shard) = shard else {
        let (_, file) = files.into_iter().next()?;
        return Some(Found {
            stem: stem(&file.name),
            files: vec![file.pieces],
            is_set: false,
            projectors: Vec::new(),
        });
    };
    let mut by_no = BTreeMap::<u32, Vec<PathBuf>>::new();
    for (no, file) in files {
        let better = file.whole;
        match by_no.get_mut(&no) {
            Some(known) if better => *known = file.pieces,
            Some(_) => {}
            None => drop(by_no.insert(no, file.pieces)),
        }
    }
    let member = |no| match by_no.remove(&no) {
        Some(pieces) => pieces,
        None => vec![place.path(&shard.sibling(no))],
    };
    Some(Found {
        stem: shard.stem(),
        files: (1..=shard.count).map(member).collect(),
        is_set: true,
        projectors: Vec::new(),
    })
}
