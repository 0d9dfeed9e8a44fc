//! From headers to virtual files: the split planner and the merged and sharded views.
//!
//! No I/O and no paths: a source file is an index into the headers that were given.

mod assemble;
mod error;
mod extent;
mod plan;

pub use error::LayoutError;
pub use extent::{Content, Extent, Piece, VirtualFile};
pub use plan::{Built, DEFAULT_MAX_TENSORS, SplitOptions, merge, split};
