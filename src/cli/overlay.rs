//! Overrides of keys, from options and from a TOML file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::args::Overrides;
use super::exit::CliError;
use crate::gguf::Value;
use crate::layout::{Overlay, OverlayError, Setting, parse_overrides};
use crate::model::Model;

/// Bytes of a file that becomes a value, or of an overlay; a chat template has some thousand.
const MAX_FILE: u64 = 64 << 20;

/// What the options say; they win over the file.
///
/// # Errors
/// `Usage` for what is no override, `Failed` for a file that cannot be read.
pub(super) fn read(given: &Overrides) -> Result<Overlay, CliError> {
    let mut overlay = Overlay::default();
    for list in &given.override_kv {
        for (key, setting) in parse_overrides(list)? {
            overlay.set(&key, setting)?;
        }
    }
    for pair in &given.set_kv_file {
        let bytes = pair.as_bytes();
        let at = bytes.iter().position(|&b| b == b'=').ok_or_else(|| {
            CliError::Usage(format!(
                "--set-kv-file {}: KEY=FILE is needed",
                pair.display()
            ))
        })?;
        let (key, file) = bytes.split_at(at);
        let file = OsStr::from_bytes(file.get(1..).unwrap_or_default());
        overlay.set(key, text_of(Path::new(file))?)?;
    }
    for key in &given.remove_kv {
        overlay.remove(key.as_bytes())?;
    }
    match &given.overlay {
        Some(path) => Ok(overlay.over(read_toml(path)?)),
        None => Ok(overlay),
    }
}

/// Applies an overlay to a model that was loaded, and says on stderr what may not have been meant: in the background
/// too, where that is the terminal of whoever mounts, until the mount answers.
///
/// # Errors
/// `Overlay` for a change that no loader could follow.
pub(super) fn apply(overlay: &Overlay, model: &mut Model) -> Result<(), OverlayError> {
    for warning in overlay.apply(&mut model.headers)? {
        drop(writeln!(std::io::stderr(), "ggufuse: warning: {warning}"));
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes));
    match read {
        Ok(_) if bytes.len() as u64 <= MAX_FILE => Ok(bytes),
        Ok(_) => Err(CliError::Usage(format!(
            "{}: more than {MAX_FILE} bytes",
            path.display()
        ))),
        Err(error) => Err(CliError::Failed(format!("{}: {error}", path.display()))),
    }
}

fn text_of(path: &Path) -> Result<Setting, CliError> {
    Ok(Setting::Typed(Value::string(&read_file(path)?)))
}

fn read_toml(path: &Path) -> Result<Overlay, CliError> {
    let bad = |why: String| CliError::Usage(format!("{}: {why}", path.display()));
    let text = String::from_utf8(read_file(path)?).map_err(|_| bad("not UTF-8".to_owned()))?;
    let table: Map<String, Json> =
        toml::from_str(&text).map_err(|error| bad(error.to_string().trim_end().to_owned()))?;
    let mut overlay = Overlay::default();
    for (name, value) in &table {
        match (name.as_str(), value) {
            ("set", Json::Object(keys)) => {
                for (key, value) in keys {
                    let setting = setting(path, value)?.ok_or_else(|| {
                        bad(format!(
                            "{key:?}: neither a value, nor {{ type = …, value = … }} that agree, nor {{ file = … }} (a key with dots needs quotes)"
                        ))
                    })?;
                    overlay.set(key.as_bytes(), setting)?;
                }
            }
            ("remove", Json::Array(keys)) => {
                for key in keys {
                    let key = key
                        .as_str()
                        .ok_or_else(|| bad("remove: a list of keys is needed".to_owned()))?;
                    overlay.remove(key.as_bytes())?;
                }
            }
            _ => {
                return Err(bad(format!(
                    "{name:?}: only a table `set` and a list `remove` have a meaning"
                )));
            }
        }
    }
    Ok(overlay)
}

/// A value of `[set]`. A file's name is relative to the overlay's folder.
fn setting(overlay: &Path, value: &Json) -> Result<Option<Setting>, CliError> {
    let Json::Object(table) = value else {
        return Ok(Setting::of_value(value));
    };
    let text = |name: &str| table.get(name).and_then(Json::as_str);
    match (text("file"), text("type"), table.get("value"), table.len()) {
        (Some(file), None, None, 1) => {
            let folder = overlay.parent().unwrap_or(Path::new(""));
            text_of(&folder.join(file)).map(Some)
        }
        (None, Some(ty), Some(value), 2) => Ok(Setting::of_type(ty, value)),
        _ => Ok(None),
    }
}
