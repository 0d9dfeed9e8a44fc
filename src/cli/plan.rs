use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use serde_json::json;

use super::args::{Limits, Overrides};
use super::exit::CliError;
use super::overlay;
use crate::layout::{Built, SplitOptions};
use crate::model;
use crate::views::{self, Kind, ViewOptions};

pub(super) fn run(
    source: &Path,
    split: &Limits,
    overrides: &Overrides,
    json: bool,
    out: &mut impl Write,
) -> Result<(), CliError> {
    let mut model = model::load(source)?;
    overlay::apply(&overlay::read(overrides)?, &mut model)?;
    let options = ViewOptions {
        kind: Kind::Shards,
        clean: false,
        split: SplitOptions::from(split),
    };
    let files = views::build(&model, &options)?.files;
    if json {
        let shards = files.iter().map(|(name, built)| {
            json!({
                "name": name.to_string_lossy(), "n_tensors": built.n_tensors, "header_bytes": built.header_len,
                "tensor_bytes": built.tensor_bytes, "file_bytes": built.file.len(),
            })
        });
        let value = json!({ "n_split": files.len(), "shards": shards.collect::<Vec<_>>() });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    print(&files, out)
}

/// The plan lines of `llama-gguf-split`, word for word.
pub(super) fn print(files: &[(OsString, Built)], out: &mut impl Write) -> Result<(), CliError> {
    writeln!(out, "n_split: {}", files.len())?;
    for (i, (_, built)) in files.iter().enumerate() {
        let size = built.header_len.saturating_add(built.tensor_bytes) / 1_000_000;
        writeln!(
            out,
            "split {:05}: n_tensors = {}, total_size = {size}M",
            i + 1,
            built.n_tensors
        )?;
    }
    Ok(())
}
