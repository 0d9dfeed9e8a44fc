//! What a header means to llama.cpp: hyper-parameters, tensors and their roles.
//!
//! Facts are those of llama.cpp b11434: `src/llama-model.cpp` (`load_hparams`) and the `load_arch_hparams` of
//! `src/models/`. A key that llama.cpp requires and the header lacks is an error, never zero. This module knows nothing
//! of memory or devices.

mod hparams;
mod keys;
mod memory;
mod model;
mod recurrent;
mod tensor;
mod window;

pub use hparams::{Hparams, Indexer, Mla, Ssm};
pub use keys::{Keys, Value};
pub use memory::MemoryKind;
pub use model::{Model, projector_bytes};
pub use tensor::{Role, Tensor, row_size};
pub use window::{SlidingWindow, WindowShape};

/// llama.cpp's `LLAMA_MAX_LAYERS`.
pub const MAX_LAYERS: u64 = 512;
/// No dimension of a real model comes near this; it keeps products of them within 64 bits.
pub const MAX_DIM: u64 = 1 << 24;
/// llama.cpp's `LLAMA_MAX_EXPERTS`.
pub const MAX_EXPERTS: u64 = 1024;

/// Why a header does not describe a model that llama.cpp would load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArchError {
    /// A key that this architecture needs is not there.
    #[error("key {0:?} is missing")]
    Missing(String),
    /// A key has another type than llama.cpp reads, or an array is too short.
    #[error("key {key:?} is not {wanted}")]
    Type {
        /// The key.
        key: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A value that no model has.
    #[error("key {key:?} is {value}, out of range")]
    Range {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A tensor that every model has is not there.
    #[error("tensor {0:?} is missing")]
    MissingTensor(&'static str),
    /// The size of a type is not known.
    #[error("tensor {name:?} has the unknown type {ty}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        ty: String,
    },
}
