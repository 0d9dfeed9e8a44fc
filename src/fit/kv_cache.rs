use super::request::CELL_PADDING;
use super::weights::{Sums, allocated_bytes};
use super::{Context, Params, Place, Placement};
use crate::arch::{Hparams, MemoryKind};
use crate::gguf::GgmlType;

/// Which of an architecture's caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKind {
    /// As long as the context.
    Full,
    /// As long as the sliding window needs.
    Window,
}

/// A cache of keys and values of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Which cache.
    pub kind: CacheKind,
    /// Cells per stream.
    pub cells: u64,
    /// Streams.
    pub streams: u64,
    /// Values of a cell's keys.
    pub k_width: u64,
    /// Values of a cell's values; 0: there are none (latent attention).
    pub v_width: u64,
}

/// Recurrent state of one layer: rows of 32-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Rows: one per sequence.
    pub rows: u64,
    /// Values of a row of the convolution (or token shift) state.
    pub r_width: u64,
    /// Values of a row of the recurrent state.
    pub s_width: u64,
}

/// What one layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerCache {
    /// Where it lies.
    pub place: Place,
    /// Keys and values.
    pub attention: Option<Cache>,
    /// Keys of the indexer.
    pub indexer: Option<Cache>,
    /// Recurrent state.
    pub state: Option<State>,
    /// The layer whose cache this one reads, if it has none of its own.
    pub shares: Option<usize>,
}

/// What all layers keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheLayout {
    /// Per layer, NextN layers included.
    pub layers: Vec<LayerCache>,
    /// Type of keys.
    pub type_k: GgmlType,
    /// Type of values.
    pub type_v: GgmlType,
    /// Whether values are stored transposed.
    pub v_trans: bool,
    /// Cells per stream of the full cache.
    pub cells: u64,
    /// Cells per stream of the window cache, where there is one.
    pub window_cells: u64,
}

impl CacheLayout {
    /// Lays the caches out.
    pub fn new(hp: &Hparams, params: &Params, context: &Context, placement: &Placement) -> Self {
        let cells = u64::from(context.n_ctx_seq);
        let window_cells = window_cells(hp, params, context);
        let layer = |il: usize| LayerCache {
            place: if params.kv_offload {
                placement.layer(il)
            } else {
                Place::Host
            },
            attention: attention(hp, context, il, cells, window_cells, params.mtp_context),
            indexer: indexer(hp, context, il, cells).filter(|_| !params.mtp_context),
            state: state(hp, context, il).filter(|_| !params.mtp_context),
            shares: shares(hp, il),
        };
        CacheLayout {
            layers: (0..hp.n_layer_all).map(layer).collect(),
            type_k: params.type_k,
            type_v: params.type_v,
            v_trans: context.v_trans,
            cells,
            window_cells,
        }
    }
}

/// Cells of the window cache (`llama_kv_cache_iswa`).
fn window_cells(hp: &Hparams, params: &Params, context: &Context) -> u64 {
    let cells = u64::from(context.n_ctx_seq);
    let Some(window) = hp.window.as_ref().filter(|_| !params.swa_full) else {
        return cells;
    };
    let windows = if params.kv_unified { context.n_seq } else { 1 };
    let need = window.size * u64::from(windows) + u64::from(context.n_ubatch);
    need.min(cells).next_multiple_of(CELL_PADDING.into())
}

/// Whether a layer has an attention cache at all. The context of the MTP layers has one for those alone.
fn has_attention(hp: &Hparams, il: usize, mtp_context: bool) -> bool {
    if mtp_context {
        return il >= hp.n_layer();
    }
    let in_trunk = il < hp.n_layer();
    match hp.memory {
        MemoryKind::None | MemoryKind::Recurrent => false,
        MemoryKind::Attention if hp.arch() == "graniteswitch" => true,
        MemoryKind::Attention | MemoryKind::Compressed => in_trunk,
        MemoryKind::Indexed if hp.arch() == "hy_v4" || hp.arch() == "minimax-m3" => true,
        MemoryKind::Indexed => in_trunk,
        MemoryKind::Hybrid => match hp.arch() {
            "falcon-h1" => true,
            "nemotron_h" | "nemotron_h_moe" => !hp.is_recurrent(il) && hp.n_ff(il) == 0,
            "qwen3next" | "qwen35" | "qwen35moe" | "qwen4exp" | "minimax-01" | "glm5-next" => {
                in_trunk && !hp.is_recurrent(il)
            }
            _ => !hp.is_recurrent(il),
        },
    }
}

fn attention(
    hp: &Hparams,
    context: &Context,
    il: usize,
    cells: u64,
    window_cells: u64,
    mtp_context: bool,
) -> Option<Cache> {
    let own = hp.n_layer_kv_from_start.is_none_or(|n| il < n);
    if !own || !has_attention(hp, il, mtp_context) {
        return None;
    }
    let window = hp.is_swa(il);
    Some(Cache {
        kind: if window {
            CacheKind::Window
        } else {
            CacheKind::Full
        },
        cells: if window { window_cells } else { cells },
        streams: context.n_streams.into(),
        k_width: hp.n_embd_k(il),
        v_width: match (hp.is_mla(), context.v_trans) {
            (true, _) => 0,
            (false, false) => hp.n_embd_v(il),
            // Transposed rows have one stride for all layers.
            (false, true) => hp.n_embd_v_max(),
        },
    })
}

/// The indexer's keys: one head, a cache of its own (`llama_kv_cache_dsa`, `llama_kv_cache_msa`, `llama_memory_hybrid_idx`).
fn indexer(hp: &Hparams, context: &Context, il: usize, cells: u64) -> Option<Cache> {
    let indexer = hp.indexer.as_ref()?;
    let own = match hp.arch() {
        "deepseek32" => il < hp.n_layer(),
        "glm-dsa" | "dots3note" | "glm5-next" => {
            il < hp.n_layer() && indexer.layers.get(il) == Some(&true) && !hp.is_recurrent(il)
        }
        "hy_v4" => indexer.top_k > 0 && indexer.layers.get(il) == Some(&true),
        "minimax-m3" => il as u64 >= hp.n_layer_dense_lead,
        "qwen4exp" => il < hp.n_layer() && !hp.is_recurrent(il),
        _ => false,
    };
    // A pooled key is cached beside the keys that it is made of.
    let slots = match (hp.arch(), indexer.kpool) {
        (_, 0) => 1,
        ("qwen4exp", _) => 2,
        _ => 3,
    };
    // Without latent attention the cache has values too, of one head.
    let v_width = if hp.arch() == "minimax-m3" {
        hp.head_v(il)
    } else {
        0
    };
    own.then_some(Cache {
        kind: CacheKind::Full,
        cells,
        streams: context.n_streams.into(),
        k_width: indexer.head_size * slots,
        v_width,
    })
}

fn state(hp: &Hparams, context: &Context, il: usize) -> Option<State> {
    let own = il < hp.n_layer()
        && match hp.memory {
            MemoryKind::Recurrent => true,
            MemoryKind::Hybrid => hp.is_recurrent(il),
            _ => false,
        };
    own.then_some(State {
        rows: context.n_seq.into(),
        r_width: hp.n_embd_r,
        s_width: hp.n_embd_s,
    })
}

/// Layers behind the first ones read the cache of the last full, or window, layer that has one.
fn shares(hp: &Hparams, il: usize) -> Option<usize> {
    let own = hp.n_layer_kv_from_start?;
    (il >= own).then(|| own.saturating_sub(if hp.is_swa(il) { 2 } else { 1 }))
}

/// Bytes of caches and states per device, and on the host.
pub fn cache_bytes(layout: &CacheLayout, n_devices: usize) -> (Vec<u64>, u64) {
    let mut sums = Sums::new(n_devices);
    for layer in &layout.layers {
        let place = layer.place;
        for cache in [layer.attention, layer.indexer].into_iter().flatten() {
            let Cache {
                cells,
                streams,
                k_width,
                v_width,
                ..
            } = cache;
            for (ty, width) in [(layout.type_k, k_width), (layout.type_v, v_width)] {
                if width > 0 {
                    sums.add(
                        place,
                        allocated_bytes(ty, [width, cells, streams, 1], place),
                    );
                }
            }
        }
        if let Some(State {
            rows,
            r_width,
            s_width,
        }) = layer.state
        {
            for width in [r_width, s_width] {
                sums.add(
                    place,
                    allocated_bytes(GgmlType::F32, [width, rows, 1, 1], place),
                );
            }
        }
    }
    (sums.devices, sums.host)
}
