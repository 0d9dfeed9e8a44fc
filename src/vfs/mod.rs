//! The file system without the kernel: inodes, handles, reads, attributes. Knows nothing of FUSE.

mod error;
mod fs;
mod tree;
mod xattr;

pub use error::VfsError;
pub use fs::{DirItem, Fs, Opened, StatFs};
pub use tree::{Attr, BLOCK_SIZE, Ownership, ROOT, View, ViewFile};
pub use xattr::{XattrReply, fit};
