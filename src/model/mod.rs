//! What on disk forms one model: a single file, whole or in pieces, or a shard set; why it is refused.

mod check;
mod companions;
mod discover;
mod join;
mod load;
mod naming;
mod pieces;

pub use discover::{Found, Place, find, is_model_file, models_in};
pub use load::{Model, ModelError, Projector, load, load_found};
pub use naming::{ShardName, shard_file_name};
