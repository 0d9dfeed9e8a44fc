use std::path::{Path, PathBuf};

use super::args::{Overrides, WriteArgs};
use super::exit::CliError;
use super::overlay;
use super::progress::{Progress, note};
use crate::export::{self, Event, Output};
use crate::layout::SplitOptions;
use crate::model;
use crate::views::{self, Kind, ViewOptions};

/// What `merge` was asked to do.
#[derive(Debug)]
pub(super) struct Merge<'a> {
    pub source: &'a Path,
    pub out: &'a Path,
    pub clean: bool,
    pub delete_splits: bool,
    pub overrides: &'a Overrides,
    pub write: WriteArgs,
}

/// Like `llama-gguf-split --merge` it prints nothing on stdout.
pub(super) fn run(merge: &Merge<'_>) -> Result<(), CliError> {
    if merge.out.file_name().is_none() {
        let out = merge.out.display();
        return Err(CliError::Usage(format!(
            "{out}: the name of a file is needed"
        )));
    }
    if let Some(sources) = export::unfinished(merge.out)? {
        return go_on(merge, &sources);
    }
    let mut model = model::load(merge.source)?;
    overlay::apply(&overlay::read(merge.overrides)?, &mut model)?;
    let options = ViewOptions {
        // Pieces give the file that they are pieces of.
        kind: if model.in_pieces() && !merge.clean {
            Kind::Auto
        } else {
            Kind::Merged
        },
        clean: merge.clean,
        split: SplitOptions::default(),
    };
    let shards = model.sources.len();
    let tensors = model.headers.iter().map(|h| h.tensors().len() as u64).sum();
    let files = views::build(&model, &options)?.files.into_iter();
    let outputs: Vec<Output> = files
        .map(|(_, built)| Output {
            path: merge.out.to_owned(),
            content: built.file,
        })
        .collect();
    let [output] = outputs.as_slice() else {
        return Err(CliError::Failed("a merged view is one file".to_owned()));
    };
    if merge.write.dry_run {
        let what = format!(
            "would be {} bytes, merged from {shards} split with {tensors} tensors",
            output.content.len()
        );
        note(merge.out, &what);
        return Ok(());
    }
    let verify = merge.write.verify;
    let mut progress = Progress::new(output.content.len(), say)?;
    if merge.delete_splits {
        export::drain(output, model.sources, verify, &mut progress)?;
    } else {
        export::write(&outputs, &model.sources, false, verify, &mut progress)?;
    }
    drop(progress);
    merged(merge.out, shards, tensors);
    Ok(())
}

fn merged(out: &Path, shards: usize, tensors: u64) {
    let what = format!("merged from {shards} split with {tensors} tensors.");
    note(out, &what);
}

/// After an interruption some sources may be gone, so the journal says what is to be done, not the model.
fn go_on(merge: &Merge<'_>, sources: &[PathBuf]) -> Result<(), CliError> {
    let out = merge.out.display();
    let first = sources.first().map_or(Path::new(""), PathBuf::as_path);
    if !merge.delete_splits {
        return Err(CliError::Failed(format!(
            "{out}: a merge with --delete-splits was interrupted here; finish it with `ggufuse merge --delete-splits {} {out}`",
            first.display()
        )));
    }
    if !sources.iter().any(|source| is_named(source, merge.source)) {
        return Err(CliError::Failed(format!(
            "{out}: a merge of other files, {} among them, was interrupted here; finish that first",
            first.display()
        )));
    }
    if merge.write.dry_run {
        note(merge.out, "an interrupted merge would be finished");
        return Ok(());
    }
    note(merge.out, "going on with an interrupted merge");
    let mut progress = Progress::new(0, say)?;
    export::resume(merge.out, merge.write.verify, &mut progress)?;
    drop(progress);
    let model = model::load(merge.out)?;
    let tensors = model.headers.iter().map(|h| h.tensors().len() as u64).sum();
    merged(merge.out, sources.len(), tensors);
    Ok(())
}

/// Whether `given` is this file, which may be gone, or its folder.
fn is_named(file: &Path, given: &Path) -> bool {
    let folder = match given.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => given,
    };
    let named = folder.canonicalize().ok().zip(given.file_name());
    named.is_some_and(|(folder, name)| folder.join(name) == file)
        || given
            .canonicalize()
            .is_ok_and(|given| file.parent() == Some(&given))
}

fn say(event: Event<'_>) {
    match event {
        Event::Deleted(path) => note(path, "deleted"),
        Event::Writing(..) | Event::Copied(_) | Event::Written(_) | Event::Kept(_) => {}
    }
}
