//! A read: from an open file's extents, or from what was computed at its open.

use super::entry::FileContent;
use super::error::VfsError;
use super::handle::Handle;
use crate::layout::Piece;

impl Handle {
    /// Gives the bytes of `[offset, offset + size)`, fewer only at the end of the file, to `send`, which must only pass
    /// them to a system call: they may lie in a map of a source. `buf` is used where bytes have to be put together; it
    /// grows as needed and never shrinks.
    pub(super) fn read(
        &self,
        offset: u64,
        size: u32,
        buf: &mut Vec<u8>,
        send: impl FnOnce(&[u8]),
    ) -> Result<(), VfsError> {
        let end = offset
            .checked_add(u64::from(size))
            .ok_or(VfsError::Invalid)?;
        i64::try_from(end).map_err(|_| VfsError::Invalid)?;
        if let Some(bytes) = &self.computed {
            let at = |offset: u64| {
                usize::try_from(offset).map_or(bytes.len(), |offset| offset.min(bytes.len()))
            };
            send(bytes.get(at(offset)..at(end)).unwrap_or_default());
            return Ok(());
        }
        let FileContent::Fixed(content) = &self.planned.file(self.index)?.0.content else {
            return Err(VfsError::Invalid);
        };
        let source = |index: usize| {
            let sources = &self.planned.view.sources;
            sources.get(index).ok_or(VfsError::Invalid)
        };
        let mut pieces = content.resolve(offset, u64::from(size));
        match (pieces.next(), pieces.next()) {
            (Some(Piece::Inline(bytes)), None) => {
                send(bytes);
                return Ok(());
            }
            (
                Some(Piece::Source {
                    source: index,
                    offset,
                    len,
                }),
                None,
            ) => {
                if let Some(lent) = source(index)?.lend(offset, len)? {
                    send(lent.bytes());
                    return Ok(());
                }
            }
            _ => {}
        }
        let want = end.min(content.len()).saturating_sub(offset);
        let want = usize::try_from(want).map_err(|_| VfsError::Invalid)?;
        if buf.len() < want {
            buf.resize(want, 0);
        }
        let mut rest = buf.get_mut(..want).ok_or(VfsError::Invalid)?;
        for piece in content.resolve(offset, u64::from(size)) {
            let len = usize::try_from(piece.len()).map_err(|_| VfsError::Invalid)?;
            let (part, tail) = rest.split_at_mut_checked(len).ok_or(VfsError::Invalid)?;
            match piece {
                Piece::Inline(bytes) => part.copy_from_slice(bytes),
                Piece::Source {
                    source: index,
                    offset,
                    ..
                } => source(index)?.read_exact_at(part, offset)?,
                Piece::Zeros(_) => part.fill(0),
            }
            rest = tail;
        }
        if !rest.is_empty() {
            return Err(VfsError::Invalid);
        }
        send(buf.get(..want).ok_or(VfsError::Invalid)?);
        Ok(())
    }
}
