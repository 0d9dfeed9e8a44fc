//! Whether a file system has room.

use std::path::Path;

use rustix::fs::{statfs, statvfs};

use super::ExportError;
use super::partial::folder;

const FAT_MAGIC: i64 = 0x4D44;
const FAT_MAX_FILE: u64 = u32::MAX as u64;

/// Bytes that can be written to the file system of `path`'s folder.
///
/// # Errors
/// `Io` when the folder cannot be asked.
pub(super) fn room(path: &Path) -> Result<u64, ExportError> {
    let folder = folder(path);
    let stat = statvfs(folder).map_err(|e| ExportError::io(folder)(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Refuses files for which there is no room, by their lengths.
pub(super) fn check(path: &Path, lengths: impl Iterator<Item = u64>) -> Result<(), ExportError> {
    let mut need = 0u64;
    for len in lengths {
        check_length(path, len)?;
        need = need.saturating_add(len);
    }
    let have = room(path)?;
    if need > have {
        return Err(ExportError::NoRoom {
            path: path.to_owned(),
            need,
            have,
        });
    }
    Ok(())
}

/// Refuses a file that is longer than its file system can hold.
pub(super) fn check_length(path: &Path, len: u64) -> Result<(), ExportError> {
    let folder = folder(path);
    let stat = statfs(folder).map_err(|e| ExportError::io(folder)(e.into()))?;
    #[allow(
        clippy::useless_conversion,
        clippy::unnecessary_cast,
        reason = "the field's type differs between machines"
    )]
    let kind = stat.f_type as i64;
    if kind == FAT_MAGIC && len > FAT_MAX_FILE {
        return Err(ExportError::TooLarge {
            path: path.to_owned(),
            len,
        });
    }
    Ok(())
}
