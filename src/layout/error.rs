use std::fmt::Debug;

/// Why no view can be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// `split.count` is a u16.
    #[error("the limit makes {0} shards; split.count ends at 65535: choose a larger one")]
    TooManyShards(usize),
    /// A tensor that fits no file of the wanted size.
    #[error("tensor {name:?} needs a file of {need} bytes, header included; the limit is {limit}")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// The smallest file that holds it.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// The metadata alone is over the limit; it cannot be divided.
    #[error("the metadata alone needs a file of {need} bytes; the limit is {limit}")]
    MetadataTooLarge {
        /// Bytes of a file with all KVs and no tensor.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// More bytes than a file can have.
    #[error("the view would be larger than a file can be")]
    Overflow,
    /// A value that does not fit its key.
    #[error("{0} tensors are more than split.tensors.count can hold")]
    TooManyTensors(u64),
}
