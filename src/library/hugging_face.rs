//! Hugging Face's cache: `models--org--name/snapshots/<revision>/…`, links to `blobs/`, and `refs/main` that names the
//! revision that is current.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::scan::{Entry, Walk};
use crate::model::Place;

/// Characters of a revision that are shown.
const SHORT: usize = 8;

/// The organization and the name of a repository's directory, if it is one.
pub(super) fn repo(dir: &Path, entries: &[Entry]) -> Option<Vec<OsString>> {
    let snapshots = entries
        .iter()
        .any(|entry| entry.is_dir && entry.name == "snapshots");
    let name = dir.file_name()?.as_bytes().strip_prefix(b"models--")?;
    let parts = match name.windows(2).position(|pair| pair == b"--") {
        Some(at) => vec![name.get(..at)?, name.get(at.checked_add(2)?..)?],
        None => vec![name],
    };
    (snapshots && parts.iter().all(|part| !part.is_empty())).then(|| {
        parts
            .into_iter()
            .map(|part| OsStr::from_bytes(part).to_owned())
            .collect()
    })
}

/// The models of all revisions: those of the current one in the repository's folder; of another one, where they are
/// other files, in `name@revision` beside it.
pub(super) fn scan(walk: &mut Walk<'_>, dir: &Path, folder: &[OsString]) {
    // Watched, not read: a link may wait for its blob.
    drop(walk.enter(&dir.join("blobs")));
    drop(walk.enter(&dir.join("refs")));
    let snapshots = dir.join("snapshots");
    let Some(mut revisions) = walk.enter(&snapshots) else {
        return;
    };
    revisions.retain(|revision| revision.is_dir);
    let current = current(dir, &snapshots, &revisions);
    revisions.sort_by_key(|revision| Some(&revision.name) != current.as_ref());
    let mut shown = HashSet::new();
    for revision in revisions {
        let mut folder = folder.to_vec();
        if Some(&revision.name) != current.as_ref()
            && let Some(name) = folder.last_mut()
        {
            let short = revision.name.as_bytes().get(..SHORT);
            name.push("@");
            name.push(short.map_or(revision.name.as_os_str(), OsStr::from_bytes));
        }
        let before = walk.out.items.len();
        snapshot(walk, snapshots.join(&revision.name), folder);
        let items = walk.out.items.split_off(before);
        for item in items {
            let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let files: Vec<PathBuf> = item.paths().map(real).collect();
            if shown.insert((item.name.clone(), files)) {
                walk.out.items.push(item);
            }
        }
    }
}

/// The revision that `refs/main` names, else the one that was written last.
fn current(dir: &Path, snapshots: &Path, revisions: &[Entry]) -> Option<OsString> {
    let named = std::fs::read(dir.join("refs/main")).unwrap_or_default();
    let named = OsStr::from_bytes(named.trim_ascii());
    if revisions.iter().any(|revision| revision.name == named) {
        return Some(named.to_owned());
    }
    let written = |revision: &&Entry| {
        let meta = std::fs::metadata(snapshots.join(&revision.name));
        meta.and_then(|meta| meta.modified()).ok()
    };
    let newest = revisions.iter().max_by_key(written)?;
    Some(newest.name.clone())
}

/// The models of one revision, in folders as there are directories.
fn snapshot(walk: &mut Walk<'_>, dir: PathBuf, folder: Vec<OsString>) {
    let mut dirs = vec![(dir, folder)];
    while let Some((dir, folder)) = dirs.pop() {
        let Some(entries) = walk.enter(&dir) else {
            continue;
        };
        walk.models(&Place::of(&dir), &folder, &entries);
        for entry in entries.iter().filter(|entry| entry.is_dir) {
            let below = [folder.as_slice(), std::slice::from_ref(&entry.name)].concat();
            dirs.push((dir.join(&entry.name), below));
        }
    }
}
