use std::collections::HashMap;

use super::tensor::layer_of;
use super::{ArchError, Hparams, Keys, Role, Tensor};
use crate::gguf::Header;

/// A model as llama.cpp sees it: hyper-parameters and tensors.
#[derive(Debug, Clone)]
pub struct Model {
    /// Hyper-parameters.
    pub hparams: Hparams,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    layers: Vec<Layer>,
}

/// The tensors of a layer by the parts of their names, in order, and their places: what follows the layer's number up to
/// the last dot, what follows that, and what is before the number.
type Layer = Vec<((String, String, String), usize)>;

/// The tensors of each layer.
fn layers(tensors: &[Tensor], n: usize) -> Vec<Layer> {
    let mut layers = vec![Layer::new(); n];
    for (i, tensor) in tensors.iter().enumerate() {
        let Some(il) = layer_of(&tensor.name) else {
            continue;
        };
        let parts = tensor.name.split_once(&format!(".{il}."));
        if let (Some(layer), Some((blocks, rest))) = (layers.get_mut(il), parts) {
            let (name, kind) = rest.rsplit_once('.').unwrap_or((rest, ""));
            layer.push(((name.to_owned(), kind.to_owned(), blocks.to_owned()), i));
        }
    }
    layers.iter_mut().for_each(|layer| layer.sort_unstable());
    layers
}

impl Model {
    /// Reads a model from the headers of its shards: keys of the first, tensors of all.
    ///
    /// # Errors
    /// [`ArchError`] for what llama.cpp would refuse, as far as memory depends on it.
    pub fn new(headers: &[Header]) -> Result<Model, ArchError> {
        let first = headers
            .first()
            .ok_or(ArchError::MissingTensor("token_embd.weight"))?;
        let keys = Keys::new(first)?;
        let infos = headers.iter().flat_map(|h| h.tensors());
        let mut tensors: Vec<Tensor> = infos.map(Tensor::new).collect();
        for t in &tensors {
            if t.ty.block().is_none() {
                return Err(ArchError::TensorType {
                    name: t.name.clone(),
                    ty: t.ty.name(),
                });
            }
        }
        let names = tensors.iter().enumerate();
        let by_name: HashMap<String, usize> = names.map(|(i, t)| (t.name.clone(), i)).collect();
        let hparams = Hparams::new(keys, &|name| by_name.contains_key(name))?;
        for t in &mut tensors {
            t.role = role(&hparams, &t.name);
        }
        Ok(Model {
            layers: layers(&tensors, hparams.n_layer_all),
            hparams,
            tensors,
            by_name,
        })
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The place of a tensor in [`Model::tensors`].
    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The place of `{blocks}.{il}.{name}.{kind}` in [`Model::tensors`].
    pub fn find_in_layer(&self, blocks: &str, il: usize, name: &str, kind: &str) -> Option<usize> {
        let layer = self.layers.get(il)?;
        let at = layer.binary_search_by(|((n, k, b), _)| {
            (n.as_str(), k.as_str(), b.as_str()).cmp(&(name, kind, blocks))
        });
        at.ok().and_then(|at| layer.get(at)).map(|(_, i)| *i)
    }

    /// A tensor by its name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(self.find(name)?)
    }

    /// The token table, where it is the output matrix too: llama.cpp makes it a second time for the output layer.
    pub fn tied_output(&self) -> Option<usize> {
        let untied = matches!(
            self.hparams.arch(),
            "bert"
                | "nomic-bert"
                | "nomic-bert-moe"
                | "modern-bert"
                | "jina-bert-v2"
                | "jina-bert-v3"
                | "neo-bert"
                | "eurobert"
                | "clef"
                | "wavtokenizer-dec"
                | "eagle3"
                | "bitnet"
        );
        if untied || self.find("output.weight").is_some() {
            return None;
        }
        self.find("token_embd.weight")
    }

    /// Whether a layer uses the shared RoPE factors, and so has them on its device.
    pub fn uses_rope_factors(&self, il: usize) -> bool {
        let full_only = matches!(self.hparams.arch(), "gemma4" | "gemma4-assistant");
        !(full_only && self.hparams.is_swa(il))
    }
}

/// What part of the model a tensor belongs to, by its name: `LLM_TENSOR_INFOS`, and what `load_arch_tensors` asks for with layer 0.
fn role(hparams: &Hparams, name: &str) -> Role {
    if name.contains(".cross_attn_rel_b.") {
        return Role::Unused;
    }
    if let Some(il) = layer_of(name) {
        return Role::Layer(il);
    }
    let output_norm = matches!(hparams.arch(), "lfm2" | "lfm2moe");
    match name.split('.').next().unwrap_or_default() {
        "token_embd" | "position_embd" | "token_types" | "per_layer_token_embd" => Role::Input,
        "token_embd_norm" if output_norm => Role::Output,
        "token_embd_norm" | "per_layer_model_proj" | "per_layer_proj_norm" | "hrm" => {
            Role::Layer(0)
        }
        "rope_freqs" | "rope_factors_long" | "rope_factors_short" => Role::Rope,
        "masked_embd_centroids" | "masked_embd_ordering" => Role::Unused,
        _ => Role::Output,
    }
}

/// Bytes that a multimodal projector takes on the first device: its weights, and an estimate of its compute buffer on
/// the safe side, for the largest picture that it takes in one piece (`clip_get_mem_usage` of llama.cpp measures it).
///
/// # Errors
/// When the file is no projector.
pub fn projector_bytes(headers: &[Header]) -> Result<u64, ArchError> {
    /// Patches of a picture where the header does not bound them.
    const PATCHES: u64 = 16384;
    let first = headers
        .first()
        .ok_or(ArchError::MissingTensor("a projector's"))?;
    let keys = Keys::new(first)?;
    if keys.arch() != "clip" {
        return Err(ArchError::Type {
            key: "general.architecture".to_owned(),
            wanted: "clip, as in a projector",
        });
    }
    let infos = headers.iter().flat_map(|h| h.tensors());
    let weights = infos.fold(0u64, |sum, t| sum.saturating_add(t.len));
    let dim = |key: &str| Ok(keys.opt_dim(key)?.unwrap_or(0));
    let (size, patch) = (dim("vision.image_size")?, dim("vision.patch_size")?);
    let patches = match size.checked_div(patch) {
        // Pictures of their own size are bounded by other keys, or by none.
        None | Some(0) => PATCHES,
        Some(side) => side.saturating_mul(side).max(PATCHES / 4),
    };
    let width = dim("vision.embedding_length")?.max(dim("audio.embedding_length")?);
    let inner = dim("vision.feed_forward_length")?.max(dim("audio.feed_forward_length")?);
    // Residual, norm, queries, keys, values and attention, or the two products of a feed-forward network.
    let per_patch = (6 * width).max(2 * width + 2 * inner).saturating_mul(4);
    Ok(weights.saturating_add(patches.saturating_mul(per_patch)))
}
