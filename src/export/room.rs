//! Whether a file system has room.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{statfs, statvfs};

use super::partial::folder;
use super::{ExportError, Output};
use crate::layout::Content;
use crate::source::Source;

const FAT_MAGIC: i64 = 0x4D44;
/// XFS, Btrfs and bcachefs: one block can belong to several files.
const SHARING: [i64; 3] = [0x5846_5342, 0x9123_683E, 0xCA45_1A4E];
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

/// Refuses files for which there is no room.
pub(super) fn check(outputs: &[&Output], sources: &[Source]) -> Result<(), ExportError> {
    let mut need = 0u64;
    for output in outputs {
        check_length(&output.path, output.content.len())?;
        need = need.saturating_add(to_write(output, sources)?);
    }
    let Some(first) = outputs.first() else {
        return Ok(());
    };
    let have = room(&first.path)?;
    if need > have {
        return Err(ExportError::NoRoom {
            path: first.path.clone(),
            need,
            have,
        });
    }
    Ok(())
}

/// Bytes of a file that take room: those whose blocks cannot be shared with a source.
fn to_write(output: &Output, sources: &[Source]) -> Result<u64, ExportError> {
    let folder = folder(&output.path);
    let all = output.content.len();
    if !SHARING.contains(&magic(folder)?) {
        return Ok(all);
    }
    let meta = std::fs::metadata(folder).map_err(ExportError::io(folder))?;
    let shared = output.content.extents().iter().map(|extent| {
        let Content::Source { source, offset } = extent.content else {
            return 0;
        };
        let near = sources
            .get(source)
            .is_some_and(|source| source.identity().dev == meta.dev());
        let block = meta.blksize();
        if near && offset.checked_rem(block) == extent.start.checked_rem(block) {
            // Its first and its last block may be shared with nobody.
            extent.len.saturating_sub(block.saturating_mul(2))
        } else {
            0
        }
    });
    Ok(shared.fold(all, u64::saturating_sub))
}

/// Refuses a file that is longer than its file system can hold.
pub(super) fn check_length(path: &Path, len: u64) -> Result<(), ExportError> {
    if len > FAT_MAX_FILE && magic(folder(path))? == FAT_MAGIC {
        return Err(ExportError::TooLarge {
            path: path.to_owned(),
            len,
        });
    }
    Ok(())
}

/// Which kind of file system a folder lies on.
fn magic(folder: &Path) -> Result<i64, ExportError> {
    let stat = statfs(folder).map_err(|e| ExportError::io(folder)(e.into()))?;
    #[allow(
        clippy::unnecessary_cast,
        reason = "the field's type differs between machines"
    )]
    Ok(stat.f_type as i64)
}
