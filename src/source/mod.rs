//! Open source files: descriptor, identity, positional reads.

mod file;
pub use file::{Identity, Source, SourceError};
