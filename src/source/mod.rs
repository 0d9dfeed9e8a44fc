//! Open source files: descriptor, identity, positional reads, leased maps.

mod file;
mod lease;
pub use file::{Identity, Source, SourceError};
pub use lease::Lent;
