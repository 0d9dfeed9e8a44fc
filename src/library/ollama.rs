//! Ollama's store: `manifests/<host>/<namespace>/<model>/<tag>` name the blobs that a model consists of.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::item::Item;
use super::scan::{Entry, Walk};
use crate::model::Found;

const MODEL: &str = "application/vnd.ollama.image.model";
const PROJECTOR: &str = "application/vnd.ollama.image.projector";
/// Ollama's own registry goes without saying.
const HOST: &str = "registry.ollama.ai";
/// Bytes of a manifest; real ones have some hundred.
const MAX_MANIFEST: u64 = 1 << 20;

/// Whether a directory is such a store.
pub(super) fn is_store(entries: &[Entry]) -> bool {
    let has = |name| {
        entries
            .iter()
            .any(|entry| entry.is_dir && entry.name == name)
    };
    has("manifests") && has("blobs")
}

/// The models of all manifests, as `library/name/tag`; those of another registry in a folder of its name.
pub(super) fn scan(walk: &mut Walk<'_>, dir: &Path, folder: &[OsString]) {
    // Watched, not read: a manifest may wait for its blobs.
    drop(walk.enter(&dir.join("blobs")));
    let mut dirs = vec![(dir.join("manifests"), Vec::new())];
    while let Some((at, below)) = dirs.pop() {
        for entry in walk.enter(&at).unwrap_or_default() {
            let path = at.join(&entry.name);
            let name = [&below[..], &[entry.name]].concat();
            if entry.is_dir {
                dirs.push((path, name));
            } else if let Some(item) = model(dir, folder, &path, &name) {
                walk.out.items.push(item);
            }
        }
    }
}

/// The model of one manifest. `None` for one without a GGUF file.
fn model(store: &Path, folder: &[OsString], manifest: &Path, name: &[OsString]) -> Option<Item> {
    let name = match name.split_first() {
        Some((host, rest)) if host == HOST => rest,
        _ => name,
    };
    let (tag, above) = name.split_last()?;
    let mut stem = above.last()?.clone();
    stem.push("-");
    stem.push(tag);
    let files = match blobs(store, manifest) {
        Ok((models, _)) if models.is_empty() => return None,
        Ok((models, projectors)) => Ok(found(stem, models, projectors)),
        Err(why) => Err(format!("{}: {why}", manifest.display())),
    };
    Some(Item {
        folder: [folder, above].concat(),
        name: tag.clone(),
        files,
        unfinished: Vec::new(),
    })
}

fn found(stem: OsString, models: Vec<PathBuf>, projectors: Vec<PathBuf>) -> Found {
    let several = projectors.len() > 1;
    let name_of = |no: usize| {
        let mut name = OsString::from("mmproj-");
        name.push(&stem);
        if several {
            name.push(format!("-{no}"));
        }
        name.push(".gguf");
        name
    };
    let projectors = (1..).zip(projectors);
    Found {
        projectors: projectors.map(|(no, path)| (name_of(no), path)).collect(),
        is_set: models.len() > 1,
        files: models.into_iter().map(|path| vec![path]).collect(),
        stem,
    }
}

/// The blobs of a manifest: the model's files and its projectors.
fn blobs(store: &Path, manifest: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), String> {
    let mut text = Vec::new();
    File::open(manifest)
        .and_then(|file| file.take(MAX_MANIFEST).read_to_end(&mut text))
        .map_err(|error| error.to_string())?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|error| format!("not a manifest: {error}"))?;
    let layers = value.get("layers").and_then(Value::as_array);
    let (mut models, mut projectors) = (Vec::new(), Vec::new());
    for layer in layers.ok_or("not a manifest: no layers")? {
        let text = |key| layer.get(key).and_then(Value::as_str).unwrap_or_default();
        let kind = match text("mediaType") {
            MODEL => &mut models,
            PROJECTOR => &mut projectors,
            _ => continue,
        };
        let digest = text("digest");
        let path = blob(store, digest).ok_or_else(|| format!("{digest:?} is no digest"))?;
        kind.push(path);
    }
    Ok((models, projectors))
}

/// The path of a blob: `sha256-…`, in old stores `sha256:…`.
fn blob(store: &Path, digest: &str) -> Option<PathBuf> {
    let (kind, hex) = digest.split_once(':')?;
    let sound = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric());
    if !sound(kind) || !sound(hex) {
        return None;
    }
    let path = |name: String| store.join("blobs").join(OsStr::new(&name));
    let (now, old) = (path(format!("{kind}-{hex}")), path(digest.to_owned()));
    Some(if !now.exists() && old.exists() {
        old
    } else {
        now
    })
}
