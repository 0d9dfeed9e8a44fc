//! Is a directory fit to be mounted on?

use std::io;
use std::path::{Path, PathBuf};

use super::table::ggufuse_mounts;

/// Why a mount point is refused.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    /// It does not exist.
    #[error("{}: no such directory; create it first", .0.display())]
    Missing(PathBuf),
    /// It is a file.
    #[error("{}: not a directory", .0.display())]
    NotDir(PathBuf),
    /// It has entries, which the mount would hide.
    #[error("{}: not empty; its files would be hidden (-o nonempty allows it)", .0.display())]
    NotEmpty(PathBuf),
    /// There is one of our mounts already.
    #[error("{path}: ggufuse is mounted there already; `ggufuse unmount {path}` ends that", path = .0.display())]
    Mounted(PathBuf),
    /// The mount of a process that is gone.
    #[error("{path}: a mount whose process is gone; `ggufuse unmount --lazy {path}` removes it", path = .0.display())]
    Stale(PathBuf),
    /// The mount would hide its own source.
    #[error("{}: contains the source {}; choose another mount point", point.display(), source_path.display())]
    OwnSource {
        /// The mount point.
        point: PathBuf,
        /// The source.
        source_path: PathBuf,
    },
    /// It cannot be looked at.
    #[error("{}: {error}", path.display())]
    Io {
        /// The mount point.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

/// The canonical path of `mountpoint` if `source` can be mounted there.
///
/// # Errors
/// See [`PointError`].
pub fn check(mountpoint: &Path, source: &Path, nonempty: bool) -> Result<PathBuf, PointError> {
    let path = || mountpoint.to_owned();
    let refuse = |error: io::Error| match error.raw_os_error() {
        Some(libc::ENOTCONN | libc::ECONNABORTED) => PointError::Stale(path()),
        Some(libc::ENOENT) => PointError::Missing(path()),
        Some(libc::ENOTDIR) => PointError::NotDir(path()),
        _ => PointError::Io {
            path: path(),
            error,
        },
    };
    let meta = std::fs::metadata(mountpoint).map_err(refuse)?;
    if !meta.is_dir() {
        return Err(PointError::NotDir(path()));
    }
    let point = mountpoint.canonicalize().map_err(refuse)?;
    // An opendir too: for a second after its daemon died a stat of a stale mount is answered from the kernel's cache.
    let mut entries = std::fs::read_dir(&point).map_err(refuse)?;
    if ggufuse_mounts()
        .map_err(refuse)?
        .iter()
        .any(|entry| entry.mountpoint == point)
    {
        return Err(PointError::Mounted(path()));
    }
    if holds(&point, source) {
        return Err(PointError::OwnSource {
            point: path(),
            source_path: source.to_owned(),
        });
    }
    if !nonempty && entries.next().is_some() {
        return Err(PointError::NotEmpty(path()));
    }
    Ok(point)
}

/// Whether `path` leads through `point` or into it: such a source could not be reached once `point` is mounted, and
/// asking for it would wait for ourselves. A path that cannot be resolved is reported when it is opened.
pub fn holds(point: &Path, path: &Path) -> bool {
    let inside = |path: &Path| {
        path.canonicalize()
            .is_ok_and(|path| path.starts_with(point))
    };
    inside(path) || path.parent().is_some_and(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points() {
        let dir = tempfile::tempdir().unwrap();
        let (point, file) = (dir.path().join("mnt"), dir.path().join("file"));
        std::fs::write(&file, b"x").unwrap();
        assert!(matches!(check(&point, &file, false), Err(PointError::Missing(p)) if p == point));
        std::fs::create_dir(&point).unwrap();
        assert_eq!(
            check(&point, &file, false).unwrap(),
            point.canonicalize().unwrap()
        );
        assert!(matches!(
            check(&file, &file, true),
            Err(PointError::NotDir(_))
        ));
        assert!(matches!(
            check(dir.path(), &file, true),
            Err(PointError::OwnSource { .. })
        ));
        assert!(matches!(
            check(&point, &point, true),
            Err(PointError::OwnSource { .. })
        ));
        std::fs::write(point.join("y"), b"y").unwrap();
        assert!(matches!(
            check(&point, &file, false),
            Err(PointError::NotEmpty(_))
        ));
        assert!(check(&point, &file, true).is_ok());
        let stale = PointError::Stale("/a".into()).to_string();
        assert!(stale.contains("ggufuse unmount --lazy /a"), "{stale}");
    }
}
