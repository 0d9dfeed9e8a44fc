use super::Override;
use crate::arch::Hparams;
use crate::gguf::GgmlType;

/// llama.cpp's `LLAMA_MAX_SEQ`.
pub const MAX_SEQUENCES: u32 = 256;
/// Caches, and contexts, are rounded up to this many cells.
pub const CELL_PADDING: u32 = 256;

/// Flash attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FlashAttn {
    /// Where every attention can run on its layer's device.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How a model is spread over devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SplitMode {
    /// All on one device.
    None,
    /// By layers.
    #[default]
    Layer,
}

/// Parameters that decide about memory, with llama.cpp's defaults.
#[derive(Debug, Clone)]
pub struct Params {
    /// Context in tokens, for all sequences together; 0 is what the model was trained on.
    pub n_ctx: u32,
    /// Logical batch, tokens.
    pub n_batch: u32,
    /// Physical batch, tokens.
    pub n_ubatch: u32,
    /// Parallel sequences.
    pub n_seq: u32,
    /// One cache for all sequences.
    pub kv_unified: bool,
    /// Flash attention.
    pub flash_attn: FlashAttn,
    /// Type of the keys in the cache.
    pub type_k: GgmlType,
    /// Type of the values in the cache.
    pub type_v: GgmlType,
    /// Layers on devices; -1 (not set) and -2 (all) are all.
    pub n_gpu_layers: i32,
    /// Shares of the devices; empty or all zero: by free memory.
    pub tensor_split: Vec<f32>,
    /// How the model is spread.
    pub split_mode: SplitMode,
    /// The device of [`SplitMode::None`].
    pub main_gpu: usize,
    /// Tensor overrides, the first that matches wins.
    pub overrides: Vec<Override>,
    /// The cache lies with its layers.
    pub kv_offload: bool,
    /// Window layers have a full cache.
    pub swa_full: bool,
    /// Large operations on host weights run on a device.
    pub op_offload: bool,
    /// Load NextN (MTP) blocks.
    pub mtp: bool,
    /// The context is that of the MTP blocks, which draft for the others.
    pub mtp_context: bool,
    /// Rows of logits at most; 0: a whole logical batch.
    pub n_outputs_max: u32,
}

impl Default for Params {
    fn default() -> Params {
        Params {
            n_ctx: 0,
            n_batch: 2048,
            n_ubatch: 512,
            n_seq: 1,
            kv_unified: false,
            flash_attn: FlashAttn::Auto,
            type_k: GgmlType::F16,
            type_v: GgmlType::F16,
            n_gpu_layers: -1,
            tensor_split: Vec::new(),
            split_mode: SplitMode::Layer,
            main_gpu: 0,
            overrides: Vec::new(),
            kv_offload: true,
            swa_full: false,
            op_offload: true,
            mtp: false,
            mtp_context: false,
            n_outputs_max: 0,
        }
    }
}

impl Params {
    /// Caches side by side: one if unified.
    pub fn n_streams(&self) -> u32 {
        if self.kv_unified {
            1
        } else {
            self.n_seq.max(1)
        }
    }

    /// Whether the user gave a split.
    pub fn has_split(&self) -> bool {
        self.tensor_split.iter().any(|&share| share != 0.0)
    }
}

/// Why llama.cpp would not load a model with these parameters; the messages are its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error("n_ctx and model->hparams.n_ctx_train cannot both be zero")]
    NoContext,
    #[error("n_batch and n_ubatch cannot both be zero")]
    NoBatch,
    #[error("n_seq_max must be <= {MAX_SEQUENCES}")]
    Sequences,
    #[error("model does not support different K ({k}) and V ({v}) cache types")]
    DifferentTypes { k: String, v: String },
    #[error("quantized V cache requires flash_attn to be enabled")]
    QuantizedV,
    #[error(
        "{which} cache type {ty} with block size {block} does not divide n_embd_head_{head}={size}"
    )]
    Block {
        which: char,
        ty: String,
        block: u64,
        head: char,
        size: u64,
    },
    #[error("quantized V cache was requested, but this requires Flash Attention")]
    NeedsFlashAttn,
    #[error("the tensor split leaves no device for layer {0}")]
    Split(usize),
    #[error("device {0} does not exist")]
    Device(usize),
    #[error("{0}")]
    Graph(String),
}

/// What a context ends up with (`llama_context::llama_context`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Cells for all sequences.
    pub n_ctx: u32,
    /// Cells per stream.
    pub n_ctx_seq: u32,
    /// Logical batch.
    pub n_batch: u32,
    /// Physical batch.
    pub n_ubatch: u32,
    /// Parallel sequences.
    pub n_seq: u32,
    /// Caches side by side.
    pub n_streams: u32,
    /// Whether they are one.
    pub kv_unified: bool,
    /// Tokens of the graph that is reserved: the physical batch, rounded up to a multiple of the sequences.
    pub n_tokens: u32,
    /// Rows of logits of that graph.
    pub n_outputs: u32,
    /// Flash attention; `Auto` is decided by the graph.
    pub flash_attn: FlashAttn,
    /// Whether values are stored transposed: decided before `Auto` is.
    pub v_trans: bool,
}

fn is_quantized(ty: GgmlType) -> bool {
    ty.block().is_some_and(|(values, _)| values > 1)
}

impl Context {
    /// Derives a context from parameters.
    ///
    /// # Errors
    /// [`Refusal`] where llama.cpp refuses the combination.
    pub fn new(hp: &Hparams, params: &Params) -> Result<Context, Refusal> {
        if params.n_batch == 0 && params.n_ubatch == 0 {
            return Err(Refusal::NoBatch);
        }
        let n_seq = params.n_seq.max(1);
        if n_seq > MAX_SEQUENCES {
            return Err(Refusal::Sequences);
        }
        let flash_attn = flash_attn(hp, params)?;
        let n_ctx = match params.n_ctx {
            0 => hp.n_ctx_train,
            n => n,
        };
        if n_ctx == 0 {
            return Err(Refusal::NoContext);
        }
        let n_batch = if hp.causal {
            params.n_batch.min(n_ctx)
        } else {
            params.n_batch
        };
        let n_ubatch = match params.n_ubatch {
            0 => n_batch,
            n => n.min(n_batch),
        };
        let pad = |n: u32| {
            n.checked_next_multiple_of(CELL_PADDING)
                .unwrap_or(u32::MAX - (CELL_PADDING - 1))
        };
        let n_ctx = pad(n_ctx);
        let (n_ctx, n_ctx_seq) = if params.kv_unified {
            (n_ctx, n_ctx)
        } else {
            let each = pad(n_ctx / n_seq);
            (each.saturating_mul(n_seq), each)
        };
        let n_tokens = n_ctx.min(n_ubatch);
        let n_outputs_max = match params.n_outputs_max {
            0 => n_batch,
            _ if hp.has_encoder() => n_batch,
            n => n,
        };
        Ok(Context {
            n_ctx,
            n_ctx_seq,
            n_batch,
            n_ubatch,
            n_seq,
            n_streams: params.n_streams(),
            kv_unified: params.kv_unified,
            n_tokens: n_tokens.checked_next_multiple_of(n_seq).unwrap_or(n_tokens),
            n_outputs: n_tokens.min(n_outputs_max),
            flash_attn,
            v_trans: flash_attn == FlashAttn::Off,
        })
    }
}

/// Flash attention before the graph decides about `Auto`, and the checks of the cache types (`llama_init_from_model`).
fn flash_attn(hp: &Hparams, params: &Params) -> Result<FlashAttn, Refusal> {
    let mut flash_attn = params.flash_attn;
    if hp.arch() == "grok" {
        flash_attn = FlashAttn::Off;
    }
    let (k, v) = (params.type_k, params.type_v);
    if (hp.is_mla() || hp.arch() == "deepseek4") && k != v {
        return Err(Refusal::DifferentTypes {
            k: k.name().to_lowercase(),
            v: v.name().to_lowercase(),
        });
    }
    if is_quantized(v) {
        match flash_attn {
            FlashAttn::Off => return Err(Refusal::QuantizedV),
            FlashAttn::Auto => flash_attn = FlashAttn::On,
            FlashAttn::On => {}
        }
    }
    if flash_attn != FlashAttn::Off {
        for (which, head, ty) in [('K', 'k', k), ('V', 'v', v)] {
            let block = ty.block().map_or(1, |(values, _)| values);
            for il in 0..hp.n_layer() {
                let size = if which == 'K' {
                    hp.head_k(il)
                } else {
                    hp.head_v(il)
                };
                if block > 1 && size % block != 0 {
                    return Err(Refusal::Block {
                        which,
                        ty: ty.name().to_lowercase(),
                        block,
                        head,
                        size,
                    });
                }
            }
        }
    }
    Ok(flash_attn)
}
