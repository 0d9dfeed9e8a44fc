use super::compute::build::Error;
use super::compute::{self, setting::Setting};
use super::{
    Breakdown, Bytes, CacheLayout, Context, Machine, Params, Placement, Refusal, cache_bytes,
    weight_bytes,
};
use crate::arch::Model;

/// What a model takes with parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// Bytes per device and term.
    pub breakdown: Breakdown,
    /// The context that the parameters end in.
    pub context: Context,
    /// Flash attention, after `auto` is decided.
    pub flash_attn: bool,
    /// Why the compute term is an estimate; `None` if it is exact.
    pub estimated: Option<String>,
}

/// Measures a model with parameters on a machine, as `llama-fit-params` does with a dry load.
///
/// # Errors
/// [`Refusal`] where llama.cpp would not load it so.
pub fn measure(model: &Model, params: &Params, machine: &Machine) -> Result<Measured, Refusal> {
    let context = Context::new(&model.hparams, params)?;
    let placement = Placement::new(model, params, machine)?;
    let cache = CacheLayout::new(&model.hparams, params, &context, &placement);
    let (weights, host_weights) = weight_bytes(model, &placement);
    let (caches, host_cache) = cache_bytes(&cache, machine.devices.len());
    let setting = Setting {
        model,
        params,
        context: &context,
        placement: &placement,
        cache: &cache,
    };
    let (compute, estimated) = match compute::measure(setting) {
        Ok(compute) => (compute, None),
        Err(error @ Error::TooLarge) => return Err(Refusal::Graph(error.to_string())),
        Err(error) => (compute::closed::estimate(setting), Some(error.to_string())),
    };
    let terms = weights.iter().zip(&caches).zip(&compute.devices);
    let device = |((&model, &context), &compute)| Bytes {
        model,
        context,
        compute,
    };
    Ok(Measured {
        breakdown: Breakdown {
            devices: terms.map(device).collect(),
            host: Bytes {
                model: host_weights,
                context: host_cache,
                compute: compute.host,
            },
        },
        context,
        flash_attn: compute.flash_attention,
        estimated,
    })
}
