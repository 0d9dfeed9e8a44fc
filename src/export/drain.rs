//! One file from sources that are deleted, each only once its bytes are durable in the file.
//!
//! Sources go as late as room allows: while there is room for the rest, none goes before the file is whole and has its
//! final name. Each state that a crash can leave is one that [`resume`] knows:
//!
//! | on the disk | then |
//! |---|---|
//! | no journal | nothing was deleted: begin anew |
//! | a journal and a partial file | go on after the sources that the journal calls durable |
//! | a journal and the final name | delete what is left of the sources, then the journal |

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use sha2::{Digest, Sha256};

use super::copy::Copier;
use super::journal::{Journal, Part};
use super::partial::{Partial, folder, refuse_existing, sync_folder};
use super::room::{self, room};
use super::{Event, ExportError, Output, Watch, compare};
use crate::layout::{Content, VirtualFile};
use crate::source::Source;

/// Bytes of the output, at least, by which it is known again.
const MIN_HEAD: u64 = 1 << 20;

/// A run that may delete.
struct Run<'w> {
    journal: Journal,
    content: VirtualFile,
    partial: Partial,
    /// Those that are still to be copied or deleted; one that is deleted is closed too, else it keeps its room.
    sources: Vec<Option<Source>>,
    verify: bool,
    watch: &'w mut dyn Watch,
}

/// The sources of a run that was interrupted, if there was one for this output.
///
/// # Errors
/// When there is a journal that cannot be read.
pub fn unfinished(target: &Path) -> Result<Option<Vec<PathBuf>>, ExportError> {
    let journal = Journal::load(target)?;
    Ok(journal.map(|j| j.parts.into_iter().map(|part| part.path).collect()))
}

/// Writes a file and deletes its sources. With `verify` what was written is read back and compared before a source goes.
///
/// # Errors
/// [`ExportError`]. If a source has been deleted by then, all of its bytes are in the file that was begun, and
/// [`resume`] goes on.
pub fn drain(
    output: &Output,
    sources: Vec<Source>,
    verify: bool,
    watch: &mut dyn Watch,
) -> Result<(), ExportError> {
    let target = &output.path;
    let parts = parts(output, &sources)?;
    can_delete(&parts)?;
    enough_room(target, output.content.len(), &parts)?;
    let partial = Partial::create(target)?;
    watch.event(Event::Writing(target, output.content.len()));
    let mut run = Run {
        journal: Journal {
            len: output.content.len(),
            head: (0, String::new()),
            parts,
            durable: 0,
        },
        content: output.content.clone(),
        partial,
        sources: sources.into_iter().map(Some).collect(),
        verify,
        watch,
    };
    run.copy(0, run.journal.start(0))?;
    run.finish()
}

/// Goes on with a run that was interrupted.
///
/// # Errors
/// As [`drain`], and `Journal` when what is on the disk is not what was left.
pub fn resume(target: &Path, verify: bool, watch: &mut dyn Watch) -> Result<(), ExportError> {
    let refused = |why: String| ExportError::Journal {
        path: Journal::path(target),
        why,
    };
    let Some(journal) = Journal::load(target)? else {
        return Err(refused("is not there".to_owned()));
    };
    let partial = match Partial::resume(target)? {
        Some(partial) if partial.is_published() => {
            partial.discard();
            return clear_up(target, &journal, watch);
        }
        Some(partial) => partial,
        None => return clear_up(target, &journal, watch),
    };
    let is_ours = |file: &File| {
        let long_enough = file
            .metadata()
            .is_ok_and(|meta| meta.len() >= journal.start(journal.durable));
        long_enough && digest(file, journal.head.0).is_ok_and(|digest| digest == journal.head.1)
    };
    if !is_ours(partial.file()?) {
        return Err(refused(format!(
            "{} is not the file that was begun",
            partial.path().display()
        )));
    }
    refuse_existing(target)?;
    let mut sources = Vec::new();
    for (no, part) in journal.parts.iter().enumerate() {
        let source = if no < journal.durable {
            None
        } else {
            Some(Source::open(&part.path)?)
        };
        if source.as_ref().is_some_and(|source| !part.is(source)) {
            return Err(refused(format!(
                "{} is not what it was",
                part.path.display()
            )));
        }
        sources.push(source);
    }
    for part in journal.parts.iter().take(journal.durable) {
        part.delete_if_same(watch)?;
    }
    let left = journal.len.saturating_sub(journal.start(journal.durable));
    watch.event(Event::Writing(target, left));
    Run {
        content: journal
            .content()
            .ok_or_else(|| refused("its ranges overlap".to_owned()))?,
        journal,
        partial,
        sources,
        verify,
        watch,
    }
    .finish()
}

impl Run<'_> {
    /// Copies the sources that are not durable yet, publishes the file, deletes what is left of the sources.
    fn finish(mut self) -> Result<(), ExportError> {
        let target = self.partial.target().to_owned();
        let all = self.journal.parts.len();
        for no in self.journal.durable..all {
            let start = self.journal.start(no);
            let rest = self.journal.len.saturating_sub(start);
            if no > self.journal.durable && room(&target)? < rest {
                self.settle(no)?;
                self.delete(no)?;
            }
            self.copy(start, self.journal.start(no.saturating_add(1)))?;
        }
        self.settle(all)?;
        self.watch.event(Event::Written(&target));
        self.partial.publish()?;
        sync_folder(&target)?;
        self.delete(all)?;
        Journal::remove(&target)
    }

    fn copy(&mut self, from: u64, to: u64) -> Result<(), ExportError> {
        let mut copier = Copier::new(self.partial.file()?, self.partial.path());
        let mut at = from;
        for piece in self.content.resolve(from, to.saturating_sub(from)) {
            let source = |no: usize| self.sources.get(no)?.as_ref();
            copier.piece(piece, at, source, self.watch)?;
            at = at.saturating_add(piece.len());
        }
        Ok(())
    }

    /// Makes the parts of the sources before `end` durable, and the journal say so.
    fn settle(&mut self, end: usize) -> Result<(), ExportError> {
        self.partial.sync()?;
        let target = self.partial.target();
        if self.verify {
            let first = self.journal.durable;
            let from = if first == 0 {
                0
            } else {
                self.journal.start(first)
            };
            let source = |no: usize| self.sources.get(no)?.as_ref();
            let range = from..self.journal.start(end);
            compare::same(
                self.partial.path(),
                &self.content,
                range,
                source,
                self.watch,
            )?;
        }
        if self.journal.durable == 0 {
            let head = self
                .journal
                .start(0)
                .max(MIN_HEAD)
                .min(self.journal.start(end));
            let digest = digest(self.partial.file()?, head);
            self.journal.head = (head, digest.map_err(ExportError::io(target))?);
        }
        // The name of the file first: a journal without the file would be of no use.
        sync_folder(target)?;
        self.journal.durable = end;
        self.journal.store(target)?;
        self.partial.keep();
        Ok(())
    }

    /// Deletes the sources before `end`, which are durable.
    fn delete(&mut self, end: usize) -> Result<(), ExportError> {
        let mut folders = BTreeSet::new();
        for (source, part) in self.sources.iter_mut().zip(&self.journal.parts).take(end) {
            if let Some(source) = source.take() {
                source.verify_path()?;
                part.delete(self.watch)?;
                folders.insert(folder(&part.path).to_owned());
            }
        }
        folders
            .iter()
            .try_for_each(|folder| sync_folder(&folder.join("x")))
    }
}

impl Part {
    /// Whether a source is the one that the journal means. Devices are numbered anew when a machine starts.
    fn is(&self, source: &Source) -> bool {
        let identity = source.identity();
        (self.size, self.mtime) == (identity.size, identity.mtime)
    }

    fn delete(&self, watch: &mut dyn Watch) -> Result<(), ExportError> {
        fs::remove_file(&self.path).map_err(ExportError::io(&self.path))?;
        watch.event(Event::Deleted(&self.path));
        Ok(())
    }

    /// Deletes it, unless it is gone, or is another file by now.
    fn delete_if_same(&self, watch: &mut dyn Watch) -> Result<(), ExportError> {
        match fs::metadata(&self.path) {
            Ok(meta)
                if (meta.len(), (meta.mtime(), meta.mtime_nsec())) == (self.size, self.mtime) =>
            {
                self.delete(watch)
            }
            _ => Ok(()),
        }
    }
}

/// After the file got its final name: deletes what is left of the sources, then the journal.
fn clear_up(target: &Path, journal: &Journal, watch: &mut dyn Watch) -> Result<(), ExportError> {
    let whole = journal.durable == journal.parts.len()
        && File::open(target).is_ok_and(|file| {
            file.metadata().is_ok_and(|meta| meta.len() == journal.len)
                && digest(&file, journal.head.0).is_ok_and(|digest| digest == journal.head.1)
        });
    if !whole {
        return Err(ExportError::Journal {
            path: Journal::path(target),
            why: format!(
                "the file that was begun is gone, and {} is not it",
                target.display()
            ),
        });
    }
    let mut folders = BTreeSet::new();
    for part in &journal.parts {
        part.delete_if_same(watch)?;
        folders.insert(folder(&part.path));
    }
    for folder in folders {
        // A folder that is gone has nothing to make durable.
        if folder.is_dir() {
            sync_folder(&folder.join("x"))?;
        }
    }
    Journal::remove(target)
}

/// The end of the last bytes that are in no source; up to there all is written before a source goes.
fn head_len(content: &VirtualFile) -> u64 {
    let extents = content.extents().iter();
    let ends = extents
        .filter(|extent| matches!(extent.content, Content::Inline(_)))
        .map(|extent| extent.start.saturating_add(extent.len));
    ends.max().unwrap_or(0)
}

/// What of the output behind its head comes from which source.
fn parts(output: &Output, sources: &[Source]) -> Result<Vec<Part>, ExportError> {
    let head = head_len(&output.content);
    let mut parts: Vec<Part> = Vec::new();
    for source in sources {
        let identity = source.identity();
        let path = source.path();
        let real = fs::canonicalize(folder(path)).map_err(ExportError::io(path))?;
        parts.push(Part {
            path: real.join(path.file_name().unwrap_or_default()),
            size: identity.size,
            mtime: identity.mtime,
            start: 0,
            ranges: Vec::new(),
        });
    }
    let mut last = 0usize;
    for extent in output.content.extents() {
        let Content::Source { source, offset } = extent.content else {
            continue;
        };
        if extent.start < head {
            continue;
        }
        if source < last {
            let why = std::io::Error::other("its sources do not follow one another");
            return Err(ExportError::io(&output.path)(why));
        }
        last = source;
        if let Some(part) = parts.get_mut(source) {
            part.ranges.push((extent.start, extent.len, offset));
        }
    }
    // The first part begins behind the head, each other one where its first range does; what comes between belongs to
    // the part before.
    let mut next = output.content.len();
    for part in parts.iter_mut().rev() {
        next = part.ranges.first().map_or(next, |&(start, ..)| start);
        part.start = next;
    }
    if let Some(first) = parts.first_mut() {
        first.start = head;
    }
    Ok(parts)
}

impl Journal {
    /// What is left to be written: the ranges of the sources, zeros for all else. `None` if they overlap.
    fn content(&self) -> Option<VirtualFile> {
        let mut file = VirtualFile::default();
        for (no, part) in self.parts.iter().enumerate() {
            for &(start, len, offset) in &part.ranges {
                file.push_zeros(start.checked_sub(file.len())?)?;
                file.push_source(no, offset, len)?;
            }
        }
        file.push_zeros(self.len.checked_sub(file.len())?)?;
        Some(file)
    }
}

/// Whether the folders let sources go; better to know before hours of copying.
fn can_delete(parts: &[Part]) -> Result<(), ExportError> {
    parts.iter().try_for_each(|part| {
        let folder = folder(&part.path);
        accessat(
            CWD,
            folder,
            Access::WRITE_OK | Access::EXEC_OK,
            AtFlags::EACCESS,
        )
        .map_err(|error| ExportError::io(folder)(error.into()))
    })
}

/// Refuses at once what would run out of room although each source is deleted as soon as it may be.
fn enough_room(target: &Path, len: u64, parts: &[Part]) -> Result<(), ExportError> {
    room::check_length(target, len)?;
    let mut have = room(target)?;
    let device = fs::metadata(folder(target))
        .map_err(ExportError::io(target))?
        .dev();
    let ends = parts.iter().skip(1).map(|part| part.start).chain([len]);
    let mut from = 0;
    for (part, end) in parts.iter().zip(ends) {
        let need = end.saturating_sub(from);
        if need > have {
            return Err(ExportError::NoRoom {
                path: target.to_owned(),
                need,
                have,
            });
        }
        from = end;
        // A link to a file elsewhere, or a file with another name, gives no room when it goes.
        let freed = fs::symlink_metadata(&part.path)
            .ok()
            .filter(|meta| meta.is_file() && meta.nlink() == 1 && meta.dev() == device)
            .map_or(0, |meta| meta.blocks().saturating_mul(512));
        have = have.saturating_sub(need).saturating_add(freed);
    }
    Ok(())
}

/// SHA-256 of the first bytes of a file.
fn digest(file: &File, len: u64) -> std::io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0u64;
    while at < len {
        let n = usize::try_from(len.saturating_sub(at)).unwrap_or(usize::MAX);
        let n = n.min(buffer.len());
        let part = buffer.get_mut(..n).unwrap_or_default();
        file.read_exact_at(part, at)?;
        hasher.update(part);
        at = at.saturating_add(n as u64);
    }
    Ok(hasher
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}
