//! A model of a library, as found by names.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::model::Found;

/// A model of a library. Equal items are the same model, whatever its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The folders that it is shown in, from the root.
    pub folder: Vec<OsString>,
    /// The name of its directory there.
    pub name: OsString,
    /// Its files, or why they are not known.
    pub files: Result<Found, String>,
    /// Where a downloader keeps what it needs to go on with a file: that one is not whole, whatever it looks like.
    pub unfinished: Vec<PathBuf>,
}

/// Beside a file that aria2 or axel have not finished lies one of these.
const SIDECARS: [&str; 2] = [".aria2", ".st"];

impl Item {
    /// A model in `folder`, shown by its own name.
    pub(super) fn new(folder: &[OsString], found: Found) -> Item {
        let sidecar = |path: &Path| {
            SIDECARS
                .iter()
                .map(|end| with_end(path, end))
                .find(|sidecar| sidecar.exists())
        };
        let unfinished = found.paths().filter_map(sidecar).collect();
        Item {
            folder: folder.to_vec(),
            name: found.stem.clone(),
            files: Ok(found),
            unfinished,
        }
    }

    /// The paths of its files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().flat_map(Found::paths)
    }

    /// The name of its directory where another one has its own name: that of its first file.
    pub(super) fn other_name(&self) -> OsString {
        let first = self.paths().next().and_then(Path::file_name);
        first.map_or_else(|| self.name.clone(), OsStr::to_owned)
    }

    /// Newest modification and bytes of the files that are there.
    pub fn about(&self) -> (SystemTime, u64) {
        let metas = self.paths().filter_map(|path| std::fs::metadata(path).ok());
        metas.fold((SystemTime::UNIX_EPOCH, 0), |(newest, bytes), meta| {
            let mtime = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            (newest.max(mtime), bytes.saturating_add(meta.len()))
        })
    }
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}
