//! From headers to virtual files: the split planner and the merged and sharded views.
//!
//! No I/O and no paths: a source file is an index into the headers that were given.

mod assemble;
mod error;
mod extent;
mod overlay;
mod plan;

pub use error::LayoutError;
pub use extent::{Content, Extent, Piece, VirtualFile};
pub use overlay::{Overlay, OverlayError, Setting, parse_overrides};
pub use plan::{Built, DEFAULT_MAX_TENSORS, SplitOptions, is_split_key, merge, split};
