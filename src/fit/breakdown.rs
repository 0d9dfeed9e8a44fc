/// The three terms of llama.cpp's memory breakdown, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Weights.
    pub model: u64,
    /// KV caches and recurrent states.
    pub context: u64,
    /// Compute buffers.
    pub compute: u64,
}

impl Bytes {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.model
            .saturating_add(self.context)
            .saturating_add(self.compute)
    }
}

/// Memory per device and on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Per device.
    pub devices: Vec<Bytes>,
    /// All host buffers.
    pub host: Bytes,
}
