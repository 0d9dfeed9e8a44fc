//! What on disk forms one model: a single file, whole or in pieces, or a shard set; why it is refused.

mod check;
mod discover;
mod join;
mod load;
mod naming;
mod pieces;

pub use discover::{Found, find, is_model_file, models_in};
pub use load::{Model, ModelError, load, load_found};
pub use naming::{ShardName, shard_file_name};
