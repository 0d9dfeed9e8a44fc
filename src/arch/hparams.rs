use super::keys::{Keys, Value};
use super::memory::MemoryKind;
use super::recurrent::{is_recurrent, recurrent_layers};
use super::window::{SlidingWindow, window};
use super::{ArchError, MAX_DIM, MAX_EXPERTS, MAX_LAYERS};

/// Multi-head latent attention: heads after decompression, and the ranks before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mla {
    /// Key length of a head (0: no MLA cache).
    pub head_k: u64,
    /// Value length of a head.
    pub head_v: u64,
    /// Rank of the compressed query (0: not compressed).
    pub lora_q: u64,
    /// Rank of the compressed keys and values.
    pub lora_kv: u64,
}

/// State-space (Mamba and delta-net) dimensions; 0 where the architecture has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ssm {
    /// Width of the convolution.
    pub d_conv: u64,
    /// Inner size.
    pub d_inner: u64,
    /// State size.
    pub d_state: u64,
    /// Rank of the time step; heads of Mamba 2 and delta nets.
    pub dt_rank: u64,
    /// Groups.
    pub n_group: u64,
}

/// The indexer of sparse attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indexer {
    /// Query heads.
    pub n_head: u64,
    /// Key length.
    pub head_size: u64,
    /// Tokens (or blocks) that are selected.
    pub top_k: u64,
    /// Keys pooled into one (0: none).
    pub kpool: u64,
    /// Layers with an indexer of their own.
    pub layers: Vec<bool>,
}

/// Hyper-parameters, per layer where the header may have arrays (`llama_hparams`). Layers are counted with NextN blocks.
#[derive(Debug, Clone)]
pub struct Hparams {
    /// All keys, for what only one family reads.
    pub keys: Keys,
    /// Context the model was trained on, tokens.
    pub n_ctx_train: u32,
    /// Embedding length.
    pub n_embd: u64,
    /// Width of what is fed in as embeddings: with deepstack several times `n_embd`.
    pub n_embd_inp: u64,
    /// Width of the output embeddings.
    pub n_embd_out: u64,
    /// Vocabulary size; 0 where the header does not say.
    pub n_vocab: u64,
    /// Blocks, with NextN blocks.
    pub n_layer_all: usize,
    /// NextN (MTP) blocks, the last ones.
    pub n_layer_nextn: usize,
    /// Query heads.
    pub n_head: Vec<u64>,
    /// Key-value heads.
    pub n_head_kv: Vec<u64>,
    /// Width of the dense feed-forward network.
    pub n_ff: Vec<u64>,
    /// Width of one expert.
    pub n_ff_exp: Vec<u64>,
    /// Experts (0: dense).
    pub n_expert: u64,
    /// Experts per token.
    pub n_expert_used: Vec<u64>,
    /// Leading dense blocks of a mixture of experts.
    pub n_layer_dense_lead: u64,
    /// Key length of a head, full layers.
    pub head_k: u64,
    /// Value length of a head, full layers.
    pub head_v: u64,
    /// Key length of a head, window layers.
    pub head_k_swa: u64,
    /// Value length of a head, window layers.
    pub head_v_swa: u64,
    /// Rotated dimensions, full layers.
    pub n_rot: u64,
    /// Rotated dimensions, window layers.
    pub n_rot_swa: u64,
    /// Latent attention.
    pub mla: Mla,
    /// Sliding window, if any.
    pub window: Option<SlidingWindow>,
    /// Layers with a recurrent state.
    pub recurrent: Vec<bool>,
    /// Only this many first layers have a cache of their own; the others share it.
    pub n_layer_kv_from_start: Option<usize>,
    /// State-space dimensions.
    pub ssm: Ssm,
    /// Values per row of the convolution (or token shift) state.
    pub n_embd_r: u64,
    /// Values per row of the recurrent state.
    pub n_embd_s: u64,
    /// Indexer of sparse attention.
    pub indexer: Option<Indexer>,
    /// Whether attention is causal.
    pub causal: bool,
    /// What is kept of past tokens.
    pub memory: MemoryKind,
}

fn usize_of(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl Hparams {
    /// Reads them from the keys. `has_tensor` tells whether a tensor is in the file.
    ///
    /// # Errors
    /// [`ArchError`] for a key that is missing, of a wrong type, or out of range.
    pub fn new(keys: Keys, has_tensor: &dyn Fn(&str) -> bool) -> Result<Hparams, ArchError> {
        let arch = keys.arch().to_owned();
        let arch = arch.as_str();
        let n_ctx_train = u32::try_from(keys.need("context_length")?).unwrap_or(u32::MAX);
        let n_embd = match arch {
            "wavtokenizer-dec" => keys.need_dim("features_length")?,
            _ => keys.need_dim("embedding_length")?,
        };
        let blocks = keys.need("block_count")?;
        let range = |key: &str, value: u64| ArchError::Range {
            key: keys.full(key),
            value: value.to_string(),
        };
        if blocks == 0 || blocks > MAX_LAYERS {
            return Err(range("block_count", blocks));
        }
        if n_embd == 0 {
            return Err(range("embedding_length", 0));
        }
        let mut n_all = usize_of(blocks);
        let mut nextn = usize_of(keys.opt("nextn_predict_layers")?.unwrap_or(0));
        if nextn > n_all {
            return Err(range("nextn_predict_layers", nextn as u64));
        }
        let first_nextn = format!("blk.{}.nextn.eh_proj.weight", n_all - nextn);
        if arch == "deepseek4" && !has_tensor(&first_nextn) {
            nextn = 0;
        }
        let heads_needed = !is_recurrent(arch) && arch != "wavtokenizer-dec";
        let mut n_head = match keys.per_layer("attention.head_count", n_all)? {
            Some(list) => list,
            None if heads_needed => {
                return Err(ArchError::Missing(keys.full("attention.head_count")));
            }
            None => vec![0; n_all],
        };
        let mut n_head_kv = keys
            .per_layer("attention.head_count_kv", n_all)?
            .unwrap_or_else(|| n_head.clone());
        let list = |key: &str| {
            Ok(keys
                .per_layer(key, n_all)?
                .unwrap_or_else(|| vec![0; n_all]))
        };
        let mut n_ff = list("feed_forward_length")?;
        let mut n_ff_exp = list("expert_feed_forward_length")?;
        let mut n_expert_used = list("expert_used_count")?;
        let mut n_expert = keys.opt_dim("expert_count")?.unwrap_or(0);
        if matches!(arch, "hunyuan-dense" | "hunyuan_vl") && n_expert <= 1 {
            n_expert = 0;
            n_expert_used = vec![0; n_all];
        }
        let used = n_expert_used.iter().copied().max().unwrap_or(0);
        if n_expert > MAX_EXPERTS {
            return Err(range("expert_count", n_expert));
        }
        if used > n_expert {
            return Err(range("expert_used_count", used));
        }
        let head_0 = n_head.first().copied().unwrap_or(0);
        let default_head = n_embd.checked_div(head_0).unwrap_or(0);
        let dim = |key: &str, default: u64| -> Result<u64, ArchError> {
            Ok(keys.opt_dim(key)?.unwrap_or(default))
        };
        let (mut head_k, mut head_v, mut n_rot) = (0, 0, 0);
        if head_0 > 0 || arch == "plamo2" {
            head_k = dim("attention.key_length", default_head)?;
            head_v = dim("attention.value_length", default_head)?;
            n_rot = dim("rope.dimension_count", head_k)?;
        }
        let head_k_swa = dim("attention.key_length_swa", head_k)?;
        let head_v_swa = dim("attention.value_length_swa", head_v)?;
        let n_rot_swa = dim("rope.dimension_count_swa", n_rot)?;
        if matches!(arch, "kimi-k3" | "glm5-next") {
            head_v = keys.need_dim("attention.kv_lora_rank")?;
        }
        if arch == "step35" {
            n_rot /= 2;
        }
        let mut recurrent = recurrent_layers(&keys, n_all - nextn, n_all, &n_head_kv, &n_ff)?;
        let mut window = window(&keys, n_all - nextn, n_all, &recurrent)?;
        let memory = MemoryKind::of(arch, dim("attention.indexer.top_k", 0)? > 0);
        let ssm = Ssm {
            d_conv: dim("ssm.conv_kernel", 0)?,
            d_inner: dim("ssm.inner_size", 0)?,
            d_state: dim("ssm.state_size", 0)?,
            dt_rank: dim("ssm.time_step_rank", 0)?,
            n_group: dim("ssm.group_count", 0)?,
        };
        if matches!(memory, MemoryKind::Recurrent | MemoryKind::Hybrid) {
            need_state(&keys)?;
        }
        let (n_embd_r, n_embd_s) = state_widths(&keys, n_embd, head_0, head_k, ssm)?;
        let channels = ssm.d_inner + 2 * ssm.n_group * ssm.d_state;
        if channels > MAX_DIM || n_embd_r.max(n_embd_s) > u32::MAX.into() {
            return Err(range("ssm.inner_size", ssm.d_inner));
        }
        let n_layer_kv_from_start = match arch {
            "gemma3n" => Some(20),
            "gemma4" => {
                let shared = usize_of(keys.opt("attention.shared_kv_layers")?.unwrap_or(0));
                Some(n_all.saturating_sub(shared))
            }
            _ => None,
        };
        let lists = [
            &mut n_head,
            &mut n_head_kv,
            &mut n_ff,
            &mut n_ff_exp,
            &mut n_expert_used,
        ];
        match arch {
            // The layers are run several times, each time with a cache of their own.
            "nanbeige" => {
                let loops = usize_of(keys.opt("num_loops")?.unwrap_or(1));
                let total = n_all.saturating_mul(loops);
                if total == 0 || total as u64 > MAX_LAYERS {
                    return Err(range("num_loops", loops as u64));
                }
                for list in lists {
                    *list = list.iter().copied().cycle().take(total).collect();
                }
                recurrent = vec![false; total];
                n_all = total;
            }
            // A layer behind the last one keeps the state of the adapter router.
            "graniteswitch" => {
                for (list, last) in lists.into_iter().zip([1, 1, 0, 0, 0]) {
                    list.push(last);
                }
                recurrent.push(false);
                n_all += 1;
                nextn = 1;
            }
            _ => {}
        }
        if let Some(window) = &mut window {
            window.layers.resize(n_all, false);
        }
        for (&h, &kv) in n_head.iter().zip(&n_head_kv) {
            let widest = h
                .max(kv)
                .saturating_mul(head_k.max(head_v).max(head_k_swa).max(head_v_swa));
            if widest > MAX_DIM {
                return Err(range("attention.head_count", h));
            }
        }
        let n_embd_out = match arch {
            "deepseek4" | "qwen4exp" => n_embd.saturating_mul(keys.need("hyper_connection.count")?),
            _ => dim("embedding_length_out", n_embd)?,
        };
        Ok(Hparams {
            n_ctx_train,
            n_embd,
            n_embd_inp: match arch {
                "gemma4-assistant" => n_embd_out,
                _ => n_embd.saturating_mul(1 + deepstack_layers(&keys)?),
            },
            n_embd_out,
            n_vocab: vocabulary(&keys)?,
            n_layer_all: n_all,
            n_layer_nextn: nextn,
            n_head,
            n_head_kv,
            n_ff,
            n_ff_exp,
            n_expert,
            n_expert_used,
            n_layer_dense_lead: match arch {
                "lfm2" => blocks,
                _ => dim("leading_dense_block_count", 0)?,
            },
            head_k,
            head_v,
            head_k_swa,
            head_v_swa,
            n_rot,
            n_rot_swa,
            mla: mla(&keys)?,
            window,
            recurrent,
            n_layer_kv_from_start,
            ssm,
            n_embd_r,
            n_embd_s,
            indexer: indexer(&keys, n_ctx_train, n_all)?,
            causal: keys.flag("attention.causal").unwrap_or(true)
                && !matches!(
                    arch,
                    "gemma-embedding" | "dream" | "llada" | "llada-moe" | "rnd1"
                ),
            memory,
            keys,
        })
    }

    /// The architecture's name.
    pub fn arch(&self) -> &str {
        self.keys.arch()
    }

    /// Blocks without NextN blocks.
    pub fn n_layer(&self) -> usize {
        self.n_layer_all - self.n_layer_nextn
    }

    /// Whether a layer's attention has a window.
    pub fn is_swa(&self, il: usize) -> bool {
        let window = self.window.as_ref();
        window.is_some_and(|w| w.layers.get(il) == Some(&true))
    }

    /// Whether a layer has a recurrent state.
    pub fn is_recurrent(&self, il: usize) -> bool {
        self.recurrent.get(il) == Some(&true)
    }

    /// Query heads of a layer.
    pub fn n_head(&self, il: usize) -> u64 {
        of(&self.n_head, il)
    }

    /// Key-value heads of a layer.
    pub fn n_head_kv(&self, il: usize) -> u64 {
        of(&self.n_head_kv, il)
    }

    /// Width of a layer's dense feed-forward network.
    pub fn n_ff(&self, il: usize) -> u64 {
        of(&self.n_ff, il)
    }

    /// Width of an expert of a layer.
    pub fn n_ff_exp(&self, il: usize) -> u64 {
        of(&self.n_ff_exp, il)
    }

    /// Experts that a token uses in a layer.
    pub fn n_expert_used(&self, il: usize) -> u64 {
        of(&self.n_expert_used, il)
    }

    /// Key length of a head of a layer.
    pub fn head_k(&self, il: usize) -> u64 {
        if self.is_swa(il) {
            self.head_k_swa
        } else {
            self.head_k
        }
    }

    /// Value length of a head of a layer.
    pub fn head_v(&self, il: usize) -> u64 {
        if self.is_swa(il) {
            self.head_v_swa
        } else {
            self.head_v
        }
    }

    /// Values of all keys of a token in a layer.
    pub fn n_embd_k(&self, il: usize) -> u64 {
        self.head_k(il) * self.n_head_kv(il)
    }

    /// Values of all values of a token in a layer.
    pub fn n_embd_v(&self, il: usize) -> u64 {
        self.head_v(il) * self.n_head_kv(il)
    }

    /// The largest of [`Hparams::n_embd_v`] over the layers.
    pub fn n_embd_v_max(&self) -> u64 {
        let widths = (0..self.n_layer_all).map(|il| self.n_embd_v(il));
        widths.max().unwrap_or(0)
    }

    /// Whether there is an encoder, of which all rows are wanted (`llama_model_has_encoder`).
    pub fn has_encoder(&self) -> bool {
        matches!(self.arch(), "t5" | "t5encoder" | "eagle3" | "dflash")
    }

    /// Whether the cache holds compressed keys only.
    pub fn is_mla(&self) -> bool {
        self.mla.head_k > 0 && self.mla.head_v > 0
    }
}

/// The value of a layer. The lists are as long as there are layers.
fn of(list: &[u64], il: usize) -> u64 {
    list.get(il).copied().unwrap_or(0)
}

fn mla(keys: &Keys) -> Result<Mla, ArchError> {
    let dim = |key: &str| Ok(keys.opt_dim(key)?.unwrap_or(0));
    let both = [
        keys.opt_dim("attention.key_length_mla")?,
        keys.opt_dim("attention.value_length_mla")?,
    ];
    let (head_k, head_v) = match both {
        [Some(k), Some(v)] => (k, v),
        [None, None] => (0, 0),
        [None, Some(_)] => return Err(ArchError::Missing(keys.full("attention.key_length_mla"))),
        [Some(_), None] => return Err(ArchError::Missing(keys.full("attention.value_length_mla"))),
    };
    Ok(Mla {
        head_k,
        head_v,
        lora_q: dim("attention.q_lora_rank")?,
        lora_kv: dim("attention.kv_lora_rank")?,
    })
}

/// The keys that the recurrent state of an architecture is made from.
fn need_state(keys: &Keys) -> Result<(), ArchError> {
    let needed: &[&str] = match keys.arch() {
        "rwkv6" | "rwkv6qwen2" | "rwkv7" | "arwkv7" => &["wkv.head_size"],
        "lfm2" | "lfm2moe" => &["shortconv.l_cache"],
        "kimi-linear" | "kimi-k3" | "bailingmoe3" | "glm5-next" => {
            &["kda.head_dim", "ssm.conv_kernel"]
        }
        "minimax-01" => &[],
        _ => &["ssm.conv_kernel", "ssm.inner_size", "ssm.state_size"],
    };
    needed.iter().try_for_each(|key| keys.need(key).map(drop))
}

/// Values per row of the two states: `llama_hparams::n_embd_r` and `n_embd_s`.
fn state_widths(
    keys: &Keys,
    n_embd: u64,
    n_head: u64,
    head_k: u64,
    ssm: Ssm,
) -> Result<(u64, u64), ArchError> {
    let positive = |key: &str| Ok(keys.opt_dim(key)?.filter(|&n| n > 0));
    if let Some(head_size) = positive("wkv.head_size")? {
        let shifts = keys.opt_dim("token_shift_count")?.unwrap_or(2);
        return Ok((shifts * n_embd, n_embd * head_size));
    }
    if let Some(l_cache) = positive("shortconv.l_cache")? {
        return Ok((
            n_embd * l_cache.saturating_sub(1),
            ssm.d_state * ssm.d_inner,
        ));
    }
    let before = ssm.d_conv.saturating_sub(1);
    if let Some(head_dim) = positive("kda.head_dim")? {
        let before = if ssm.d_conv > 0 { before } else { 3 };
        let conv = (3 * before).saturating_mul(n_head * head_dim);
        return Ok((conv, (head_dim * head_dim).saturating_mul(n_head)));
    }
    let conv = before.saturating_mul(ssm.d_inner + 2 * ssm.n_group * ssm.d_state);
    if keys.arch() == "minimax-01" {
        return Ok((conv, (head_k * head_k).saturating_mul(n_head)));
    }
    Ok((conv, ssm.d_state * ssm.d_inner))
}

fn indexer(keys: &Keys, n_ctx_train: u32, n_all: usize) -> Result<Option<Indexer>, ArchError> {
    let Some(head_size) = keys
        .opt_dim("attention.indexer.key_length")?
        .filter(|&n| n > 0)
    else {
        return Ok(None);
    };
    let layers = match keys.get("attention.indexer.types") {
        Some(Value::Ints(list)) => (0..n_all)
            .map(|i| list.get(i).is_some_and(|&x| x != 0))
            .collect(),
        Some(_) => keys
            .per_layer("attention.indexer.types", n_all)?
            .map_or_else(Vec::new, |list| list.iter().map(|&x| x != 0).collect()),
        // GLM 5.2: the first two layers own an indexer, then one of four (`GLM_5_2_DEFAULT_INDEXER_TYPES`).
        None if keys.arch() == "glm-dsa" && n_ctx_train >= 1 << 20 => (0..n_all)
            .map(|i| i < 2 || (i - 2).is_multiple_of(4))
            .collect(),
        None => vec![true; n_all],
    };
    let mut kpool = keys.opt_dim("attention.indexer.kpool")?.unwrap_or(0);
    if keys.arch() == "qwen4exp" {
        let ratios = keys.per_layer("attention.compress_ratios", n_all)?;
        kpool = ratios.and_then(|list| list.into_iter().max()).unwrap_or(0);
    }
    Ok(Some(Indexer {
        n_head: keys.need_dim("attention.indexer.head_count")?,
        head_size,
        top_k: keys.need_dim("attention.indexer.top_k")?,
        kpool,
        layers,
    }))
}

/// Embeddings that are fed in beside the main one.
fn deepstack_layers(keys: &Keys) -> Result<u64, ArchError> {
    if let Some(Value::Ints(mapping)) = keys.get("deepstack_mapping") {
        let mut used: Vec<_> = mapping.iter().filter(|&&i| i >= 0).collect();
        used.sort_unstable();
        used.dedup();
        return Ok(used.len() as u64);
    }
    match keys.arch() {
        "qwen3vl" | "qwen3vlmoe" => Ok(keys.opt_dim("n_deepstack_layers")?.unwrap_or(0)),
        _ => Ok(0),
    }
}

fn vocabulary(keys: &Keys) -> Result<u64, ArchError> {
    if let Some(n) = keys.opt_dim("vocab_size")? {
        return Ok(n);
    }
    Ok(match keys.global("tokenizer.ggml.tokens") {
        Some(Value::Array(n)) => *n,
        _ => 0,
    })
}
