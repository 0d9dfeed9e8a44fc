//! Which files a model is shown as: names and contents of a view.

use std::ffi::OsString;

use crate::layout::{self, Built, LayoutError, SplitOptions};
use crate::model::{Model, shard_file_name};

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
        let built = layout::merge(&model.headers, options.clean)?;
        return Ok(Files {
            kind: "merged",
            files: vec![(name, built)],
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
