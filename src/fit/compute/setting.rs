//! What one measurement is about: a model, what was asked for, and where everything lies.

use super::graph::Backend;
use super::sched::Backends;
use crate::arch::Model;
use crate::fit::{CacheLayout, Context, Params, Place, Placement, SplitMode};

/// Copies of tensors that move between backends, when several batches are under way (`GGML_SCHED_MAX_COPIES`).
const PIPELINE_COPIES: usize = 4;

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub struct Setting<'a> {
    /// The model.
    pub model: &'a Model,
    /// What was asked for.
    pub params: &'a Params,
    /// What the context ended up with.
    pub context: &'a Context,
    /// Where layers and tensors are.
    pub placement: &'a Placement,
    /// Where past tokens are kept.
    pub cache: &'a CacheLayout,
}

/// The batch whose graph is built.
#[derive(Debug, Clone, Copy)]
pub struct Batch {
    /// Tokens, a multiple of `sequences`.
    pub tokens: u64,
    /// Sequences of equal length.
    pub sequences: u64,
    /// Rows of the output.
    pub outputs: u64,
}

impl Setting<'_> {
    /// The batch that is reserved.
    pub fn batch(&self) -> Batch {
        Batch {
            tokens: self.context.n_tokens.into(),
            sequences: self.context.n_seq.into(),
            outputs: self.context.n_outputs.into(),
        }
    }

    /// Devices that take part: one, if the model is not split.
    pub fn devices(&self) -> u8 {
        let all = self.placement.n_devices();
        let used = if self.params.split_mode == SplitMode::None {
            all.min(1)
        } else {
            all
        };
        u8::try_from(used).unwrap_or(u8::MAX - 1)
    }

    /// The backend of a device; `None` if it takes no part.
    pub fn device(&self, device: usize) -> Option<Backend> {
        match self.params.split_mode {
            SplitMode::None => (device == self.params.main_gpu).then_some(Backend(0)),
            SplitMode::Layer => u8::try_from(device).ok().map(Backend),
        }
    }

    /// The backend of a place.
    pub fn backend(&self, place: Place) -> Backend {
        let host = Backend(self.devices());
        match place {
            Place::Host => host,
            Place::Device(d) => self.device(d).unwrap_or(host),
        }
    }

    /// The backend of a layer.
    pub fn layer(&self, il: usize) -> Backend {
        self.backend(self.placement.layer(il))
    }

    /// Whether all layers and the output were asked to be on devices.
    pub fn is_all_offloaded(&self) -> bool {
        let layers = self.model.hparams.n_layer_all;
        usize::try_from(self.params.n_gpu_layers).map_or(true, |n| n > layers)
    }

    /// The scheduler's view of the machine. Several batches are under way at a time on several devices, if nothing is left on the
    /// host and no tensor was moved (`llama_context::llama_context`).
    pub fn backends(&self) -> Backends {
        let pipeline = self.devices() > 1
            && self.is_all_offloaded()
            && self.params.split_mode == SplitMode::Layer
            && self.params.kv_offload
            && self.params.overrides.is_empty();
        Backends {
            devices: self.devices(),
            op_offload: self.params.op_offload,
            copies: if pipeline { PIPELINE_COPIES } else { 1 },
        }
    }
}
