//! The GGUF container: ordered key-values with their raw bytes and tensor infos, validated once.
//!
//! Layout and caps follow `ggml/src/gguf.cpp` of llama.cpp b11434. This module knows nothing of files or of what a key means.

mod error;
mod header;
mod read;
mod types;
mod value;
mod write;

pub use error::{Error, Problem};
pub use header::{Header, Kv, Tensor};
pub use read::{parse, read};
pub use types::{GgmlType, ValueType};
pub use value::Value;
pub use write::{HeaderSize, KvBytes, TensorInfo, tensor_info};

/// Alignment of tensor data where `general.alignment` is missing.
pub const DEFAULT_ALIGNMENT: u64 = 32;
