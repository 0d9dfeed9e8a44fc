//! Compute buffers in closed form, for architectures whose graph is not known: what is alive at the peak, from sizes alone.
//!
//! The largest of three situations decides on each device: a layer at work, the logits, or the work on weights that lie in host
//! memory and are copied in. Widths are taken from the tensors, so that no key of an unknown architecture is needed but those that
//! all have. Measured on all rows that are known exactly, as if their architectures were not, `with_margin` keeps the
//! estimate above the truth.

use super::Compute;
use super::setting::Setting;
use crate::arch::{MemoryKind, Role, Tensor};
use crate::fit::{CacheLayout, FlashAttn, Place, buffer_bytes};
use crate::gguf::GgmlType;

/// Estimates the compute buffers of a model in a setting.
pub fn estimate(setting: Setting<'_>) -> Compute {
    let sizes = Sizes::new(setting);
    let bytes = |place| with_margin(sizes.peak(setting, place));
    let devices = 0..setting.placement.n_devices();
    Compute {
        devices: devices.map(|d| bytes(Place::Device(d))).collect(),
        host: bytes(Place::Host),
        flash_attention: sizes.flash_attention,
    }
}

/// With what the closed form can be short of, at most. What is beyond 2^64 stays there.
fn with_margin(needed: f64) -> u64 {
    if needed > 0.0 {
        (needed * 1.25) as u64 + (32 << 20)
    } else {
        0
    }
}

/// Bytes of what is alive. Not integers: an estimate need not be, and nothing overflows.
struct Sizes {
    /// The residual stream of the batch.
    stream: f64,
    /// The same as it comes in.
    input: f64,
    /// Masks and row numbers of the caches.
    masks: f64,
    /// The peak within a layer's network.
    network: f64,
    /// The peak within a layer's attention.
    attention: f64,
    /// Logits, and what is not yet freed below them.
    logits: f64,
    /// Keys and values of the largest layer.
    cached: f64,
    flash_attention: bool,
}

impl Sizes {
    fn new(setting: Setting<'_>) -> Sizes {
        let (hp, batch, cache) = (&setting.model.hparams, setting.batch(), setting.cache);
        let row = 4.0 * batch.tokens as f64;
        let flash_attention = is_fused(setting);
        let most = |f: &dyn Fn(usize) -> u64| (0..hp.n_layer_all).map(f).max().unwrap_or(0) as f64;
        let width = hp.n_embd as f64;
        let used = most(&|il| hp.n_expert_used(il)).max(1.0);
        let dense = row * 4.0 * widest(setting, false);
        let experts = row * used * 3.0 * widest(setting, true);
        let heads = most(&|il| hp.n_head(il));
        let (masks, largest_mask) = masks(setting, flash_attention);
        let queries = row * heads * (most(&|il| hp.head_k(il)) + most(&|il| hp.head_v(il)));
        let keys_and_values = |bytes: fn(GgmlType, f64) -> f64| {
            let layers = (0..hp.n_layer_all).map(|il| cached(cache, il, bytes));
            layers.fold(0.0, f64::max)
        };
        let scores = match flash_attention {
            // Caches that are not of half precision are converted for the kernel.
            true => keys_and_values(|ty, n| if ty == GgmlType::F16 { 0.0 } else { 2.0 * n }),
            // Logits of attention, and values made contiguous.
            false => largest_mask * heads + keys_and_values(|_, n| 2.0 * n),
        };
        let state =
            (hp.n_embd_r as f64 + hp.n_embd_s as f64) * 8.0 * f64::from(setting.context.n_seq);
        let attention = queries + scores + state + row * hp.n_embd_r as f64;
        let held = if hp.n_expert > 0 {
            2.0 * row * used * width
        } else {
            0.0
        };
        Sizes {
            stream: row * width,
            input: row * hp.n_embd_inp as f64,
            masks,
            network: dense.max(experts),
            attention,
            logits: 4.0 * batch.outputs as f64 * vocabulary(setting) + held + 3.0 * row * width,
            cached: keys_and_values(|ty, n| {
                let (values, bytes) = ty.block().unwrap_or((1, 4));
                n * bytes as f64 / values as f64
            }),
            flash_attention,
        }
    }

    /// The peak at a place.
    fn peak(&self, setting: Setting<'_>, place: Place) -> f64 {
        let (params, placement) = (setting.params, setting.placement);
        let layers = setting.model.hparams.n_layer();
        let on = |place| (0..layers).any(|il| placement.layer(il) == place);
        let devices = 0..placement.n_devices();
        let first = devices.map(Place::Device).find(|&place| on(place));
        let copies = setting.backends().copies as f64;
        let output = output_place(setting);
        let offloads =
            params.op_offload && setting.batch().tokens >= 32 && placement.n_devices() > 0;
        let host_weight = largest_host_weight(setting);
        let takes_over = place == Place::Device(0) && offloads && host_weight > 0.0;
        let entry = match place {
            Place::Host => {
                self.stream + 3.0 * self.input + (self.masks + 2.0 * self.input) * copies
            }
            _ if takes_over || Some(place) == first => {
                (2.0 * self.input + self.stream + self.masks) * copies
                    + self.stream
                    + 3.0 * self.input
            }
            _ => (2.0 * self.stream + self.masks) * copies,
        };
        let mut peak: f64 = 0.0;
        let works = match place {
            Place::Host => host_weight > 0.0 && !offloads,
            Place::Device(_) => on(place) || takes_over,
        };
        if works {
            peak = self.network.max(self.attention) + 3.0 * self.stream;
        }
        // What attention multiplies is no weight: it is not handed over, unless it is one node.
        let fused = self.flash_attention && has_kernel(setting);
        if place == Place::Host
            && !fused
            && (on(Place::Host) || !params.kv_offload || !has_kernel(setting))
        {
            peak = peak.max(self.attention);
        }
        // Caches on the host are copied for attention on a device, and so are matrices.
        if takes_over {
            peak += host_weight;
        }
        if place != Place::Host && (takes_over && on(Place::Host) || works && !params.kv_offload) {
            peak += self.cached;
        }
        if output == place || (output == Place::Host && takes_over) {
            let matrix = if output == place { 0.0 } else { host_weight };
            peak = peak.max(self.logits + matrix);
        }
        match place {
            Place::Device(_) if peak == 0.0 => 0.0,
            _ => entry + peak,
        }
    }
}

/// Whether attention is one fused node. `Auto` is so if the device has it and nothing is in the way: caches that are not where their
/// layer is.
fn is_fused(setting: Setting<'_>) -> bool {
    let hp = &setting.model.hparams;
    let shared = hp.memory == MemoryKind::Hybrid || hp.n_layer_kv_from_start.is_some();
    let apart = shared && !(setting.params.kv_offload && setting.is_all_offloaded());
    let mut tensors = setting.model.tensors().iter();
    let biased = tensors.any(|t| t.name.contains("attn_rel_b"));
    match setting.context.flash_attn {
        FlashAttn::Off => false,
        _ if biased => false,
        FlashAttn::On => true,
        FlashAttn::Auto => has_kernel(setting) && !apart,
    }
}

/// Whether CUDA has flash attention for the heads of all layers.
fn has_kernel(setting: Setting<'_>) -> bool {
    let hp = &setting.model.hparams;
    let mut layers = (0..hp.n_layer()).filter(|&il| hp.n_head_kv(il) > 0);
    layers.all(|il| match (hp.head_k(il), hp.head_v(il)) {
        (40 | 64 | 72 | 80 | 96 | 112 | 128 | 256 | 512, v) => v == hp.head_k(il),
        (192, 128) | (320, 256) | (576, 512) => true,
        _ => false,
    })
}

/// Where logits are computed.
fn output_place(setting: Setting<'_>) -> Place {
    let (model, placement) = (setting.model, setting.placement);
    let home = placement.output();
    let matrix = model.find("output.weight").or(model.tied_output());
    matrix.map_or(home, |i| placement.redirect(i, home))
}

/// Masks and the row numbers of caches; and the largest mask, in single precision.
fn masks(setting: Setting<'_>, flash_attention: bool) -> (f64, f64) {
    let (hp, cache, tokens) = (
        &setting.model.hparams,
        setting.cache,
        setting.batch().tokens,
    );
    let kinds = match hp.memory {
        MemoryKind::None => vec![tokens],
        MemoryKind::Recurrent => vec![],
        _ if hp.window.is_some() => vec![cache.cells, cache.window_cells],
        _ => vec![cache.cells],
    };
    let element = if flash_attention { 2.0 } else { 4.0 };
    let rows = if cache.v_trans {
        8.0 * (1.0 + hp.n_embd_v_max() as f64)
    } else {
        16.0
    };
    let all = kinds
        .iter()
        .map(|&cells| tokens as f64 * (cells as f64 * element + rows));
    let largest = kinds.iter().max().copied().unwrap_or(0);
    let indexed = hp.indexer.as_ref().map_or(0, |i| i.top_k);
    let selected = 4.0 * tokens as f64 * indexed as f64 * hp.n_layer() as f64;
    (
        all.sum::<f64>() + selected,
        4.0 * tokens as f64 * largest as f64,
    )
}

/// The widest side of a layer's matrices, or of its experts.
fn widest(setting: Setting<'_>, experts: bool) -> f64 {
    let of_layer =
        |t: &&Tensor| matches!(t.role, Role::Layer(_)) && t.ne[1] > 1 && (t.ne[2] > 1) == experts;
    let tensors = setting.model.tensors().iter().filter(of_layer);
    tensors.map(|t| t.ne[0].max(t.ne[1])).max().unwrap_or(0) as f64
}

fn vocabulary(setting: Setting<'_>) -> f64 {
    let model = setting.model;
    let tied = model.tied_output().and_then(|i| model.tensors().get(i));
    let output = model.tensor("output.weight").or(tied);
    output.map_or(0, |t| t.ne[1]) as f64
}

/// The largest matrix that work reads and that lies in host memory.
fn largest_host_weight(setting: Setting<'_>) -> f64 {
    let (model, placement) = (setting.model, setting.placement);
    let tied = model
        .tied_output()
        .filter(|_| output_place(setting) == Place::Host);
    let tensors = model.tensors().iter().enumerate();
    let host = tensors.filter(|(i, t)| {
        let read = t.role != Role::Input || Some(*i) == tied;
        read && t.ne[1] > 1 && placement.tensor(*i) == Some(Place::Host)
    });
    let bytes = host.map(|(_, t)| buffer_bytes(t.ty, t.ne, Place::Device(0)));
    bytes.max().unwrap_or(0) as f64
}

/// Keys and values of a layer, by the bytes of so many values of a type.
fn cached(cache: &CacheLayout, il: usize, bytes: fn(GgmlType, f64) -> f64) -> f64 {
    let attention = cache.layers.get(il).and_then(|layer| layer.attention);
    attention.map_or(0.0, |a| {
        let cells = a.cells as f64 * a.streams as f64;
        bytes(cache.type_k, a.k_width as f64 * cells)
            + bytes(cache.type_v, a.v_width as f64 * cells)
    })
}
