//! Mounting: the FUSE adaptor, the life of a session, the kernel's mount table, checks of a mount point.

mod fuse;
mod passthrough;
mod point;
mod session;
mod table;
mod unmounter;

pub use fuse::{Adaptor, CacheMode};
pub use point::{PointError, check, holds};
pub use session::{End, MountOptions, ask, clear_stale, serve};
pub use table::{FSTYPE, MountEntry, ggufuse_mounts, mounts, unmount};
pub use unmounter::{Unmounter, unmount_when_told};
