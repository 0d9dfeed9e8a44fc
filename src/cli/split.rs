use std::ffi::OsStr;
use std::io::{Stdout, StdoutLock, Write};
use std::path::Path;

use super::args::{Limits, Overrides, WriteArgs};
use super::exit::CliError;
use super::progress::{Progress, note};
use super::{overlay, plan};
use crate::export::{self, Event, Output};
use crate::layout::SplitOptions;
use crate::model;
use crate::views::{self, Kind, ViewOptions};

/// Prints on stdout what `llama-gguf-split --split` prints there.
pub(super) fn run(
    source: &Path,
    prefix: &Path,
    split: &Limits,
    overrides: &Overrides,
    write: WriteArgs,
    mut out: StdoutLock<'_>,
) -> Result<(), CliError> {
    let name = prefix.file_name().filter(|_| !ends_with_slash(prefix));
    let name = name.ok_or_else(|| {
        CliError::Usage(format!(
            "{}: a name to begin the shards' names with is needed",
            prefix.display()
        ))
    })?;
    let mut model = model::load(source)?;
    overlay::apply(&overlay::read(overrides)?, &mut model)?;
    // The shards are named after the prefix, not after the source.
    model.stem = name.to_owned();
    let options = ViewOptions {
        kind: Kind::Shards,
        clean: false,
        split: SplitOptions::from(split),
    };
    let files = views::build(&model, &options)?.files;
    plan::print(&files, &mut out)?;
    if write.dry_run {
        return Ok(());
    }
    // The lock would be in the way of the lines below.
    out.flush()?;
    drop(out);
    let outputs: Vec<Output> = files
        .into_iter()
        .map(|(name, built)| Output {
            path: prefix.with_file_name(name),
            content: built.file,
        })
        .collect();
    let total = outputs.iter().map(|output| output.content.len()).sum();
    let mut progress = Progress::new(total, |event| say(event, &mut std::io::stdout()))?;
    export::write(&outputs, &model.sources, true, write.verify, &mut progress)?;
    drop(progress);
    let tensors: usize = model.headers.iter().map(|h| h.tensors().len()).sum();
    note(
        prefix,
        &format!(
            "{} gguf split written with a total of {tensors} tensors.",
            outputs.len()
        ),
    );
    Ok(())
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/") || path == OsStr::new("")
}

fn say(event: Event<'_>, out: &mut Stdout) {
    // A closed pipe is no reason to stop writing.
    match event {
        Event::Writing(path, _) => {
            drop(write!(out, "Writing file {} ... ", path.display()));
            drop(out.flush());
        }
        Event::Written(_) => drop(writeln!(out, "done")),
        Event::Kept(path) => note(path, "there already, the very same bytes"),
        Event::Copied(_) | Event::Deleted(_) => {}
    }
}
