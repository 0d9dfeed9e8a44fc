//! A file while it is written: beside its final name, locked, and gone again unless it is published or kept.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use super::ExportError;

/// The file beside `target` that is used while `target` is made.
pub(super) fn beside(target: &Path, what: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!(".ggufuse-{what}"));
    target.with_file_name(name)
}

/// The folder of a file, as a path that can be opened.
pub(super) fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the names in the folder of `path` durable.
pub(super) fn sync_folder(path: &Path) -> Result<(), ExportError> {
    let folder = folder(path);
    let synced = File::open(folder).and_then(|dir| dir.sync_all());
    match synced {
        // Some file systems know no sync of a folder.
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
            Err(ExportError::io(folder)(error))
        }
        _ => Ok(()),
    }
}

/// A file beside its final name. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Partial {
    path: PathBuf,
    target: PathBuf,
    /// Holds the lock.
    file: Option<File>,
    keep: bool,
}

impl Partial {
    /// Begins anew; what an interrupted run has left is removed.
    pub(super) fn create(target: &Path) -> Result<Partial, ExportError> {
        refuse_existing(target)?;
        let path = beside(target, "partial");
        loop {
            let mut options = File::options();
            options.read(true).write(true).create_new(true);
            match options.open(&path) {
                Ok(file) => {
                    let partial = Partial::new(path, target, file)?;
                    // Looked at again under the lock: whoever had it may just have finished.
                    return refuse_existing(target).map(|()| partial);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // Only its name goes: it may be linked under the final name too.
                    if let Some(stale) = Partial::open(&path, target)? {
                        drop(stale);
                    }
                }
                Err(error) => return Err(ExportError::io(&path)(error)),
            }
        }
    }

    /// Takes up what an interrupted run has left; `None` if there is nothing.
    pub(super) fn resume(target: &Path) -> Result<Option<Partial>, ExportError> {
        let mut partial = Partial::open(&beside(target, "partial"), target)?;
        if let Some(partial) = &mut partial {
            partial.keep = true;
        }
        Ok(partial)
    }

    fn open(path: &Path, target: &Path) -> Result<Option<Partial>, ExportError> {
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW);
        let file = match options.open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ExportError::io(path)(error)),
        };
        let partial = Partial::new(path.to_owned(), target, file)?;
        if partial.is_in_place() {
            Ok(Some(partial))
        } else {
            // The lock is that of a file that has been published or removed meanwhile.
            partial.forget();
            Ok(None)
        }
    }

    fn new(path: PathBuf, target: &Path, file: File) -> Result<Partial, ExportError> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // A file system without locks: whoever runs two at once there is on their own.
            Ok(()) | Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK | Errno::INVAL) => {}
            Err(Errno::WOULDBLOCK) => return Err(ExportError::Busy { path }),
            Err(error) => return Err(ExportError::io(&path)(error.into())),
        }
        Ok(Partial {
            path,
            target: target.to_owned(),
            file: Some(file),
            keep: false,
        })
    }

    /// Whether the name still leads to the open file.
    fn is_in_place(&self) -> bool {
        self.is_called(&self.path)
    }

    /// Whether it has its final name as well: a run was killed between two steps of [`Partial::publish`].
    pub(super) fn is_published(&self) -> bool {
        self.is_called(&self.target)
    }

    fn is_called(&self, path: &Path) -> bool {
        let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let open = self.file.as_ref().and_then(|file| file.metadata().ok());
        let named = fs::symlink_metadata(path).ok();
        open.map(id) == named.map(id)
    }

    fn forget(mut self) {
        self.keep = true;
    }

    /// From now on it stays when it is dropped.
    pub(super) fn keep(&mut self) {
        self.keep = true;
    }

    /// Takes its name away.
    pub(super) fn discard(mut self) {
        self.keep = false;
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// The open file.
    ///
    /// # Errors
    /// `Io` when it was closed.
    pub(super) fn file(&self) -> Result<&File, ExportError> {
        self.file
            .as_ref()
            .ok_or_else(|| ExportError::io(&self.path)(io::Error::other("closed already")))
    }

    /// Makes the bytes durable.
    pub(super) fn sync(&self) -> Result<(), ExportError> {
        self.file()?.sync_all().map_err(ExportError::io(&self.path))
    }

    /// Lets go of descriptor and lock.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Gives it its final name, if that is still free.
    pub(super) fn publish(&mut self) -> Result<(), ExportError> {
        let exists = |target: &Path| ExportError::Exists {
            path: target.to_owned(),
        };
        match renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(exists(&self.target)),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                // Such as NFS: a link never overwrites either.
                fs::hard_link(&self.path, &self.target).map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => exists(&self.target),
                    _ => ExportError::io(&self.target)(error),
                })?;
                fs::remove_file(&self.path).map_err(ExportError::io(&self.path))?;
            }
            Err(error) => return Err(ExportError::io(&self.target)(error.into())),
        }
        self.keep = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.keep && (self.file.is_none() || self.is_in_place()) {
            drop(fs::remove_file(&self.path));
        }
    }
}

/// Fails with `Exists` if there is anything under this name.
pub(super) fn refuse_existing(target: &Path) -> Result<(), ExportError> {
    match fs::symlink_metadata(target) {
        Ok(_) => Err(ExportError::Exists {
            path: target.to_owned(),
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(ExportError::io(target)(error)),
    }
}
