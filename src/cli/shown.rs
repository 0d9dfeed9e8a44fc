//! What a mount shows of a model: it is loaded, changed as the options say, laid out, and given to `vfs`.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::exit::CliError;
use super::overlay;
use crate::layout::{Built, Overlay, Piece};
use crate::model;
use crate::source::{Source, SourceError};
use crate::vfs::{FileContent, Plan, VfsError, View, ViewFile};
use crate::views::{self, ViewOptions};

/// How a mount shows its models.
#[derive(Debug)]
pub(super) struct Shown {
    pub options: ViewOptions,
    pub changes: Overlay,
}

impl Shown {
    pub(super) fn load(&self, source: &Path) -> Result<View, CliError> {
        let mut model = model::load(source)?;
        overlay::apply(&self.changes, &mut model)?;
        let laid_out = views::build(&model, &self.options)?;
        let files = laid_out
            .files
            .into_iter()
            .map(|(name, built)| ViewFile {
                name,
                sources_text: paths(&built, &model.sources),
                content: FileContent::Fixed(built.file),
            })
            .collect();
        Ok(View {
            files,
            sources: model.sources,
            kind: laid_out.kind,
            provisional: false,
        })
    }
}

/// The paths of the sources that a file is made of, one a line.
fn paths(built: &Built, sources: &[Source]) -> Vec<u8> {
    let mut used: Vec<usize> = built
        .file
        .resolve(0, built.file.len())
        .filter_map(|p| match p {
            Piece::Source { source, .. } => Some(source),
            Piece::Inline(_) | Piece::Zeros(_) => None,
        })
        .collect();
    used.sort_unstable();
    used.dedup();
    used.iter()
        .filter_map(|&i| sources.get(i))
        .map(|source| source.path().as_os_str().as_bytes())
        .collect::<Vec<_>>()
        .join(&b"\n"[..])
}

/// The one model that is a mount's root. Where it cannot be served again, what was served before stays.
#[derive(Debug)]
pub(super) struct OneModel {
    pub source: PathBuf,
    pub shown: Shown,
}

impl Plan for OneModel {
    fn plan(&self) -> Result<View, VfsError> {
        self.shown.load(&self.source).map_err(|error| {
            log::error!("{}: cannot serve it again: {error}", self.source.display());
            VfsError::Source(SourceError::Changed {
                path: self.source.clone(),
            })
        })
    }
}
