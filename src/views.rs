//! Which files a model is shown as: names and contents of a view.

use std::ffi::OsString;
use std::ops::Range;

use crate::layout::{self, Built, Content, LayoutError, SplitOptions, VirtualFile};
use crate::model::{Model, shard_file_name};
use crate::source::Source;

/// How a model is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// Shards of a single file, the merged file of a set, the joined file of raw pieces.
    #[default]
    Auto,
    /// One file.
    Merged,
    /// Shards.
    Shards,
}

/// What decides the files of a view.
#[derive(Debug, Clone, Copy, Default)]
pub struct ViewOptions {
    /// Merged or sharded.
    pub kind: Kind,
    /// Leave `split.*` keys out of a merged view.
    pub clean: bool,
    /// Where shards end.
    pub split: SplitOptions,
}

/// The files of a view, in order.
#[derive(Debug, Clone)]
pub struct Files {
    /// `merged`, `joined` or `shards`.
    pub kind: &'static str,
    /// Name and content.
    pub files: Vec<(OsString, Built)>,
}

/// Lays out a model.
///
/// # Errors
/// Those of the layout.
pub fn build(model: &Model, options: &ViewOptions) -> Result<Files, LayoutError> {
    let joined = joined(model).ok_or(LayoutError::Overflow)?;
    if let ([file], [header]) = (joined.as_slice(), model.headers.as_slice())
        && options.kind == Kind::Auto
        && model.in_pieces()
        && !header.is_changed()
    {
        let tensors = header.tensors();
        let built = Built {
            file: file.clone(),
            header_len: header.data_offset(),
            n_tensors: tensors.len() as u64,
            tensor_bytes: (tensors.iter()).fold(0, |sum, tensor| sum.saturating_add(tensor.len)),
        };
        return Ok(Files {
            kind: "joined",
            files: vec![(file_name(model), built)],
        });
    }
    let mut view = lay_out(model, options)?;
    if model.in_pieces() {
        for (_, built) in &mut view.files {
            built.file = built.file.over(&joined).ok_or(LayoutError::Overflow)?;
        }
    }
    for (_, built) in &mut view.files {
        as_whole(&mut built.file, &model.sources);
    }
    Ok(view)
}

/// The files of a model, each as its pieces one after the other.
fn joined(model: &Model) -> Option<Vec<VirtualFile>> {
    let join = |pieces: &Range<usize>| {
        let mut file = VirtualFile::default();
        for index in pieces.clone() {
            file.push_source(index, 0, model.sources.get(index)?.len())?;
        }
        Some(file)
    };
    model.pieces.iter().map(join).collect()
}

fn file_name(model: &Model) -> OsString {
    let mut name = model.stem.clone();
    name.push(".gguf");
    name
}

/// The files of a view; their ranges are those of the model's files, which may lie in pieces.
fn lay_out(model: &Model, options: &ViewOptions) -> Result<Files, LayoutError> {
    let merged = match options.kind {
        Kind::Auto => model.is_set || model.in_pieces(),
        Kind::Merged => true,
        Kind::Shards => false,
    };
    if merged {
        let built = layout::merge(&model.headers, options.clean)?;
        return Ok(Files {
            kind: "merged",
            files: vec![(file_name(model), built)],
        });
    }
    let shards = layout::split(&model.headers, &options.split)?;
    let count = shards.len();
    let named = |(i, built)| (shard_file_name(&model.stem, i + 1, count), built);
    Ok(Files {
        kind: "shards",
        files: shards.into_iter().enumerate().map(named).collect(),
    })
}

/// A file that is byte for byte one of the sources becomes a range of it, written-anew headers and all: then the
/// source can be read in its place.
fn as_whole(file: &mut VirtualFile, sources: &[Source]) {
    let candidate = file.extents().iter().find_map(|e| match e.content {
        Content::Source { source, offset } if offset == e.start => Some(source),
        _ => None,
    });
    if let Some(index) = candidate
        && let Some(source) = sources.get(index)
        && is_whole(file, index, source)
    {
        let mut one = VirtualFile::default();
        if one.push_source(index, 0, source.len()).is_some() {
            *file = one;
        }
    }
}

/// A source that cannot be read here is not found to be identical, and fails when it is served.
fn is_whole(file: &VirtualFile, index: usize, source: &Source) -> bool {
    let reads_as = |start: u64, bytes: &[u8]| {
        let mut there = vec![0; bytes.len()];
        source.read_exact_at(&mut there, start).is_ok() && there == bytes
    };
    file.len() == source.len()
        && file.extents().iter().all(|extent| match &extent.content {
            Content::Source { source, offset } => *source == index && *offset == extent.start,
            Content::Inline(bytes) => reads_as(extent.start, bytes),
            Content::Zeros => {
                usize::try_from(extent.len).is_ok_and(|len| reads_as(extent.start, &vec![0; len]))
            }
        })
}
