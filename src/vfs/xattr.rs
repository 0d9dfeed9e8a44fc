//! Extended attributes: the size protocol of getxattr and listxattr, and values that are lists.

use super::VfsError;

/// The answer to getxattr or listxattr.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum XattrReply {
    /// The caller asked (with size 0) for the length only.
    Size(u32),
    /// The value.
    Data(Vec<u8>),
}

/// Fits a value into the caller's `size` bytes.
///
/// # Errors
/// `Range` when it does not fit.
pub fn fit(value: Vec<u8>, size: u32) -> Result<XattrReply, VfsError> {
    let len = u32::try_from(value.len()).map_err(|_| VfsError::Range)?;
    match size {
        0 => Ok(XattrReply::Size(len)),
        _ if len <= size => Ok(XattrReply::Data(value)),
        _ => Err(VfsError::Range),
    }
}

/// An extended attribute has at most 64 KiB: a longer list of lines ends with how many are left out.
pub(super) fn cut(mut list: Vec<u8>) -> Vec<u8> {
    const MOST: usize = (64 << 10) - 64;
    if list.len() > MOST {
        let end = list
            .get(..MOST)
            .and_then(|head| head.iter().rposition(|&b| b == b'\n'))
            .unwrap_or(0);
        let left = list
            .get(end..)
            .unwrap_or_default()
            .trim_ascii()
            .split(|&b| b == b'\n')
            .count();
        list.truncate(end);
        list.extend_from_slice(format!("\n... and {left} more").as_bytes());
    }
    list
}
