//! The files of a model's directory with all that does not change looked up: an immutable snapshot.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant, SystemTime};

use super::attr::{Attr, Ownership, newest};
use super::entry::{About, FileContent, View, ViewFile};
use super::error::VfsError;
use crate::layout::{Content, Extent, VirtualFile};
use crate::source::{Identity, Source, SourceError};

/// A provisional view is planned anew when it is looked at after this time.
const PROVISIONAL: Duration = Duration::from_millis(500);

/// A file: its attributes and the sources that it uses.
#[derive(Debug)]
struct Node {
    attr: Attr,
    used: Vec<usize>,
}

/// A planned view. Its files have the numbers from `first` on.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) view: View,
    pub(super) first: u64,
    /// In the order of `view.files`.
    nodes: Vec<Node>,
    by_name: HashMap<OsString, usize>,
    at: Instant,
}

impl Planned {
    /// `mtime` is that of files without a source.
    pub(super) fn new(view: View, first: u64, ownership: Ownership, mtime: SystemTime) -> Planned {
        let (mut nodes, mut by_name) = (Vec::with_capacity(view.files.len()), HashMap::new());
        let mtime = newest(view.sources.iter()).unwrap_or(mtime);
        for ((index, file), ino) in view.files.iter().enumerate().zip(first..) {
            let used: BTreeSet<usize> = match &file.content {
                FileContent::Fixed(file) => (file.extents().iter())
                    .filter_map(|extent| match extent.content {
                        Content::Source { source, .. } => Some(source),
                        Content::Inline(_) | Content::Zeros => None,
                    })
                    .collect(),
                FileContent::Computed(_) => (0..view.sources.len()).collect(),
            };
            let sources: Vec<&Source> = used.iter().filter_map(|&i| view.sources.get(i)).collect();
            let (size, volatile) = match &file.content {
                FileContent::Fixed(file) => (file.len(), false),
                FileContent::Computed(_) => (0, true),
            };
            let mut attr = ownership.file(ino, size, &sources, mtime);
            attr.volatile = volatile;
            by_name.insert(file.name.clone(), index);
            nodes.push(Node {
                attr,
                used: used.into_iter().collect(),
            });
        }
        Planned {
            view,
            first,
            nodes,
            by_name,
            at: Instant::now(),
        }
    }

    /// The source that a file is all of, and nothing else.
    pub(super) fn whole_source(&self, index: usize) -> Option<&Source> {
        let FileContent::Fixed(file) = &self.view.files.get(index)?.content else {
            return None;
        };
        let [
            Extent {
                content: Content::Source { source, offset: 0 },
                len,
                ..
            },
        ] = file.extents()
        else {
            return None;
        };
        let source = self.view.sources.get(*source)?;
        (source.len() == *len).then_some(source)
    }

    pub(super) fn index_of_name(&self, name: &OsStr) -> Result<usize, VfsError> {
        self.by_name.get(name).copied().ok_or(VfsError::NotFound)
    }

    /// `None` for a number of another view.
    pub(super) fn index_of_ino(&self, ino: u64) -> Option<usize> {
        let index = usize::try_from(ino.checked_sub(self.first)?).ok()?;
        (index < self.nodes.len()).then_some(index)
    }

    pub(super) fn file(&self, index: usize) -> Result<(&ViewFile, &Attr), VfsError> {
        self.view
            .files
            .get(index)
            .zip(self.nodes.get(index).map(|node| &node.attr))
            .ok_or(VfsError::NotFound)
    }

    /// Fails when a path that file `index` is made of no longer leads to the file that is open.
    pub(super) fn verify(&self, index: usize) -> Result<(), SourceError> {
        let Some(node) = self.nodes.get(index) else {
            return Ok(());
        };
        node.used
            .iter()
            .filter_map(|&i| self.view.sources.get(i))
            .try_for_each(Source::verify_path)
    }

    /// As [`Planned::verify`], for all files.
    pub(super) fn verify_all(&self) -> Result<(), SourceError> {
        self.view.sources.iter().try_for_each(Source::verify_path)
    }

    /// Provisional, and old enough to be planned anew.
    pub(super) fn is_due(&self) -> bool {
        self.view.provisional && self.at.elapsed() >= PROVISIONAL
    }

    /// What its directory shows; `before` where there is no source.
    pub(super) fn about(&self, before: About) -> About {
        About {
            mtime: newest(self.view.sources.iter()).unwrap_or(before.mtime),
            bytes: self
                .nodes
                .iter()
                .fold(0u64, |sum, node| sum.saturating_add(node.attr.size)),
        }
    }

    /// Roughly its bytes in memory.
    pub(super) fn weight(&self) -> usize {
        const NODE: usize = 512;
        let extents = |file: &VirtualFile| {
            let inline = file.extents().iter().map(|extent| match &extent.content {
                Content::Inline(bytes) => bytes.len(),
                Content::Source { .. } | Content::Zeros => 0,
            });
            inline.sum::<usize>() + size_of_val::<[Extent]>(file.extents())
        };
        let files = self.view.files.iter().map(|file| match &file.content {
            FileContent::Fixed(file) => extents(file),
            FileContent::Computed(compute) => compute.weight(),
        });
        files.sum::<usize>() + NODE * (self.nodes.len() + self.view.sources.len())
    }

    pub(super) fn signature(&self) -> Signature {
        Signature::of(&self.view)
    }
}

/// What tells whether another plan of the same model has the same bytes, small enough to be kept for all of them.
#[derive(Debug)]
pub(super) struct Signature {
    /// Name and length; the content itself where no source tells whether it is the same.
    files: Vec<(OsString, u64, Option<VirtualFile>)>,
    sources: Vec<Identity>,
}

impl Signature {
    fn of(view: &View) -> Signature {
        let sourced = |extent: &Extent| matches!(extent.content, Content::Source { .. });
        let files = view.files.iter().map(|file| match &file.content {
            FileContent::Fixed(content) => {
                let whole = !content.extents().iter().any(sourced);
                (
                    file.name.clone(),
                    content.len(),
                    whole.then(|| content.clone()),
                )
            }
            FileContent::Computed(_) => (file.name.clone(), 0, None),
        });
        Signature {
            files: files.collect(),
            sources: view.sources.iter().map(Source::identity).collect(),
        }
    }

    /// The same sources make the same bytes: [`super::Plan`] promises that.
    pub(super) fn is_of(&self, view: &View) -> bool {
        let now = Signature::of(view);
        self.files == now.files
            && self.sources.len() == now.sources.len()
            && self
                .sources
                .iter()
                .zip(&now.sources)
                .all(|(a, b)| a.same_bytes(b))
    }
}
