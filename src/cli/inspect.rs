use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::args::Overrides;
use super::exit::CliError;
use super::overlay;
use crate::gguf::{Kv, ValueType};
use crate::model;
use crate::source::Source;

/// Longer strings are cut in the table; `--json` has them whole.
const SHOWN: usize = 80;

pub(super) fn run(
    source: &Path,
    tensors: bool,
    overrides: &Overrides,
    json: bool,
    out: &mut impl Write,
) -> Result<(), CliError> {
    let mut model = model::load(source)?;
    overlay::apply(&overlay::read(overrides)?, &mut model)?;
    let Some(first) = model.headers.first() else {
        return Ok(());
    };
    let shards = || model.files();
    if json {
        let table = shards().enumerate().flat_map(|(i, (_, h))| {
            h.tensors().iter().map(move |t| {
                json!({ "name": String::from_utf8_lossy(&t.name), "type": t.ty.name(), "dims": t.dims,
                    "shard": i, "offset": t.offset, "bytes": t.len })
            })
        });
        let mut value = json!({
            "version": first.version(),
            "alignment": first.alignment(),
            "kv": first.kvs().map(|kv| json!({
                "key": String::from_utf8_lossy(kv.key), "type": kv.ty.name(), "value": value_of(&kv),
            })).collect::<Vec<_>>(),
            "shards": shards().map(|(pieces, h)| json!({
                "path": first_path(pieces).to_string_lossy(), "pieces": pieces.len(), "bytes": bytes(pieces),
                "n_tensors": h.tensors().len(), "data_offset": h.data_offset(),
            })).collect::<Vec<_>>(),
        });
        if let (true, Some(object)) = (tensors, value.as_object_mut()) {
            object.insert("tensors".to_owned(), table.collect());
        }
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "version {}, alignment {}",
        first.version(),
        first.alignment()
    )?;
    for (pieces, h) in shards() {
        let more = match pieces.len() {
            0 | 1 => String::new(),
            n => format!(" and {} more pieces", n.saturating_sub(1)),
        };
        writeln!(
            out,
            "{}{more}: {} bytes, {} tensors, data at {}",
            first_path(pieces).display(),
            bytes(pieces),
            h.tensors().len(),
            h.data_offset()
        )?;
    }
    for kv in first.kvs() {
        writeln!(
            out,
            "{:<48} {:<5} {}",
            String::from_utf8_lossy(kv.key),
            kv.ty.name(),
            short_value(&kv)
        )?;
    }
    if tensors {
        for (i, (_, h)) in shards().enumerate() {
            for t in h.tensors() {
                let name = String::from_utf8_lossy(&t.name);
                writeln!(
                    out,
                    "{i:>5} {name:<48} {:<8} {:?} at {} ({} bytes)",
                    t.ty.name(),
                    t.dims,
                    t.offset,
                    t.len
                )?;
            }
        }
    }
    Ok(())
}

/// A value in a line of text.
pub(super) fn short_value(kv: &Kv<'_>) -> String {
    match value_of(kv) {
        Value::String(s) if s.chars().count() > SHOWN => {
            format!("{:?}…", s.chars().take(SHOWN).collect::<String>())
        }
        other => other.to_string(),
    }
}

fn value_of(kv: &Kv<'_>) -> Value {
    use ValueType::*;
    match kv.ty {
        F32 => kv
            .value
            .try_into()
            .map(f32::from_le_bytes)
            .map_or(Value::Null, |v| json!(v)),
        F64 => kv
            .value
            .try_into()
            .map(f64::from_le_bytes)
            .map_or(Value::Null, |v| json!(v)),
        Bool => json!(kv.value.first().is_some_and(|&b| b != 0)),
        String => json!(kv.str_bytes().map(std::string::String::from_utf8_lossy)),
        Array => kv.array().map_or(
            Value::Null,
            |(ty, n)| json!({ "of": ty.name(), "count": n }),
        ),
        U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64 => {
            let int = kv.int();
            // JSON numbers of this library are i64 or u64; the value is one of the two.
            int.and_then(|i| {
                i64::try_from(i)
                    .ok()
                    .map(|v| json!(v))
                    .or_else(|| u64::try_from(i).ok().map(|v| json!(v)))
            })
            .unwrap_or(Value::Null)
        }
    }
}

fn first_path(pieces: &[Source]) -> &Path {
    pieces.first().map_or(Path::new(""), Source::path)
}

fn bytes(pieces: &[Source]) -> u64 {
    pieces
        .iter()
        .fold(0, |sum, piece| sum.saturating_add(piece.len()))
}
