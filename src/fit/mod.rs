//! llama.cpp's memory model and its fitting of parameters to devices, from a header alone.
//!
//! Everything here is a pure function of a model, parameters and a machine: no file, clock, environment or GPU library
//! is looked at. Terms stay apart per device until the end ([`Breakdown`]). Rules and constants are those of
//! [`LLAMA_CPP`].

mod args;
mod breakdown;
pub mod compute;
mod kv_cache;
mod line;
mod machine;
mod measure;
mod overrides;
mod placement;
mod plan;
mod quote;
mod report;
mod request;
mod search;
mod weights;

pub use args::{FLAGS, Flag, Request, find_flag};
pub use breakdown::{Breakdown, Bytes};
pub use kv_cache::{Cache, CacheKind, CacheLayout, LayerCache, State, cache_bytes};
pub use line::Line;
pub use machine::{Device, HostMemory, Machine, Place};
pub use measure::{Measured, measure};
pub use overrides::{Fraction, Override, Pattern};
pub use placement::Placement;
pub use plan::{Extra, Fit, Task, fits};
pub use quote::quote;
pub use report::{Outcome, report};
pub use request::{Context, FlashAttn, Params, Refusal, SplitMode};
pub use search::{Measure, NoFit, Problem, search};
pub use weights::{allocated_bytes, buffer_bytes, weight_bytes};

/// The build whose rules these are.
pub const LLAMA_CPP: &str = "b11434";

/// Alignment of tensors in a device's buffers.
pub const DEVICE_ALIGNMENT: u64 = 128;
/// Alignment of tensors in host buffers.
pub const HOST_ALIGNMENT: u64 = 32;
