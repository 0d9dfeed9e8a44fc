//! Which files a model is shown as: names and contents of a view.

use std::ffi::OsString;

use crate::layout::{self, Built, Content, LayoutError, SplitOptions, VirtualFile};
use crate::model::{Model, shard_file_name};
use crate::source::Source;

/// How a model is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// Shards of a single file, the merged file of a set.
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
    /// `merged` or `shards`.
    pub kind: &'static str,
    /// Name and content.
    pub files: Vec<(OsString, Built)>,
}

/// Lays out a model.
///
/// # Errors
/// Those of the layout.
pub fn build(model: &Model, options: &ViewOptions) -> Result<Files, LayoutError> {
    let merged = match options.kind {
        Kind::Auto => model.is_set,
        Kind::Merged => true,
        Kind::Shards => false,
    };
    if merged {
        let mut name = model.stem.clone();
        name.push(".gguf");
        let built = whole(
            layout::merge(&model.headers, options.clean)?,
            &model.sources,
        );
        return Ok(Files {
            kind: "merged",
            files: vec![(name, built)],
        });
    }
    let shards = layout::split(&model.headers, &options.split)?;
    let count = shards.len();
    let named = |(i, built)| {
        let name = shard_file_name(&model.stem, i + 1, count);
        (name, whole(built, &model.sources))
    };
    Ok(Files {
        kind: "shards",
        files: shards.into_iter().enumerate().map(named).collect(),
    })
}

/// A file that is byte for byte one of the sources becomes a range of it, written-anew headers and all: then the
/// source can be read in its place.
fn whole(mut built: Built, sources: &[Source]) -> Built {
    let file = &built.file;
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
            built.file = one;
        }
    }
    built
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
