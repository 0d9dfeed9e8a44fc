/// Why bytes are no GGUF header: where, and what is wrong there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at byte {offset}: {problem}")]
pub struct Error {
    /// Offset in the file.
    pub offset: u64,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with a header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Problem {
    #[error("the file has no bytes")]
    Empty,
    #[error("not a GGUF file (it begins with {0})")]
    Magic(String),
    #[error("a git-lfs pointer, not the model: fetch it with `git lfs pull`")]
    LfsPointer,
    #[error(
        "big-endian GGUF, which llama.cpp on this machine cannot load either; convert it first"
    )]
    BigEndian,
    #[error(
        "GGUF version {0} is not supported (2 and 3 are); convert the file with a current llama.cpp"
    )]
    Version(u32),
    #[error("the file ends inside its header: {what} needs {need} more bytes, {have} remain")]
    Truncated {
        what: &'static str,
        need: u64,
        have: u64,
    },
    #[error("{what} is {value}, more than the rest of the file can hold or llama.cpp accepts")]
    Count { what: &'static str, value: u64 },
    #[error("key {key:?} has the unknown value type {value}")]
    ValueType { key: String, value: u32 },
    #[error("key {0:?} appears twice")]
    DuplicateKey(String),
    #[error("tensor {0:?} appears twice")]
    DuplicateTensor(String),
    #[error("general.alignment is {0}, not a u32 power of two")]
    Alignment(String),
    #[error("tensor {name:?}: {reason}")]
    Tensor { name: String, reason: String },
}

impl Error {
    pub(super) fn at(offset: usize, problem: Problem) -> Error {
        Error {
            offset: offset as u64,
            problem,
        }
    }
}
