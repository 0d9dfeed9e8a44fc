//! A file that lies on disk whole or in pieces: opened, its header read, and the join proved by the header.

use std::io;
use std::path::{Path, PathBuf};

use crate::gguf::{self, Header};
use crate::source::{Source, SourceError};
use crate::units::align_up;

/// What a missing file is reported as.
pub(super) const MISSING: &str = "missing";

/// Pieces, by their place among the file's, with what is wrong.
pub(super) type Problems = Vec<(usize, String)>;

enum FileError {
    Source(SourceError),
    Gguf(gguf::Error),
}

impl From<gguf::Error> for FileError {
    fn from(error: gguf::Error) -> Self {
        FileError::Gguf(error)
    }
}

/// Opens the pieces of one file (or the file, where it is one) and reads its header.
///
/// # Errors
/// Every problem, by piece.
pub(super) fn open(paths: &[PathBuf]) -> Result<(Vec<Source>, Header), Problems> {
    let (mut pieces, mut problems) = (Vec::new(), Vec::new());
    for (no, path) in paths.iter().enumerate() {
        match Source::open(path) {
            Ok(source) => pieces.push(source),
            Err(error) => problems.push((no, reason(error, "opened"))),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let len = pieces
        .iter()
        .fold(0u64, |sum, piece| sum.saturating_add(piece.len()));
    let header = gguf::read(len, |buf, at| {
        read_at(&pieces, buf, at).map_err(FileError::Source)
    });
    let header = header.map_err(|error| match error {
        FileError::Source(error) => {
            let path = match &error {
                SourceError::Io { path, .. } | SourceError::Changed { path } => path.clone(),
            };
            let no = paths.iter().position(|p| *p == path).unwrap_or(0);
            vec![(no, reason(error, "read"))]
        }
        FileError::Gguf(error) => vec![(0, error.to_string())],
    });
    if pieces.len() < 2 {
        return header.map(|header| (pieces, header));
    }
    let lens: Vec<u64> = pieces.iter().map(Source::len).collect();
    let begins = pieces.iter().map(begins_a_file).collect::<Vec<_>>();
    let header = header.map_err(|problems| explain(problems, &begins, len))?;
    prove(&header, &lens, &begins)?;
    Ok((pieces, header))
}

fn reason(error: SourceError, done: &str) -> String {
    match error {
        SourceError::Io { error, .. } if error.kind() == io::ErrorKind::NotFound => {
            MISSING.to_owned()
        }
        SourceError::Io { error, .. } => error.to_string(),
        SourceError::Changed { .. } => format!("changed while it was {done}"),
    }
}

/// Fills `buf` from the pieces as one file.
pub(super) fn read_at(pieces: &[Source], buf: &mut [u8], at: u64) -> Result<(), SourceError> {
    let (mut rest, mut at) = (buf, at);
    for piece in pieces {
        let here = piece.len().saturating_sub(at).min(rest.len() as u64);
        let here = usize::try_from(here).unwrap_or(rest.len());
        let (part, tail) = rest.split_at_mut(here);
        if !part.is_empty() {
            piece.read_exact_at(part, at)?;
        }
        at = at.saturating_sub(piece.len());
        rest = tail;
    }
    Ok(())
}

/// Whether a GGUF file begins at this path; false where it cannot be read.
pub(super) fn begins_a_file_at(path: &Path) -> bool {
    Source::open(path).is_ok_and(|piece| begins_a_file(&piece))
}

fn begins_a_file(piece: &Source) -> bool {
    let mut magic = [0; 4];
    piece.read_exact_at(&mut magic, 0).is_ok() && magic == *b"GGUF"
}

/// The header could not be read: whether the order explains it.
fn explain(mut problems: Problems, begins: &[bool], len: u64) -> Problems {
    let other = begins.iter().skip(1).position(|&begins| begins);
    match (begins.first(), other) {
        (Some(false), Some(place)) => problems.push((
            place.saturating_add(1),
            "the file begins in this piece, but its name makes it a later one: wrong order"
                .to_owned(),
        )),
        (Some(true), None) => {
            if let Some((_, why)) = problems.first_mut() {
                why.push_str(&format!(
                    " (all pieces together have {len} bytes: one is missing at the end, cut short, or of another file)"
                ));
            }
        }
        _ => {}
    }
    problems
}

/// The pieces are as long together as the header demands, and cut as one cuts a file: a single shorter piece is the last.
fn prove(header: &Header, lens: &[u64], begins: &[bool]) -> Result<(), Problems> {
    if let Some(no) = begins.iter().skip(1).position(|&begins| begins) {
        let why = "begins with a GGUF header of its own: a piece of another file";
        return Err(vec![(no.saturating_add(1), why.to_owned())]);
    }
    let len = lens.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    let ends = header
        .tensors()
        .iter()
        .map(|t| t.offset.saturating_add(t.len));
    let end = ends.max().unwrap_or(header.data_offset());
    let padded = align_up(end, header.alignment()).unwrap_or(end);
    let last = lens.len().saturating_sub(1);
    if len > padded {
        let why = format!(
            "{} bytes too many: the header demands {padded}, all pieces together have {len}; a piece is of another file",
            len.saturating_sub(padded)
        );
        return Err(vec![(last, why)]);
    }
    let most = lens.iter().max().copied().unwrap_or(0);
    let mut shorter = (0..).zip(lens).filter(|(_, len)| **len < most);
    if let (Some((no, short)), None) = (shorter.next(), shorter.next())
        && no < last
        && lens.len() > 2
    {
        let why = format!(
            "has {short} bytes, all others {most}: the shorter one is the last of a file, so the order is wrong"
        );
        return Err(vec![(no, why)]);
    }
    Ok(())
}
