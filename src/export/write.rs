//! A set of files, all or none of them.

use super::copy::Copier;
use super::partial::{Partial, refuse_existing, sync_folder};
use super::{Event, ExportError, Output, Watch, compare, room};
use crate::source::Source;

/// Writes files: all are whole and durable before the first gets its final name. With `keep_same` a file that is there
/// already with the very same bytes is left as it is. With `verify` each is read back and compared.
///
/// # Errors
/// [`ExportError`]; then no file that was begun is left.
pub fn write(
    outputs: &[Output],
    sources: &[Source],
    keep_same: bool,
    verify: bool,
    watch: &mut dyn Watch,
) -> Result<(), ExportError> {
    let mut todo = Vec::new();
    for output in outputs {
        match refuse_existing(&output.path) {
            Err(ExportError::Exists { path }) if keep_same => {
                is_same(output, sources, watch).map_err(|error| match error {
                    ExportError::Differs { .. } => ExportError::Exists { path },
                    other => other,
                })?;
                watch.event(Event::Kept(&output.path));
            }
            Err(error) => return Err(error),
            Ok(()) => todo.push(output),
        }
    }
    let Some(first) = todo.first() else {
        return Ok(());
    };
    room::check(&todo, sources)?;
    let mut partials: Vec<Partial> = Vec::new();
    for output in &todo {
        let mut partial = Partial::create(&output.path)?;
        one(output, &partial, sources, watch)?;
        if verify {
            is_written(output, &partial, sources, watch)?;
        }
        watch.event(Event::Written(&output.path));
        // The first one's lock stands for the set; a descriptor for each would be too many.
        if !partials.is_empty() {
            partial.close();
        }
        partials.push(partial);
    }
    publish(&mut partials)?;
    sync_folder(&first.path)
}

fn one(
    output: &Output,
    partial: &Partial,
    sources: &[Source],
    watch: &mut dyn Watch,
) -> Result<(), ExportError> {
    let len = output.content.len();
    watch.event(Event::Writing(&output.path, len));
    let mut copier = Copier::new(partial.file()?, partial.path());
    let mut at = 0u64;
    for piece in output.content.resolve(0, len) {
        copier.piece(piece, at, |no| sources.get(no), watch)?;
        at = at.saturating_add(piece.len());
    }
    partial.sync()
}

fn is_written(
    output: &Output,
    partial: &Partial,
    sources: &[Source],
    watch: &dyn Watch,
) -> Result<(), ExportError> {
    let len = output.content.len();
    let source = |no: usize| sources.get(no);
    compare::same(partial.path(), &output.content, 0..len, source, watch)
}

fn is_same(output: &Output, sources: &[Source], watch: &dyn Watch) -> Result<(), ExportError> {
    let len = output.content.len();
    let path = &output.path;
    let have = std::fs::metadata(path).map_err(ExportError::io(path))?;
    if !have.is_file() || have.len() != len {
        let offset = len.min(have.len());
        return Err(ExportError::Differs {
            path: path.clone(),
            offset,
        });
    }
    compare::same(path, &output.content, 0..len, |no| sources.get(no), watch)
}

/// Final names for all, or for none.
fn publish(partials: &mut [Partial]) -> Result<(), ExportError> {
    for i in 0..partials.len() {
        let published = partials.get_mut(i).map_or(Ok(()), Partial::publish);
        if let Err(error) = published {
            for done in partials.iter().take(i) {
                drop(std::fs::remove_file(done.target()));
            }
            return Err(error);
        }
    }
    Ok(())
}
