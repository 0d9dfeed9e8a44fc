//! A directory tree full of models, in the layouts of the tools that people have: what is found in it, and when that
//! changes. Finds by names; no model is opened.

mod hugging_face;
mod item;
mod llama_cpp;
mod ollama;
mod scan;
mod tree;
mod watch;

pub use item::Item;
pub use scan::{Layout, Library, Scan};
pub use tree::{Node, tree};
pub use watch::Watch;
