use std::io::Write;
use std::path::Path;

use super::exit::CliError;
use crate::model;

pub(super) fn run(source: &Path, out: &mut impl Write) -> Result<(), CliError> {
    let model = model::load(source)?;
    let tensors: usize = model.headers.iter().map(|h| h.tensors().len()).sum();
    writeln!(
        out,
        "{}: ok, {} file(s), {tensors} tensors",
        source.display(),
        model.sources.len()
    )?;
    Ok(())
}
