//! llama.cpp's cache of flat names: `org_repo_file.gguf`, and `manifest=org=repo=tag.json` that tells where the names of
//! organization and repository end. (Later builds keep Hugging Face's layout.)

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::scan::{Entry, Walk};
use crate::model::Place;

/// Whether a directory is such a cache.
pub(super) fn is_cache(entries: &[Entry]) -> bool {
    entries
        .iter()
        .any(|entry| !entry.is_dir && repo(&entry.name).is_some())
}

/// Organization and repository of a manifest, by its name.
fn repo(name: &OsStr) -> Option<(OsString, OsString)> {
    let name = name.as_bytes().strip_prefix(b"manifest=")?;
    let mut parts = name.strip_suffix(b".json")?.split(|&b| b == b'=');
    let (org, repo, _tag) = (parts.next()?, parts.next()?, parts.next()?);
    let part = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    let named = |bytes: &[u8]| !bytes.is_empty() && !bytes.contains(&b'/');
    (named(org) && named(repo) && parts.next().is_none()).then(|| (part(org), part(repo)))
}

/// The models of the cache: as `org/repo/model` where there is a manifest, else by the names of their files.
pub(super) fn scan(walk: &mut Walk<'_>, dir: &Path, folder: &[OsString], entries: &[Entry]) {
    let mut repos: Vec<_> = entries
        .iter()
        .filter_map(|entry| repo(&entry.name))
        .map(|(org, repo)| {
            let mut prefix = org.clone();
            prefix.push("_");
            prefix.push(&repo);
            prefix.push("_");
            (prefix, [org, repo])
        })
        .collect();
    // Of two names of which one begins with the other, the longer one is a file's.
    repos.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.cmp(b)));
    repos.dedup();
    let owner = |name: &OsStr| {
        let begins = |(prefix, _): &(OsString, _)| name.as_bytes().starts_with(prefix.as_bytes());
        repos.iter().position(begins)
    };
    let (mut groups, mut rest) = (vec![Vec::new(); repos.len()], Vec::new());
    for entry in entries.iter().filter(|entry| !entry.is_dir) {
        let group = owner(&entry.name).and_then(|index| groups.get_mut(index));
        group.unwrap_or(&mut rest).push(entry.clone());
    }
    for ((prefix, shown), entries) in repos.iter().zip(&groups) {
        let place = Place { dir, prefix };
        walk.models(&place, &[folder, shown].concat(), entries);
    }
    walk.models(&Place::of(dir), folder, &rest);
}
