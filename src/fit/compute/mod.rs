//! The size of the compute buffers: what llama.cpp's graph allocator would come to, re-enacted from shapes.
//!
//! Four steps, as llama.cpp takes them: a builder makes the graph of one prompt batch ([`build`]), the scheduler assigns its
//! nodes to backends and copies what has to move ([`sched`]), CUDA asks for tensors to be kept for its fused kernels
//! (`hints`), and the allocator is replayed on sizes (`alloc`). Nothing of that is an estimate; where no builder knows the
//! architecture, [`closed`] makes one.

mod alloc;
pub mod build;
pub mod closed;
mod cuda;
pub mod graph;
mod hints;
mod ops;
mod probe;
pub mod sched;
pub mod setting;
mod state_ops;

use build::Error;
use graph::{Backend, Graph, Id};
use sched::Schedule;
use setting::Setting;

use crate::fit::FlashAttn;

/// Bytes of the compute buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compute {
    /// Of each device.
    pub devices: Vec<u64>,
    /// Of the host.
    pub host: u64,
    /// Whether attention is one fused node, after "auto" was resolved.
    pub flash_attention: bool,
}

/// Measures the compute buffers of a model in a setting.
///
/// # Errors
/// [`Error`] when there is no builder for the architecture, or the model does not fit to it.
pub fn measure(setting: Setting<'_>) -> Result<Compute, Error> {
    let plan = plan(setting)?;
    let sizes = plan.buffer_sizes();
    let devices = 0..setting.placement.n_devices();
    let device = |d| {
        setting
            .device(d)
            .and_then(|backend| sizes.get(backend.index()))
    };
    Ok(Compute {
        devices: devices.map(|d| device(d).copied().unwrap_or(0)).collect(),
        host: sizes.last().copied().unwrap_or(0),
        flash_attention: plan.flash_attention,
    })
}

/// A graph and the order in which its tensors are placed.
#[derive(Debug)]
pub struct Plan {
    /// The graph, with copies between backends.
    pub graph: Graph,
    /// The order.
    pub schedule: Schedule,
    /// Whether attention is one fused node.
    pub flash_attention: bool,
    host: Backend,
}

impl Plan {
    /// Bytes that a backend's buffer holds for a tensor, before alignment.
    pub fn size(&self, id: Id, backend: Backend) -> u64 {
        alloc::size(&self.graph, id, backend, self.host)
    }

    /// Bytes of the buffer of each device, and of the host behind them.
    pub fn buffer_sizes(&self) -> Vec<u64> {
        alloc::replay(&self.graph, self.host, &self.schedule)
    }
}

/// Builds and schedules the graph of a setting.
///
/// # Errors
/// As [`measure`].
pub fn plan(setting: Setting<'_>) -> Result<Plan, Error> {
    let (open, wanted) = match setting.context.flash_attn {
        FlashAttn::On => (false, true),
        FlashAttn::Off => (false, false),
        FlashAttn::Auto => (true, true),
    };
    let mut graph = build::graph(setting, setting.batch(), wanted)?;
    let mut flash_attention = wanted;
    if open && !probe::flash_attention(setting, &graph)? {
        flash_attention = false;
        graph = build::graph(setting, setting.batch(), false)?;
    }
    let schedule = sched::schedule(&mut graph, setting.backends());
    Ok(Plan {
        graph,
        schedule,
        flash_attention,
        host: setting.backends().host(),
    })
}
