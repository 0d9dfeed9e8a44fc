//! A library as a mount shows it: each model that is found is a directory with its view, or with the reason why there
//! is none.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::exit::CliError;
use super::shown::{Shown, error_file};
use crate::library::{Item, Node, Scan, Watch, tree};
use crate::model;
use crate::vfs::{About, Entry, Folder, Fs, Model, Plan, VfsError, View};

/// A library that is shown, and goes on to be what is on disk.
#[derive(Debug)]
pub(super) struct Shelves {
    watch: Watch,
    point: PathBuf,
    shown: Arc<Shown>,
    /// The models that are shown, by their paths below the mount point.
    models: HashMap<PathBuf, Arc<OfLibrary>>,
}

impl Shelves {
    pub(super) fn new(watch: Watch, point: &Path, shown: Shown) -> Shelves {
        Shelves {
            watch,
            point: point.to_owned(),
            shown: Arc::new(shown),
            models: HashMap::new(),
        }
    }

    /// What to show for what was found: a model that was shown before goes on.
    pub(super) fn folder(&mut self, scan: Scan) -> Folder {
        let mut now = HashMap::new();
        let folder = self.fold(tree(scan.items), PathBuf::new(), &mut now);
        self.models = now;
        folder
    }

    fn fold(
        &self,
        nodes: BTreeMap<OsString, Node>,
        at: PathBuf,
        now: &mut HashMap<PathBuf, Arc<OfLibrary>>,
    ) -> Folder {
        let mut mtime = SystemTime::UNIX_EPOCH;
        let mut entries = BTreeMap::new();
        for (name, node) in nodes {
            let path = at.join(&name);
            let entry = match node {
                Node::Folder(nodes) => {
                    let folder = self.fold(nodes, path, now);
                    mtime = mtime.max(folder.mtime);
                    Entry::Folder(folder)
                }
                Node::Model(item) => {
                    let (newest, bytes) = item.about();
                    mtime = mtime.max(newest);
                    let before = self.models.get(&path).filter(|model| model.item == item);
                    let plan = before.cloned().unwrap_or_else(|| {
                        Arc::new(OfLibrary {
                            item,
                            directory: self.point.join(&path),
                            shown: Arc::clone(&self.shown),
                        })
                    });
                    now.insert(path, Arc::clone(&plan));
                    let about = About {
                        mtime: newest,
                        bytes,
                    };
                    Entry::Model(Model { plan, about })
                }
            };
            entries.insert(name, entry);
        }
        Folder { entries, mtime }
    }

    /// Shows every change from now on; does not return.
    pub(super) fn follow(mut self, fs: &Fs) {
        loop {
            self.watch.wait();
            let scan = self.watch.scan();
            fs.show(self.folder(scan));
        }
    }
}

/// A model of a library. One that is refused shows why, and is tried again.
#[derive(Debug)]
struct OfLibrary {
    item: Item,
    /// Where it is shown.
    directory: PathBuf,
    shown: Arc<Shown>,
}

impl OfLibrary {
    fn load(&self) -> Result<View, CliError> {
        let unfinished = self.item.unfinished.iter().map(|sidecar| {
            let file = sidecar.with_extension("");
            (
                file,
                format!("a download goes on: {} is beside it", sidecar.display()),
            )
        });
        refuse(unfinished.collect())?;
        let found = (self.item.files.clone()).map_err(CliError::Failed)?;
        let model = model::load_found(found)?;
        let written = model
            .sources
            .iter()
            .filter(|source| source.is_being_written());
        let written = written.map(|source| {
            let why = "somebody has it open for writing: a copy or a download goes on";
            (source.path().to_owned(), why.to_owned())
        });
        refuse(written.collect())?;
        self.shown.view(model, &self.directory)
    }
}

fn refuse(problems: Vec<(PathBuf, String)>) -> Result<(), CliError> {
    if problems.is_empty() {
        return Ok(());
    }
    Err(model::ModelError::Invalid { problems }.into())
}

impl Plan for OfLibrary {
    fn plan(&self) -> Result<View, VfsError> {
        self.load().or_else(|error| {
            log::debug!("{}: {error}", self.item.name.display());
            Ok(View {
                files: vec![error_file(&error)],
                sources: Vec::new(),
                kind: "refused",
                provisional: true,
            })
        })
    }
}
