//! What the layer above gives to be shown: folders of models, each of which is planned into files when it is looked at.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::SystemTime;

use super::VfsError;
use crate::layout::VirtualFile;
use crate::source::Source;

/// A directory of directories.
#[derive(Debug, Clone)]
pub struct Folder {
    /// What is in it, by name.
    pub entries: BTreeMap<OsString, Entry>,
    /// When it was modified last.
    pub mtime: SystemTime,
}

/// A directory of a [`Folder`].
#[derive(Debug, Clone)]
pub enum Entry {
    /// One with directories in it.
    Folder(Folder),
    /// One with the files of a model.
    Model(Model),
}

/// A model's directory; the files are planned when somebody looks.
#[derive(Debug, Clone)]
pub struct Model {
    /// Plans them. The same `Arc` in a later [`Folder`] is the same model.
    pub plan: Arc<dyn Plan>,
    /// Newest modification and total bytes of its sources, as far as known unplanned.
    pub about: About,
}

/// What a model's directory shows of it while it is not planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct About {
    /// Newest modification of a source.
    pub mtime: SystemTime,
    /// Bytes of the sources.
    pub bytes: u64,
}

/// Plans the files of a model's directory.
pub trait Plan: Debug + Send + Sync {
    /// The files as they are to be shown now. Called when somebody looks for the first time, when a source was found
    /// changed, and when the last plan was given up to save memory: the same sources must give the same bytes.
    ///
    /// # Errors
    /// Where nothing can be shown: what was planned before stays visible, but cannot be opened.
    fn plan(&self) -> Result<View, VfsError>;
}

/// The files of a model's directory and the sources that they are made of.
#[derive(Debug, Clone)]
pub struct View {
    /// The files; names are unique.
    pub files: Vec<ViewFile>,
    /// The sources that the files' extents index.
    pub sources: Vec<Source>,
    /// Value of `user.ggufuse.view`: `merged`, `shards` …
    pub kind: &'static str,
    /// Something cannot be served as yet, so it is planned anew whenever somebody looks (at most twice a second).
    pub provisional: bool,
}

/// One file of a view.
#[derive(Debug, Clone)]
pub struct ViewFile {
    /// Its name in the directory.
    pub name: OsString,
    /// Its bytes.
    pub content: FileContent,
    /// Value of the extended attribute `user.ggufuse.source`.
    pub sources_text: Vec<u8>,
}

impl ViewFile {
    /// A file of fixed text.
    pub fn text(name: &str, text: String) -> ViewFile {
        let mut content = VirtualFile::default();
        // Fails for more than 2^63 bytes only.
        let _ = content.push_inline(text.into_bytes());
        ViewFile {
            name: name.into(),
            content: FileContent::Fixed(content),
            sources_text: Vec::new(),
        }
    }

    /// A file whose bytes are computed at each open.
    pub fn computed(name: &str, compute: Arc<dyn Compute>) -> ViewFile {
        ViewFile {
            name: name.into(),
            content: FileContent::Computed(compute),
            sources_text: Vec::new(),
        }
    }
}

/// Where the bytes of a file come from.
#[derive(Debug, Clone)]
pub enum FileContent {
    /// Extents, the same for every reader.
    Fixed(VirtualFile),
    /// Computed at each open, from all sources of the view.
    Computed(Arc<dyn Compute>),
}

/// Computes the content of a file when it is opened: that handle reads these bytes until it is closed, whatever
/// a later open gives. `stat` shows the size of what was computed last. Several opens may compute at a time.
pub trait Compute: Debug + Send + Sync {
    /// The bytes for one handle.
    ///
    /// # Errors
    /// What the open answers: [`VfsError::NoMemory`] is ENOMEM, [`VfsError::Failed`] is EIO.
    fn compute(&self) -> Result<Vec<u8>, VfsError>;

    /// Roughly the bytes of memory that it holds to do so.
    fn weight(&self) -> usize;
}
