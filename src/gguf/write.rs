use super::DEFAULT_ALIGNMENT;
use crate::units::align_up;

/// A key-value entry as it stands in a file.
pub type KvBytes = Vec<u8>;
/// A tensor info as it stands in a file.
pub type TensorInfo = Vec<u8>;

/// Encodes a tensor info. Trailing dimensions of 1 are dropped (one dimension stays), as ggml writes them.
pub fn tensor_info(name: &[u8], dims: &[u64], ty: u32, offset: u64) -> TensorInfo {
    let kept = dims
        .iter()
        .rposition(|&d| d != 1)
        .map_or(1, |last| last.saturating_add(1));
    let mut out = (name.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(name);
    // At most four dimensions: the reader refuses more.
    out.extend_from_slice(&(u32::try_from(kept).unwrap_or(4)).to_le_bytes());
    for i in 0..kept {
        out.extend_from_slice(&dims.get(i).copied().unwrap_or(1).to_le_bytes());
    }
    out.extend_from_slice(&ty.to_le_bytes());
    out.extend_from_slice(&offset.to_le_bytes());
    out
}

/// Length of a header that is being put together.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeaderSize {
    body: u64,
}

impl HeaderSize {
    /// Magic, version and the two counts.
    pub const FIXED: u64 = 4 + 4 + 8 + 8;

    /// Adds the bytes of an entry or info.
    pub fn add(&mut self, len: u64) -> Option<()> {
        self.body = self.body.checked_add(len)?;
        Some(())
    }

    /// Bytes before the padding.
    pub fn unpadded(self) -> Option<u64> {
        self.body.checked_add(Self::FIXED)
    }

    /// Bytes with the padding to `alignment`: where tensor data begins.
    pub fn padded(self, alignment: u64) -> Option<u64> {
        align_up(self.unpadded()?, alignment.max(1))
    }

    /// The fixed fields of a version 3 header.
    pub fn fixed(n_tensors: u64, n_kv: u64) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend_from_slice(&n_tensors.to_le_bytes());
        out.extend_from_slice(&n_kv.to_le_bytes());
        out
    }
}

const _: () = assert!(DEFAULT_ALIGNMENT.is_power_of_two());
