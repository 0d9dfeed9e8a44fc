//! What a mount shows of a model: it is loaded, changed as the options say, laid out, and given to `vfs`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::exit::CliError;
use super::fit_files::{self, Advisor};
use super::overlay;
use crate::layout::{Built, LayoutError, Overlay, Piece, VirtualFile};
use crate::model::{self, Model, ModelError, Projector};
use crate::source::{Source, SourceError};
use crate::vfs::{FileContent, Plan, VfsError, View, ViewFile};
use crate::views::{self, ViewOptions};

/// How a mount shows its models.
#[derive(Debug)]
pub(super) struct Shown {
    pub options: ViewOptions,
    pub changes: Overlay,
    pub advisor: Arc<Advisor>,
}

impl Shown {
    /// The files of a model that is shown in `directory`.
    pub(super) fn load(&self, source: &Path, directory: &Path) -> Result<View, CliError> {
        self.view(model::load(source)?, directory)
    }

    /// The files of a model's directory: its view, its projectors as they are, and what fits it into memory.
    pub(super) fn view(&self, mut model: Model, directory: &Path) -> Result<View, CliError> {
        overlay::apply(&self.changes, &mut model)?;
        let laid_out = views::build(&model, &self.options)?;
        let files = laid_out.files.into_iter();
        let mut files: Vec<ViewFile> = files
            .map(|(name, built)| ViewFile {
                name,
                sources_text: paths(&built, &model.sources),
                content: FileContent::Fixed(built.file),
            })
            .collect();
        let first = files.first().map(|file| directory.join(&file.name));
        let mut sources = model.sources;
        let mut problems = Vec::new();
        let mut beside = None;
        for Projector { name, file } in model.projectors {
            match file {
                Ok((source, header)) => {
                    beside.get_or_insert_with(|| (directory.join(&name), header));
                    files.push(as_it_is(name, sources.len(), &source)?);
                    sources.push(source);
                }
                Err(problem) => problems.push(problem),
            }
        }
        if let Some(first) = first {
            let advisor = Arc::clone(&self.advisor);
            files.extend(fit_files::files(advisor, &model.headers, first, beside));
        }
        let provisional = !problems.is_empty();
        if provisional {
            files.push(error_file(&ModelError::Invalid { problems }));
        }
        Ok(View {
            files,
            sources,
            kind: laid_out.kind,
            provisional,
        })
    }
}

/// A source as a file of the view.
fn as_it_is(name: OsString, index: usize, source: &Source) -> Result<ViewFile, LayoutError> {
    let mut content = VirtualFile::default();
    content
        .push_source(index, 0, source.len())
        .ok_or(LayoutError::Overflow)?;
    Ok(ViewFile {
        name,
        content: FileContent::Fixed(content),
        sources_text: source.path().as_os_str().as_bytes().to_vec(),
    })
}

/// The file that says what cannot be shown and why.
pub(super) fn error_file(error: &impl std::error::Error) -> ViewFile {
    ViewFile::text("ERROR.txt", format!("{error}\n"))
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
    /// Where it is shown.
    pub point: PathBuf,
    pub shown: Shown,
}

impl Plan for OneModel {
    fn plan(&self) -> Result<View, VfsError> {
        self.shown.load(&self.source, &self.point).map_err(|error| {
            log::error!("{}: cannot serve it again: {error}", self.source.display());
            VfsError::Source(SourceError::Changed {
                path: self.source.clone(),
            })
        })
    }
}
