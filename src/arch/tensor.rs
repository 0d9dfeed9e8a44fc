use crate::gguf::{self, GgmlType};

/// What part of a model a tensor belongs to; llama.cpp places tensors by it (`LLM_TENSOR_INFOS` of `llama-arch.cpp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// An input table: always on the host.
    Input,
    /// Of a repeating layer, by its name or because the architecture makes it for the first one.
    Layer(usize),
    /// RoPE factors: copied to every device that has a layer which uses them.
    Rope,
    /// All else: with the output layer.
    Output,
    /// Not loaded.
    Unused,
}

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Extent per dimension.
    pub ne: [u64; 4],
    /// Bytes of its data.
    pub bytes: u64,
    /// Where it belongs.
    pub role: Role,
}

/// Bytes of `n` values of a type: whole blocks. 0 for a type that is not known.
pub fn row_size(ty: GgmlType, n: u64) -> u64 {
    ty.block()
        .map_or(0, |(values, bytes)| (n / values).saturating_mul(bytes))
}

impl Tensor {
    /// A tensor of a header; its role is decided by the architecture.
    pub(super) fn new(info: &gguf::Tensor) -> Tensor {
        let mut ne = [1; 4];
        for (to, from) in ne.iter_mut().zip(&info.dims) {
            *to = *from;
        }
        Tensor {
            name: String::from_utf8_lossy(&info.name).into_owned(),
            ty: info.ty,
            ne,
            bytes: info.len,
            role: Role::Output,
        }
    }

    /// Number of values.
    pub fn n_elements(&self) -> u64 {
        self.ne.iter().fold(1, |n, &e| n.saturating_mul(e))
    }
}

/// The layer of `blk.N.`, `enc.blk.N.` or `dec.blk.N.`.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    let rest = name
        .strip_prefix("enc.")
        .or_else(|| name.strip_prefix("dec."))
        .unwrap_or(name);
    let (number, _) = rest.strip_prefix("blk.")?.split_once('.')?;
    number.parse().ok()
}
