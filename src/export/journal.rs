//! What an interrupted [`super::drain`] needs to be taken up again, as JSON beside the output. It is there, and durable,
//! before the first source is deleted, and goes after the last.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::ExportError;
use super::partial::{beside, sync_folder};

const VERSION: u64 = 1;

/// One source, and which bytes of the output come from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub path: PathBuf,
    pub size: u64,
    pub mtime: (i64, i64),
    /// Where its part of the output begins; it ends where the next one's begins.
    pub start: u64,
    /// Offset in the output, length, offset in the source. What lies between is zeros.
    pub ranges: Vec<(u64, u64, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Journal {
    /// Length of the output.
    pub len: u64,
    /// Length and SHA-256 of its head, which tell this output from other files.
    pub head: (u64, String),
    pub parts: Vec<Part>,
    /// So many sources, from the first on, are durable in the output, and may be gone.
    pub durable: usize,
}

impl Journal {
    pub(super) fn path(target: &Path) -> PathBuf {
        beside(target, "journal")
    }

    /// Where part `no` of the output begins; the end of the output for the number after the last.
    pub(super) fn start(&self, no: usize) -> u64 {
        self.parts.get(no).map_or(self.len, |part| part.start)
    }

    /// Puts it on the disk in place of the last one.
    pub(super) fn store(&self, target: &Path) -> Result<(), ExportError> {
        let path = Journal::path(target);
        let new = beside(target, "journal.new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec(&self.to_json())?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(ExportError::io(&path))?;
        sync_folder(&path)
    }

    /// `None` where there is no journal.
    pub(super) fn load(target: &Path) -> Result<Option<Journal>, ExportError> {
        let path = Journal::path(target);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ExportError::io(&path)(error)),
        };
        let parsed = serde_json::from_slice(&bytes).ok();
        match parsed.as_ref().and_then(Journal::from_json) {
            Some(journal) => Ok(Some(journal)),
            None => Err(ExportError::Journal {
                path,
                why: "cannot be read".to_owned(),
            }),
        }
    }

    pub(super) fn remove(target: &Path) -> Result<(), ExportError> {
        let path = Journal::path(target);
        // One that was never finished, of a run that was killed.
        drop(fs::remove_file(beside(target, "journal.new")));
        fs::remove_file(&path).map_err(ExportError::io(&path))?;
        sync_folder(&path)
    }

    fn to_json(&self) -> Value {
        let parts = self.parts.iter().map(|part| {
            json!({
                "path": path_to_json(&part.path), "size": part.size, "mtime": [part.mtime.0, part.mtime.1],
                "start": part.start, "ranges": part.ranges,
            })
        });
        json!({
            "ggufuse": VERSION, "len": self.len, "head": self.head, "durable": self.durable,
            "parts": parts.collect::<Vec<_>>(),
        })
    }

    /// `None` unless every field is there and the parts are in order.
    fn from_json(json: &Value) -> Option<Journal> {
        if json.get("ggufuse")?.as_u64()? != VERSION {
            return None;
        }
        let part = |part: &Value| {
            Some(Part {
                path: path_from_json(part.get("path")?)?,
                size: part.get("size")?.as_u64()?,
                mtime: (
                    part.pointer("/mtime/0")?.as_i64()?,
                    part.pointer("/mtime/1")?.as_i64()?,
                ),
                start: part.get("start")?.as_u64()?,
                ranges: part
                    .get("ranges")?
                    .as_array()?
                    .iter()
                    .map(|r| Some((number(r, 0)?, number(r, 1)?, number(r, 2)?)))
                    .collect::<Option<_>>()?,
            })
        };
        let journal = Journal {
            len: json.get("len")?.as_u64()?,
            head: (
                json.pointer("/head/0")?.as_u64()?,
                json.pointer("/head/1")?.as_str()?.to_owned(),
            ),
            parts: json
                .get("parts")?
                .as_array()?
                .iter()
                .map(part)
                .collect::<Option<_>>()?,
            durable: usize::try_from(json.get("durable")?.as_u64()?).ok()?,
        };
        let starts = journal.parts.iter().map(|part| part.start);
        let ordered = starts.chain([journal.len]).is_sorted();
        (ordered && journal.durable <= journal.parts.len()).then_some(journal)
    }
}

fn number(list: &Value, at: usize) -> Option<u64> {
    list.get(at)?.as_u64()
}

/// A string, or its bytes where it is not UTF-8.
fn path_to_json(path: &Path) -> Value {
    match path.to_str() {
        Some(text) => json!(text),
        None => json!(path.as_os_str().as_bytes()),
    }
}

fn path_from_json(json: &Value) -> Option<PathBuf> {
    if let Some(text) = json.as_str() {
        return Some(text.into());
    }
    let bytes = json.as_array()?.iter();
    let bytes = bytes.map(|b| u8::try_from(b.as_u64()?).ok());
    Some(OsString::from_vec(bytes.collect::<Option<_>>()?).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn what_is_stored_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.gguf");
        assert_eq!(Journal::load(&target).unwrap(), None);
        let part = |path: &OsStr, start| Part {
            path: path.into(),
            size: u64::MAX,
            mtime: (-1, 999_999_999),
            start,
            ranges: vec![(start, 5, 7), (start + 5, 1, u64::MAX)],
        };
        let mut journal = Journal {
            len: 100,
            head: (10, "abc".to_owned()),
            parts: vec![
                part(OsStr::new("a b"), 0),
                part(OsStr::from_bytes(b"\xff/"), 50),
            ],
            durable: 1,
        };
        journal.store(&target).unwrap();
        assert_eq!(Journal::load(&target).unwrap(), Some(journal.clone()));
        assert_eq!((journal.start(1), journal.start(2)), (50, 100));
        journal.durable = 3;
        journal.store(&target).unwrap();
        assert!(matches!(
            Journal::load(&target),
            Err(ExportError::Journal { .. })
        ));
        Journal::remove(&target).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_journal_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.gguf");
        for text in [
            "",
            "{",
            "[]",
            "{\"ggufuse\":2}",
            "{\"ggufuse\":1,\"len\":1}",
        ] {
            fs::write(Journal::path(&target), text).unwrap();
            assert!(Journal::load(&target).is_err(), "{text}");
        }
    }
}
