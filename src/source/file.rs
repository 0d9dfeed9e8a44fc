use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::inside::open_source;
use super::lease::{Leased, Lent, has_writer};
use super::pool::{Open, Place};

/// What tells one state of a file from another. Equal identities mean equal bytes, as far as the file system tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Modification time, seconds and nanoseconds.
    pub mtime: (i64, i64),
    /// Change time, seconds and nanoseconds.
    pub ctime: (i64, i64),
    /// Links, mode, owner and group: what moves ctime, but no bytes.
    about: (u64, u32, u32, u32),
}

impl Identity {
    fn of(meta: &std::fs::Metadata) -> Self {
        Identity {
            dev: meta.dev(),
            ino: meta.ino(),
            size: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            about: (meta.nlink(), meta.mode(), meta.uid(), meta.gid()),
        }
    }

    /// The same file with the same bytes. A ctime that moved is no change if links, mode or owner, which move it,
    /// are others too; alone it means that someone wrote and put mtime back.
    pub fn same_bytes(&self, now: &Identity) -> bool {
        (self.dev, self.ino, self.size, self.mtime) == (now.dev, now.ino, now.size, now.mtime)
            && (self.ctime == now.ctime || self.about != now.about)
    }
}

/// Why a source could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The system call failed.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The file is not what it was when the view was planned.
    #[error("{path}: changed since it was opened", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

/// One source file. Its bytes are those of the moment it was opened, or an error. Its descriptor may be closed when
/// many are open; it is then opened again by its path, which must still lead to the same bytes.
#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    /// As last seen: what moved without the bytes is taken over.
    identity: Arc<Mutex<Identity>>,
    place: Arc<Place>,
}

impl Source {
    /// Opens a regular file (through symlinks).
    ///
    /// # Errors
    /// `Io`, also for what is not a regular file.
    pub fn open(path: &Path) -> Result<Source, SourceError> {
        let (file, identity) = open(path)?;
        Ok(Source {
            path: path.to_owned(),
            identity: Arc::new(Mutex::new(identity)),
            place: Arc::new(Place::new(file)),
        })
    }

    fn opened(&self) -> Result<Arc<Open>, SourceError> {
        if let Some(open) = self.place.get() {
            return Ok(open);
        }
        let gone = |error| match error {
            SourceError::Io { error, path } if error.kind() == io::ErrorKind::NotFound => {
                SourceError::Changed { path }
            }
            other => other,
        };
        let (file, now) = open(&self.path).map_err(gone)?;
        self.compare(now)?;
        Ok(self.place.put(file))
    }

    fn changed(&self) -> SourceError {
        SourceError::Changed {
            path: self.path.clone(),
        }
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file is: as when it was opened, but for what moves without its bytes.
    pub fn identity(&self) -> Identity {
        *self.identity.lock()
    }

    /// Length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.identity.lock().size
    }

    /// True for a file of zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn io(&self, error: io::Error) -> SourceError {
        SourceError::Io {
            path: self.path.clone(),
            error,
        }
    }

    fn compare(&self, now: Identity) -> Result<(), SourceError> {
        let mut known = self.identity.lock();
        if !known.same_bytes(&now) {
            return Err(self.changed());
        }
        *known = now;
        Ok(())
    }

    /// Fails with `Changed` when the open file no longer has the bytes it was opened with.
    fn verify(&self, file: &File) -> Result<(), SourceError> {
        self.compare(Identity::of(&file.metadata().map_err(|e| self.io(e))?))
    }

    /// Fails with `Changed` when the path no longer leads to this very file; a deleted path counts as changed.
    ///
    /// # Errors
    /// `Changed`, or `Io` of the stat.
    pub fn verify_path(&self) -> Result<(), SourceError> {
        match std::fs::metadata(&self.path) {
            Ok(meta) => self.compare(Identity::of(&meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.changed()),
            Err(error) => Err(self.io(error)),
        }
    }

    /// A range of the file for a system call to copy, that cannot change until it is dropped. `None` where the file
    /// cannot be kept from changing: then [`Source::read_exact_at`] reads and checks.
    ///
    /// # Errors
    /// `Changed` when it has changed before it could be kept; `Io` when it cannot be opened again.
    pub fn lend(&self, offset: u64, len: u64) -> Result<Option<Lent>, SourceError> {
        let open = self.opened()?;
        let mut result = Ok(());
        let leased = open.leased.get_or_init(|| {
            let leased = Leased::take(&open.file);
            result = self.verify(&open.file);
            leased.filter(|_| result.is_ok())
        });
        result?;
        Ok(leased.as_ref().and_then(|leased| leased.lend(offset, len)))
    }

    /// Whether somebody has the file open for writing at the moment, as far as can be told: of files that are not one's own,
    /// and on network file systems, it cannot.
    pub fn is_being_written(&self) -> bool {
        let Ok(open) = self.opened() else {
            return false;
        };
        // A lease that was taken before tells the same.
        open.leased.get().is_none() && has_writer(&open.file)
    }

    /// The open file itself, for who reads it without us: nobody checks then whether it changes.
    ///
    /// # Errors
    /// `Changed` when it has changed by now; `Io` when it cannot be opened again.
    pub fn unchecked(&self) -> Result<Arc<File>, SourceError> {
        let open = self.opened()?;
        self.verify(&open.file)?;
        Ok(Arc::clone(&open.file))
    }

    /// Fills `buf` from `offset`, then checks that the file is still the same: never a mix of two states.
    ///
    /// # Errors
    /// `Changed` when the file was changed or ends too early, else `Io`.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let open = self.opened()?;
        let read = open.file.read_exact_at(buf, offset);
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => self.io(error),
        })?;
        self.verify(&open.file)
    }

    /// Lets `call` use the open file, then checks that the file is still the same: what it has copied is of one state.
    ///
    /// # Errors
    /// `Changed` when the file was changed, `Io` with what `call` says.
    pub fn with_file<T>(
        &self,
        call: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T, SourceError> {
        let open = self.opened()?;
        let result = call(&open.file).map_err(|error| self.io(error))?;
        self.verify(&open.file)?;
        Ok(result)
    }

    /// Mode bits and group of the open file.
    ///
    /// # Errors
    /// As [`Source::read_exact_at`].
    pub fn mode_and_group(&self) -> Result<(u32, u32), SourceError> {
        let meta = self.opened()?.file.metadata().map_err(|e| self.io(e))?;
        Ok((meta.mode(), meta.gid()))
    }
}

fn open(path: &Path) -> Result<(File, Identity), SourceError> {
    let io = |error| SourceError::Io {
        path: path.to_owned(),
        error,
    };
    let file = open_source(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(io(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )));
    }
    Ok((file, Identity::of(&meta)))
}
