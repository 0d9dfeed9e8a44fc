//! The file system without the kernel: directories, inodes, handles, reads, attributes. Knows nothing of FUSE.

mod attr;
mod cache;
mod dirs;
mod entry;
mod error;
mod fs;
mod handle;
mod model;
mod planned;
mod read;
mod stats;
#[cfg(test)]
mod tests;
mod xattr;

pub use attr::{Attr, BLOCK_SIZE, DirItem, Ownership};
pub use dirs::ROOT;
pub use entry::{About, Compute, Entry, FileContent, Folder, Model, Plan, View, ViewFile};
pub use error::VfsError;
pub use fs::{Fs, Opened, StatFs};
pub use stats::{Models, Statistics};
pub use xattr::{XattrReply, fit};
