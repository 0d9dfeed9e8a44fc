//! Opens and validates a model as a whole.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use super::discover::{Found, find};
use crate::gguf::{self, Header};
use crate::source::{Source, SourceError};

/// A validated model: every shard is there, and they agree with each other.
#[derive(Debug, Clone)]
pub struct Model {
    /// The model's name, without `.gguf`.
    pub stem: OsString,
    /// The files, in shard order.
    pub sources: Vec<Source>,
    /// Their headers, in the same order.
    pub headers: Vec<Header>,
    /// Whether it is a shard set by its names.
    pub is_set: bool,
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

enum FileError {
    Source(SourceError),
    Gguf(gguf::Error),
}

impl From<gguf::Error> for FileError {
    fn from(error: gguf::Error) -> Self {
        FileError::Gguf(error)
    }
}

/// Finds, opens and validates the model that `source` names.
///
/// # Errors
/// [`ModelError`]; `Invalid` lists every problem found.
pub fn load(source: &Path) -> Result<Model, ModelError> {
    let Found {
        stem,
        files,
        is_set,
    } = find(source)?;
    let mut problems = Vec::new();
    let (mut sources, mut headers, mut parsed) = (Vec::new(), Vec::new(), Vec::new());
    for (no, path) in files.iter().enumerate() {
        match open(path) {
            Ok((source, header)) => {
                sources.push(source);
                headers.push(header);
                parsed.push(no);
            }
            Err(why) => problems.push((no, why)),
        }
    }
    check(&files, &parsed, &headers, is_set, &mut problems);
    if problems.is_empty() {
        Ok(Model {
            stem,
            sources,
            headers,
            is_set,
        })
    } else {
        problems.sort_by_key(|(no, _)| *no);
        Err(ModelError::Invalid {
            problems: by_file(&files, problems),
        })
    }
}

const MISSING: &str = "missing";

/// Problems with their files. A run of missing files becomes one line: a name can promise 65,535 shards.
fn by_file(files: &[PathBuf], problems: Vec<(usize, String)>) -> Vec<(PathBuf, String)> {
    let is_missing = |(_, why): &(usize, String)| why == MISSING;
    let path = |no: usize| files.get(no).cloned().unwrap_or_default();
    let mut out = Vec::new();
    for run in problems.chunk_by(|a, b| is_missing(a) && is_missing(b)) {
        match run {
            [first, .., last] if run.len() > 3 => {
                let last = path(last.0);
                let name = last.file_name().unwrap_or_default().display();
                let why = format!("{MISSING}, as are all up to {name} ({} files)", run.len());
                out.push((path(first.0), why));
            }
            few => out.extend(few.iter().map(|(no, why)| (path(*no), why.clone()))),
        }
    }
    out
}

fn open(path: &Path) -> Result<(Source, Header), String> {
    let source = Source::open(path).map_err(|error| match error {
        SourceError::Io { error, .. } if error.kind() == io::ErrorKind::NotFound => {
            MISSING.to_owned()
        }
        SourceError::Io { error, .. } => error.to_string(),
        SourceError::Changed { .. } => "changed while it was opened".to_owned(),
    })?;
    let header = gguf::read(source.len(), |buf, at| {
        source.read_exact_at(buf, at).map_err(FileError::Source)
    });
    match header {
        Ok(header) => Ok((source, header)),
        Err(FileError::Source(SourceError::Io { error, .. })) => Err(error.to_string()),
        Err(FileError::Source(SourceError::Changed { .. })) => {
            Err("changed while it was read".to_owned())
        }
        Err(FileError::Gguf(error)) => Err(error.to_string()),
    }
}

/// What the shards say of themselves, against their names and each other. `parsed` are the places in `files` of
/// those that could be read; the others are problems already.
fn check(
    files: &[PathBuf],
    parsed: &[usize],
    headers: &[Header],
    is_set: bool,
    problems: &mut Vec<(usize, String)>,
) {
    let total: usize = headers.iter().map(|h| h.tensors().len()).sum();
    let count = files.len();
    let mut owner: HashMap<&[u8], &Path> = HashMap::new();
    for (&no, header) in parsed.iter().zip(headers) {
        let Some(path) = files.get(no) else { continue };
        let mut bad = |why: String| problems.push((no, why));
        let int = |key: &str| header.get(key.as_bytes()).map(|kv| kv.int());
        if is_set && (count > 1 || header.get(b"split.count").is_some()) {
            // The number of tensors is known only when all shards are there.
            let all = (headers.len() == count).then_some(total);
            let wanted = [
                ("split.no", Some(no)),
                ("split.count", Some(count)),
                ("split.tensors.count", all),
            ];
            for (key, wanted) in wanted {
                match (int(key), wanted) {
                    (None, _) => bad(format!(
                        "{key} is missing, so this file was not written as a shard"
                    )),
                    (Some(None), _) => bad(format!("{key} is not an integer")),
                    (Some(Some(_)), None) => {}
                    (Some(Some(have)), Some(wanted)) if have == wanted as i128 => {}
                    (Some(Some(have)), Some(wanted)) => bad(format!(
                        "{key} is {have}, but the set's names and tensors say {wanted}"
                    )),
                }
            }
        } else if let (Some(Some(n)), Some(Some(all))) =
            (int("split.count"), int("split.tensors.count"))
        {
            // A stale split.count is harmless; a shard under another name is not the whole model.
            if n > 1 && all > total as i128 {
                bad(format!(
                    "one shard of {n} ({total} of {all} tensors) under a name that does not say so; give it back its -0000N-of-0000M.gguf name"
                ));
            }
        }
        if headers
            .first()
            .is_some_and(|first| first.version() != header.version())
        {
            bad(format!(
                "GGUF version {}, unlike the first shard",
                header.version()
            ));
        }
        for tensor in header.tensors() {
            if let Some(other) = owner.insert(&tensor.name, path) {
                bad(format!(
                    "tensor {:?} is also in {}",
                    String::from_utf8_lossy(&tensor.name),
                    other.display()
                ));
            }
        }
    }
}
