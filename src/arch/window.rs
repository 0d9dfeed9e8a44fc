use super::{ArchError, Keys, Value};

/// How a window bounds attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowShape {
    /// The last `n` tokens.
    Standard,
    /// Chunks of `n` tokens.
    Chunked,
    /// `n / 2` tokens on both sides.
    Symmetric,
}

/// Sliding-window attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens.
    pub size: u64,
    /// How it bounds.
    pub shape: WindowShape,
    /// Which layers use it.
    pub layers: Vec<bool>,
}

/// Where the size comes from.
enum Size {
    /// The key; without it or with 0 there is no window.
    Optional,
    /// The key, which must be there.
    Needed,
    /// The key, or this.
    Or(u64),
    /// This, whatever the key says, unless the key says 0.
    Fixed(u64),
    /// This where the key is there and not 0.
    FixedIfSet(u64),
}

/// Which layers use the window.
enum Layers {
    /// The header has an array, or a period, or this period; the last of each period is full.
    LastFull(usize),
    /// The same with the first of each period full.
    FirstFull(usize),
    /// The header must have an array.
    Listed,
    All,
    /// Those that are not recurrent.
    Attention,
}

/// The sliding window of an architecture: the `swa` lines of its `load_arch_hparams`. `n` is the number of layers, `n_all`
/// that with NextN layers.
pub(super) fn window(
    keys: &Keys,
    n: usize,
    n_all: usize,
    recurrent: &[bool],
) -> Result<Option<SlidingWindow>, ArchError> {
    use Layers::{All, Attention, FirstFull, LastFull, Listed};
    use Size::{Fixed, FixedIfSet, Needed, Optional, Or};
    let (size, layers) = match keys.arch() {
        "afmoe" | "mellum" | "olmo2" => (Optional, LastFull(4)),
        "cohere2" | "muse-glimmer" | "exaone-moe" => (Needed, LastFull(4)),
        "cohere2moe" => (Needed, FirstFull(4)),
        "exaone4" if n == 64 => (Or(4096), LastFull(4)),
        "deepseek4" => (Needed, All),
        "dflash" if keys.opt("hyper_connection.count")?.unwrap_or(0) > 0 => (Needed, All),
        "dflash" => (Optional, Listed),
        "gemma2" => (Or(4096), LastFull(2)),
        "gemma3" => (Optional, LastFull(6)),
        "gemma3n" => (Needed, LastFull(5)),
        "gemma-embedding" => (Needed, LastFull(6)),
        "gpt-oss" => (Needed, LastFull(2)),
        "laguna" => (Optional, FirstFull(4)),
        "lfm2" => (Optional, Attention),
        "llama4" => (Fixed(8192), LastFull(4)),
        "modern-bert" => (Optional, FirstFull(3)),
        "plamo3" => (Optional, LastFull(8)),
        "smallthinker" => (FixedIfSet(4096), FirstFull(4)),
        "dots3note" | "gemma4" | "gemma4-assistant" | "granite_swa" | "maple" | "mimo2"
        | "spark2_5" | "step35" => (Needed, Listed),
        _ => return Ok(None),
    };
    let key = keys.opt("attention.sliding_window")?;
    let size = match size {
        Optional => key.unwrap_or(0),
        Needed => keys.need("attention.sliding_window")?,
        Or(default) => key.unwrap_or(default),
        Fixed(size) => key.map_or(size, |k| size * u64::from(k > 0)),
        FixedIfSet(size) => key.map_or(0, |k| size * u64::from(k > 0)),
    };
    if size == 0 {
        return Ok(None);
    }
    let pattern = "attention.sliding_window_pattern";
    let period = |default: usize| -> Result<usize, ArchError> {
        let period = keys.opt(pattern)?;
        Ok(period.map_or(default, |p| usize::try_from(p).unwrap_or(usize::MAX)))
    };
    let repeat = |windowed: &dyn Fn(usize) -> bool| -> Vec<bool> {
        (0..n_all).map(|i| i < n && windowed(i)).collect()
    };
    let layers = match (layers, listed(keys, pattern, n_all)?) {
        (LastFull(_) | FirstFull(_) | Listed, Some(list)) => list,
        (LastFull(p), None) => {
            let p = period(p)?;
            repeat(&|i| p == 0 || i % p < p - 1)
        }
        (FirstFull(p), None) => {
            let p = period(p)?;
            repeat(&|i| p == 0 || i % p != 0)
        }
        (Listed, None) => return Err(ArchError::Missing(keys.full(pattern))),
        (All, _) => vec![true; n_all],
        (Attention, _) => repeat(&|i| recurrent.get(i) == Some(&false)),
    };
    let shape = match keys.arch() {
        "llama4" => WindowShape::Chunked,
        "gemma-embedding" | "modern-bert" => WindowShape::Symmetric,
        _ => WindowShape::Standard,
    };
    Ok(Some(SlidingWindow {
        size,
        shape,
        layers,
    }))
}

/// The array of a per-layer key; layers beyond its end are full, as llama.cpp leaves them.
fn listed(keys: &Keys, key: &str, n: usize) -> Result<Option<Vec<bool>>, ArchError> {
    match keys.get(key) {
        Some(Value::Ints(list)) => {
            let layers = (0..n).map(|i| list.get(i).is_some_and(|&x| x != 0));
            Ok(Some(layers.collect()))
        }
        Some(Value::Array(_)) => Err(ArchError::Type {
            key: keys.full(key),
            wanted: "an array of one flag per layer",
        }),
        _ => Ok(None),
    }
}
