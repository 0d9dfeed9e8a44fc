//! Opens and validates a model as a whole.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::check::check;
use super::discover::{Found, find};
use super::join;
use super::naming::ShardName;
use crate::gguf::Header;
use crate::source::{Source, SourceError};

/// A validated model: every shard is there, and they agree with each other.
#[derive(Debug, Clone)]
pub struct Model {
    /// The model's name, without `.gguf`.
    pub stem: OsString,
    /// All that is open: the files in shard order, of those in pieces the pieces in order.
    pub sources: Vec<Source>,
    /// Which of the sources make up each file, in shard order; one each, unless it is in pieces.
    pub pieces: Vec<Range<usize>>,
    /// The headers of the files, in the same order. Offsets in them are those in the joined file.
    pub headers: Vec<Header>,
    /// Whether it is a shard set by its names.
    pub is_set: bool,
    /// The projectors beside it.
    pub projectors: Vec<Projector>,
}

/// A projector file, beside its model. One that cannot be read does not take the model with it.
#[derive(Debug, Clone)]
pub struct Projector {
    /// The name to show it by.
    pub name: OsString,
    /// The file, or why there is none to show.
    pub file: Result<(Source, Header), (PathBuf, String)>,
}

impl Model {
    /// The files in shard order: the sources that they consist of, and their headers.
    pub fn files(&self) -> impl Iterator<Item = (&[Source], &Header)> {
        let sources = |range: &Range<usize>| self.sources.get(range.clone()).unwrap_or_default();
        self.pieces.iter().map(sources).zip(&self.headers)
    }

    /// Fills `buf` from an offset of file number `file`.
    ///
    /// # Errors
    /// Those of the source; `buf` is not filled past the end of the file.
    pub fn read_at(&self, file: usize, buf: &mut [u8], at: u64) -> Result<(), SourceError> {
        let pieces = self.pieces.get(file).cloned().unwrap_or_default();
        join::read_at(self.sources.get(pieces).unwrap_or_default(), buf, at)
    }

    /// Whether a file of it lies on disk in pieces.
    pub fn in_pieces(&self) -> bool {
        self.sources.len() != self.headers.len()
    }
}

/// Why there is no model to serve.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A path could not be looked at.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A directory without a GGUF file.
    #[error("{path}: no GGUF file in this directory", path = path.display())]
    NoModel {
        /// The directory.
        path: PathBuf,
    },
    /// A directory with several models.
    #[error("{path}: {n} models in this directory, name one of them: {some}", path = path.display())]
    ManyModels {
        /// The directory.
        path: PathBuf,
        /// How many.
        n: usize,
        /// Up to five of their names.
        some: String,
    },
    /// All that is wrong with the files, by file.
    #[error("not a valid model:{}", problems.iter().map(|(p, why)| format!("\n  {}: {why}", p.display())).collect::<String>())]
    Invalid {
        /// File and reason.
        problems: Vec<(PathBuf, String)>,
    },
}

/// Finds, opens and validates the model that `source` names.
///
/// # Errors
/// [`ModelError`]; `Invalid` lists every problem found.
pub fn load(source: &Path) -> Result<Model, ModelError> {
    load_found(find(source)?)
}

/// Opens and validates a model that was found.
///
/// # Errors
/// `Invalid`, with every problem found.
pub fn load_found(found: Found) -> Result<Model, ModelError> {
    let found = not_chunks(found);
    let firsts: Vec<&Path> = found.files.iter().map(|pieces| first(pieces)).collect();
    let (mut sources, mut pieces, mut headers) = (Vec::new(), Vec::new(), Vec::new());
    let (mut parsed, mut unreadable) = (Vec::new(), Vec::new());
    for (no, paths) in found.files.iter().enumerate() {
        match join::open(paths) {
            Ok((opened, header)) => {
                let start = sources.len();
                sources.extend(opened);
                pieces.push(start..sources.len());
                headers.push(header);
                parsed.push(no);
            }
            Err(why) => unreadable.extend(why.into_iter().map(|(piece, why)| (no, piece, why))),
        }
    }
    let mut problems = Vec::new();
    check(&firsts, &parsed, &headers, found.is_set, &mut problems);
    let mut problems: Vec<_> = problems.into_iter().map(|(no, why)| (no, 0, why)).collect();
    problems.extend(unreadable);
    if problems.is_empty() {
        return Ok(Model {
            stem: found.stem,
            sources,
            pieces,
            headers,
            is_set: found.is_set,
            projectors: found.projectors.into_iter().map(projector).collect(),
        });
    }
    problems.sort_by_key(|(no, piece, _)| (*no, *piece));
    let path = |no: usize, piece: usize| {
        let path = found.files.get(no).and_then(|pieces| pieces.get(piece));
        path.cloned().unwrap_or_default()
    };
    let by_path = problems
        .into_iter()
        .map(|(no, piece, why)| (path(no, piece), why));
    Err(ModelError::Invalid {
        problems: shorten(by_path.collect()),
    })
}

fn projector((name, path): (OsString, PathBuf)) -> Projector {
    let reasons = |problems: join::Problems| {
        let reasons: Vec<_> = problems.into_iter().map(|(_, why)| why).collect();
        reasons.join("; ")
    };
    let file = join::open(std::slice::from_ref(&path))
        .map_err(reasons)
        .and_then(|(sources, header)| {
            let source = sources.into_iter().next();
            Ok((source.ok_or(join::MISSING)?, header))
        });
    Projector {
        name,
        file: file.map_err(|why| (path, why)),
    }
}

fn first(pieces: &[PathBuf]) -> &Path {
    pieces.first().map_or(Path::new(""), PathBuf::as_path)
}

/// `x-chunk-001-of-003.gguf` is also what shards of a model `x-chunk` are called: then each begins with a header.
fn not_chunks(found: Found) -> Found {
    let [pieces] = found.files.as_slice() else {
        return found;
    };
    let shard = |path: &PathBuf| ShardName::parse(path.file_name()?);
    let Some(name) = pieces.first().and_then(shard) else {
        return found;
    };
    if found.is_set || !pieces.iter().all(|piece| join::begins_a_file_at(piece)) {
        return found;
    }
    Found {
        stem: name.stem(),
        files: pieces.iter().map(|piece| vec![piece.clone()]).collect(),
        is_set: true,
        projectors: found.projectors,
    }
}

/// A run of missing files becomes one line: a name can promise 65,535 of them.
fn shorten(problems: Vec<(PathBuf, String)>) -> Vec<(PathBuf, String)> {
    let is_missing = |(_, why): &(PathBuf, String)| why == join::MISSING;
    let mut out = Vec::new();
    for run in problems.chunk_by(|a, b| is_missing(a) && is_missing(b)) {
        match run {
            [(first, _), .., (last, _)] if run.len() > 3 => {
                let name = last.file_name().unwrap_or_default().display();
                let why = format!(
                    "{}, as are all up to {name} ({} files)",
                    join::MISSING,
                    run.len()
                );
                out.push((first.clone(), why));
            }
            few => out.extend_from_slice(few),
        }
    }
    out
}
