//! Open source files: descriptor, identity, positional reads, leased maps, the pool of descriptors.

mod file;
mod inside;
mod lease;
mod pool;
pub use file::{Identity, Source, SourceError};
pub use inside::keep_sources_in;
pub use lease::Lent;
pub use pool::limit_open_files;
