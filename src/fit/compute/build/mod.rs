//! Graph builders: one per family of architectures, composed from shared blocks.
//!
//! A builder follows the `graph` of its file in llama.cpp's `src/models/` call by call, since the order of nodes decides about
//! memory. What differs only by which tensors or keys a model has is decided by those, not by the name of the architecture.

mod attention;
mod decoder;
mod deepstack;
mod delta_net;
mod encoder;
mod ffn;
mod frame;
mod gemma3n;
mod gemma4;
mod hybrid;
mod kda;
mod latent;
mod mamba;
mod parallel;
mod rwkv;
mod sparse;
mod state;
mod style;
mod t5;

pub use attention::{AttentionInputs, CacheInputs, Extras, Qkv, SelfInputs};
pub use ffn::{Activation, Experts, FFN, Gating, SHARED_EXPERT};
pub use frame::Norm;

use super::graph::{Backend, Graph, Home, Id};
use super::setting::{Batch, Setting};
use crate::arch::{ArchError, Hparams};
use crate::fit;
use crate::fit::Place;
use crate::gguf::GgmlType;

/// More than any machine has; less than what sums of sizes can hold.
const MAX_BYTES: u64 = 1 << 60;

/// Tensors of a graph for each of the model's, roughly, copies included.
const TENSORS_PER_WEIGHT: usize = 10;

/// Why a graph cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no builder for the architecture.
    #[error("no graph is known for the architecture {0:?}")]
    Unknown(String),
    /// The architecture needs a tensor that the model lacks.
    #[error("tensor {0:?} is missing")]
    MissingTensor(String),
    /// A key is missing or makes no sense.
    #[error(transparent)]
    Arch(#[from] ArchError),
    /// A layer is to attend to past tokens, but has no cache.
    #[error("layer {0} has no cache")]
    NoCache(usize),
    /// The graph would be larger than memory can be.
    #[error("the graph needs more than 2^60 bytes")]
    TooLarge,
}

/// Builds the graph of the model's architecture.
///
/// # Errors
/// [`Error`] for an architecture without builder, or a model that lacks what its architecture needs.
pub fn graph(setting: Setting<'_>, batch: Batch, flash_attention: bool) -> Result<Graph, Error> {
    let mut b = Build::new(setting, batch, flash_attention);
    match b.hp.arch() {
        "deepseek2" | "deepseek32" | "glm-dsa" | "mistral4" => latent::deepseek(&mut b)?,
        "minicpm3" => latent::minicpm3(&mut b)?,
        "kimi-linear" => kda::kimi_linear(&mut b)?,
        "bailingmoe3" => kda::bailing(&mut b)?,
        "mamba" | "mamba2" => mamba::mamba(&mut b)?,
        "jamba" => hybrid::jamba(&mut b)?,
        "falcon-h1" => hybrid::falcon_h1(&mut b)?,
        "nemotron_h" | "nemotron_h_moe" => hybrid::nemotron_h(&mut b)?,
        "granitehybrid" => hybrid::granite(&mut b)?,
        "lfm2" | "lfm2moe" => hybrid::lfm2(&mut b)?,
        "plamo2" => hybrid::plamo2(&mut b)?,
        "qwen3next" => delta_net::qwen3_next(&mut b)?,
        "qwen35" | "qwen35moe" => delta_net::qwen3_5(&mut b)?,
        "rwkv6" | "rwkv7" => rwkv::rwkv(&mut b)?,
        "rwkv6qwen2" | "arwkv7" => rwkv::converted(&mut b)?,
        "bert" | "jina-bert-v2" | "jina-bert-v3" | "nomic-bert" | "nomic-bert-moe" => {
            encoder::bert(&mut b)?
        }
        "eurobert" | "gemma-embedding" | "modern-bert" | "neo-bert" => encoder::pre_norm(&mut b)?,
        "gemma3n" => gemma3n::build(&mut b)?,
        "gemma4" => gemma4::build(&mut b)?,
        "t5" => t5::decoder(&mut b)?,
        "t5encoder" => t5::encoder(&mut b)?,
        _ if parallel::knows(b.hp) => parallel::build(&mut b)?,
        _ if style::style(b.hp).is_some() => decoder::build(&mut b)?,
        arch => return Err(Error::Unknown(arch.to_owned())),
    }
    if b.g.bytes() > MAX_BYTES {
        Err(Error::TooLarge)
    } else {
        Ok(b.g)
    }
}

/// A graph under construction, and what it is made from.
#[derive(Debug)]
pub struct Build<'a> {
    /// The graph.
    pub g: Graph,
    /// Hyper-parameters of the model.
    pub hp: &'a Hparams,
    /// The batch.
    pub batch: Batch,
    /// Attention is one fused node.
    pub flash_attention: bool,
    /// Where everything lies.
    pub setting: Setting<'a>,
    /// Leaves of the model's tensors that the graph has already.
    weights: Vec<Option<Id>>,
    tied_output: Option<Id>,
    /// RoPE factors on each backend.
    factors: Vec<(usize, Backend, Id)>,
    /// Keys and values of each layer's cache.
    cached: Vec<[Option<Id>; 2]>,
    /// What names of layers begin with.
    pub blocks: &'static str,
    /// Layers in the file; those beyond them are the same once more.
    pub blocks_in_file: usize,
    /// The embeddings of the batch, before they are scaled.
    pub input_embeddings: Option<Id>,
    /// Queries, keys and values are kept within bounds.
    bounded: bool,
}

/// Layers that the file has: fewer than the model, where it runs them several times.
fn blocks_in_file(hp: &Hparams) -> usize {
    let loops = match hp.arch() {
        "nanbeige" => hp.keys.opt("num_loops").ok().flatten().unwrap_or(1),
        _ => 1,
    };
    let loops = usize::try_from(loops).unwrap_or(usize::MAX);
    hp.n_layer_all.checked_div(loops).unwrap_or(1).max(1)
}

impl<'a> Build<'a> {
    fn new(setting: Setting<'a>, batch: Batch, flash_attention: bool) -> Build<'a> {
        let hp = &setting.model.hparams;
        Build {
            g: Graph::with_capacity(setting.model.tensors().len() * TENSORS_PER_WEIGHT),
            hp,
            batch,
            flash_attention,
            setting,
            weights: vec![None; setting.model.tensors().len()],
            tied_output: None,
            factors: Vec::new(),
            cached: vec![[None; 2]; hp.n_layer_all],
            blocks: "blk",
            blocks_in_file: blocks_in_file(hp),
            input_embeddings: None,
            bounded: hp.keys.float("attention.clamp_kqv").unwrap_or(0.0) > 0.0,
        }
    }

    fn index(&self, il: usize, name: &str, kind: &str) -> Option<usize> {
        let model = self.setting.model;
        model.find_in_layer(self.blocks, il % self.blocks_in_file, name, kind)
    }

    fn leaf(&mut self, index: usize) -> Option<Id> {
        if let Some(id) = self.weights.get(index).copied().flatten() {
            return Some(id);
        }
        let place = self.setting.placement.tensor(index)?;
        let id = self.tensor_at(index, place)?;
        *self.weights.get_mut(index)? = Some(id);
        Some(id)
    }

    /// A leaf for a tensor of the model at a place.
    fn tensor_at(&mut self, index: usize, place: Place) -> Option<Id> {
        let tensor = self.setting.model.tensors().get(index)?;
        let backend = self.setting.backend(place);
        Some(self.g.external(
            tensor.ty,
            &tensor.ne,
            Home {
                backend,
                weights: true,
            },
        ))
    }

    /// Whether layer `il` has `blk.{il}.{name}.{kind}`.
    pub fn has(&self, il: usize, name: &str, kind: &str) -> bool {
        self.index(il, name, kind).is_some()
    }

    /// The tensor `blk.{il}.{name}.{kind}`, if the model has it.
    pub fn find(&mut self, il: usize, name: &str, kind: &str) -> Option<Id> {
        let index = self.index(il, name, kind)?;
        self.leaf(index)
    }

    /// The tensor `blk.{il}.{name}.{kind}`.
    pub fn weight(&mut self, il: usize, name: &str, kind: &str) -> Result<Id, Error> {
        let found = self.find(il, name, kind);
        found.ok_or_else(|| Error::MissingTensor(format!("{}.{il}.{name}.{kind}", self.blocks)))
    }

    /// A tensor by its full name, if the model has it.
    pub fn find_global(&mut self, name: &str) -> Option<Id> {
        let index = self.setting.model.find(name)?;
        self.leaf(index)
    }

    /// A tensor by its full name.
    pub fn global(&mut self, name: &str) -> Result<Id, Error> {
        self.find_global(name)
            .ok_or_else(|| Error::MissingTensor(name.to_owned()))
    }

    /// The output matrix; the token table in the output layer's memory, if it is both.
    pub fn output_matrix(&mut self) -> Result<Id, Error> {
        if self.hp.arch() == "bitnet" {
            return self.global("token_embd.weight");
        }
        let Some(index) = self.setting.model.tied_output() else {
            return self.global("output.weight");
        };
        if let Some(id) = self.tied_output {
            return Ok(id);
        }
        let placement = self.setting.placement;
        let place = placement.redirect(index, placement.output());
        let id = if placement.tensor(index) == Some(place) {
            self.leaf(index)
        } else {
            self.tensor_at(index, place)
        };
        self.tied_output = id;
        id.ok_or_else(|| Error::MissingTensor("output.weight".to_owned()))
    }

    /// The factors of rotary positions that a layer uses, in its memory (`get_rope_factors`).
    pub fn rope_factors(&mut self, il: usize) -> Option<Id> {
        let (model, placement) = (self.setting.model, self.setting.placement);
        if !model.uses_rope_factors(il) {
            return None;
        }
        let index = model.find("rope_freqs.weight").or_else(|| {
            let original = self
                .hp
                .keys
                .opt("rope.scaling.original_context_length")
                .ok()
                .flatten();
            let original = original.unwrap_or(self.hp.n_ctx_train.into());
            let long = u64::from(self.setting.context.n_ctx_seq) > original;
            model.find(if long {
                "rope_factors_long.weight"
            } else {
                "rope_factors_short.weight"
            })
        })?;
        let place = placement.redirect(index, placement.layer(il));
        let backend = self.setting.backend(place);
        if let Some((_, _, id)) = self
            .factors
            .iter()
            .find(|(i, b, _)| (*i, *b) == (index, backend))
        {
            return Some(*id);
        }
        let id = self.tensor_at(index, place)?;
        self.factors.push((index, backend, id));
        Some(id)
    }

    /// The cache of keys that a layer reads, `[width, cells, streams]`; nothing for a layer without one.
    pub fn cached_keys(&mut self, il: usize) -> Result<Id, Error> {
        let ty = self.setting.cache.type_k;
        self.cached(il, 0, ty, |cache| cache.k_width)
    }

    /// The cache of values that a layer reads; where values are transposed, all layers are as wide as the widest.
    pub fn cached_values(&mut self, il: usize) -> Result<Id, Error> {
        let ty = self.setting.cache.type_v;
        self.cached(il, 1, ty, |cache| cache.v_width)
    }

    fn cached(
        &mut self,
        il: usize,
        which: usize,
        ty: GgmlType,
        width: fn(&fit::Cache) -> u64,
    ) -> Result<Id, Error> {
        let layers = &self.setting.cache.layers;
        let owner = layers.get(il).and_then(|layer| layer.shares).unwrap_or(il);
        let layer = layers.get(owner).ok_or(Error::NoCache(il))?;
        let cache = layer.attention.ok_or(Error::NoCache(il))?;
        if let Some(id) = self.cached[owner][which] {
            return Ok(id);
        }
        let ne = [width(&cache), cache.cells, cache.streams];
        let home = Home {
            backend: self.setting.backend(layer.place),
            weights: false,
        };
        let id = self.g.external(ty, &ne, home);
        self.cached[owner][which] = Some(id);
        Ok(id)
    }
}
