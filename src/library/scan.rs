//! The walk through a library: every directory once, those behind symlinks last, each by the rules of its layout.

use std::collections::{HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use super::item::Item;
use super::{hugging_face, llama_cpp, ollama};
use crate::model::{Place, is_model_file, models_in};

/// Whose rules say what the directories and files of a library mean.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Layout {
    /// Each directory's own, told by its structure.
    #[default]
    Auto,
    /// Folders of GGUF files.
    Plain,
    /// Hugging Face's cache: `models--org--name/snapshots/…`.
    HuggingFace,
    /// llama.cpp's cache of flat names, with `manifest=org=name=tag.json` beside them.
    LlamaCpp,
    /// LM Studio's folders, `org/repo/file.gguf`: plain ones.
    LmStudio,
    /// Ollama's store: manifests that name blobs.
    Ollama,
}

impl Layout {
    fn knows(self, other: Layout) -> bool {
        self == Layout::Auto || self == other
    }

    /// Whether files in a folder of no other layout are models.
    fn is_plain(self) -> bool {
        matches!(self, Layout::Auto | Layout::Plain | Layout::LmStudio)
    }
}

/// A library on disk.
#[derive(Debug, Clone)]
pub struct Library {
    /// Its directory, without symlinks.
    pub root: PathBuf,
    /// Its layout.
    pub layout: Layout,
    /// A directory that is passed over, without symlinks: the mount point.
    pub without: Option<PathBuf>,
    /// Whether what symlinks outside lead to belongs to it. Who can write into a library could else show what only the
    /// reader of it may read.
    pub follow_outside: bool,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Scan {
    /// The models.
    pub items: Vec<Item>,
    /// Whether any directory had a layout other than plain.
    pub structured: bool,
    /// Directories that could not be read.
    pub problems: Vec<(PathBuf, io::Error)>,
}

/// One entry of a directory.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub name: OsString,
    pub is_dir: bool,
    pub is_link: bool,
}

/// A scan that is going on.
pub(super) struct Walk<'a> {
    library: &'a Library,
    /// Told of every directory before it is read.
    entering: &'a mut dyn FnMut(&Path),
    seen: HashSet<(u64, u64)>,
    /// Directories to read, and the folders that they are shown as.
    dirs: VecDeque<(PathBuf, Vec<OsString>)>,
    /// The same behind symlinks, read last: a directory is shown where it really is, if that is in the library.
    links: VecDeque<(PathBuf, Vec<OsString>)>,
    pub(super) out: Scan,
}

impl Library {
    /// Reads the whole library. `entering` is told of every directory before it is read, so that one who watches it
    /// from then on misses nothing.
    pub fn scan(&self, entering: &mut dyn FnMut(&Path)) -> Scan {
        let mut walk = Walk {
            library: self,
            entering,
            seen: HashSet::new(),
            dirs: VecDeque::from([(self.root.clone(), Vec::new())]),
            links: VecDeque::new(),
            out: Scan::default(),
        };
        while let Some((dir, folder)) = walk.dirs.pop_front().or_else(|| walk.links.pop_front()) {
            walk.dir(&dir, &folder);
        }
        walk.out
    }
}

impl Walk<'_> {
    fn dir(&mut self, dir: &Path, folder: &[OsString]) {
        let Some(entries) = self.enter(dir) else {
            return;
        };
        let layout = self.library.layout;
        if layout.knows(Layout::Ollama) && ollama::is_store(&entries) {
            self.out.structured = true;
            ollama::scan(self, dir, folder);
        } else if layout.knows(Layout::HuggingFace)
            && let Some(repo) = hugging_face::repo(dir, &entries)
        {
            self.out.structured = true;
            // Shown as `org/name` in place of `models--org--name`.
            let shelf = folder.split_last().map_or(&[][..], |(_, above)| above);
            hugging_face::scan(self, dir, &[shelf, &repo].concat());
        } else if layout.knows(Layout::LlamaCpp)
            && (layout == Layout::LlamaCpp || llama_cpp::is_cache(&entries))
        {
            self.out.structured = true;
            llama_cpp::scan(self, dir, folder, &entries);
            self.descend(dir, folder, &entries);
        } else {
            if layout.is_plain() {
                self.models(&Place::of(dir), folder, &entries);
            }
            self.descend(dir, folder, &entries);
        }
    }

    /// The entries of a directory by name; `None` where it was read already, or cannot be.
    pub(super) fn enter(&mut self, dir: &Path) -> Option<Vec<Entry>> {
        // Before anything is asked of it: what is mounted there is ourselves.
        if Some(dir) == self.library.without.as_deref() {
            return None;
        }
        let read = std::fs::metadata(dir).and_then(|meta| {
            if !self.seen.insert((meta.dev(), meta.ino())) {
                return Ok(None);
            }
            (self.entering)(dir);
            self.list(dir).map(Some)
        });
        read.unwrap_or_else(|error| {
            // Gone between its parent's reading and its own.
            if error.kind() != io::ErrorKind::NotFound || dir == self.library.root {
                self.out.problems.push((dir.to_owned(), error));
            }
            None
        })
    }

    fn list(&mut self, dir: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            // What begins with a dot is hidden: caches and partial files of downloaders.
            if name.as_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type()?;
            let path = entry.path();
            let is_link = kind.is_symlink();
            if is_link && (self.leads_into_mount(&path) || self.is_outside(&path)) {
                continue;
            }
            let is_dir = if is_link {
                path.is_dir()
            } else {
                kind.is_dir()
            };
            if is_dir || is_link || kind.is_file() {
                entries.push(Entry {
                    name,
                    is_dir,
                    is_link,
                });
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Whether a symlink leads out of the library, where that is refused. What cannot be resolved is told when it is opened.
    fn is_outside(&mut self, link: &Path) -> bool {
        let outside = !self.library.follow_outside
            && (link.canonicalize()).is_ok_and(|target| !target.starts_with(&self.library.root));
        if outside {
            let why = io::Error::other("leads out of the library; --follow-outside allows it");
            self.out.problems.push((link.to_owned(), why));
        }
        outside
    }

    /// Told from the link's text alone: to follow it would be to ask ourselves.
    fn leads_into_mount(&self, link: &Path) -> bool {
        let Some(mount) = &self.library.without else {
            return false;
        };
        let mut path = link.to_owned();
        for _ in 0..40 {
            if plain(&path).starts_with(mount) {
                return true;
            }
            let Ok(target) = std::fs::read_link(&path) else {
                return false;
            };
            path = plain(&path.parent().unwrap_or(Path::new("/")).join(target));
        }
        true
    }

    /// The models among the files of a directory, whose names begin with the place's prefix there.
    pub(super) fn models(&mut self, place: &Place<'_>, folder: &[OsString], entries: &[Entry]) {
        let names = entries
            .iter()
            .filter(|entry| !entry.is_dir)
            .filter_map(|entry| {
                let called = entry.name.as_bytes();
                let called = called.strip_prefix(place.prefix.as_bytes())?;
                Some(OsStr::from_bytes(called).to_owned())
            })
            .filter(is_model_file);
        for found in models_in(place, names) {
            self.out.items.push(Item::new(folder, found));
        }
    }

    /// Has the directories in a directory read too.
    fn descend(&mut self, dir: &Path, folder: &[OsString], entries: &[Entry]) {
        for entry in entries.iter().filter(|entry| entry.is_dir) {
            let path = dir.join(&entry.name);
            let shown = [folder, std::slice::from_ref(&entry.name)].concat();
            if !entry.is_link {
                self.dirs.push_back((path, shown));
            } else if let Ok(path) = path.canonicalize() {
                self.links.push_back((path, shown));
            }
        }
    }
}

/// The path without `.` and `..`, told from its text.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}
