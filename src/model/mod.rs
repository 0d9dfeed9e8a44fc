//! What on disk forms one model: a single file or a shard set; why it is refused.

mod discover;
mod load;
mod naming;

pub use discover::{Found, find};
pub use load::{Model, ModelError, load};
pub use naming::{ShardName, shard_file_name};
