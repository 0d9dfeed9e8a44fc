//! The size protocol of getxattr and listxattr.

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
