//! The parameters of a fit in llama.cpp's vocabulary (`common/arg.cpp`): names, values and defaults.

use super::{FlashAttn, Machine, Override, Params, SplitMode};
use crate::gguf::GgmlType;

const MIB: u64 = 1 << 20;
/// Batches beyond this are refused: nobody has them, and sizes stay within 64 bits.
const MAX_BATCH: u32 = 1 << 20;
/// The type names that llama.cpp takes for a cache.
const CACHE_TYPES: &[&str] = &[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1",
];

/// A flag of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag {
    /// Its long name, without dashes.
    pub name: &'static str,
    /// Other names, long or short, without dashes.
    pub aliases: &'static [&'static str],
    /// The name of its value, if it takes one.
    pub value: Option<&'static str>,
    /// What it does.
    pub help: &'static str,
}

const fn flag(
    name: &'static str,
    aliases: &'static [&'static str],
    value: Option<&'static str>,
    help: &'static str,
) -> Flag {
    Flag {
        name,
        aliases,
        value,
        help,
    }
}

/// All flags that decide about memory.
pub const FLAGS: &[Flag] = &[
    flag(
        "ctx-size",
        &["c"],
        Some("N"),
        "Context in tokens [default: what fits, up to what the model was trained on]; 0: the whole of that",
    ),
    flag(
        "batch-size",
        &["b"],
        Some("N"),
        "Logical batch in tokens [default: 2048]",
    ),
    flag(
        "ubatch-size",
        &["ub"],
        Some("N"),
        "Physical batch in tokens [default: 512]",
    ),
    flag("parallel", &["np"], Some("N"), "Parallel sequences"),
    flag("kv-unified", &["kvu"], None, "One cache for all sequences"),
    flag(
        "no-kv-unified",
        &["no-kvu"],
        None,
        "A cache for each sequence",
    ),
    flag(
        "cache-type-k",
        &["ctk"],
        Some("TYPE"),
        "Type of the keys in the cache [default: f16]",
    ),
    flag(
        "cache-type-v",
        &["ctv"],
        Some("TYPE"),
        "Type of the values in the cache [default: f16]",
    ),
    flag(
        "flash-attn",
        &["fa"],
        Some("on|off|auto"),
        "Flash attention [default: auto]",
    ),
    flag(
        "gpu-layers",
        &["ngl", "n-gpu-layers"],
        Some("N"),
        "Layers on devices, auto or all [default: auto]",
    ),
    flag(
        "split-mode",
        &["sm"],
        Some("none|layer"),
        "Spread the model over the devices [default: layer]",
    ),
    flag(
        "main-gpu",
        &["mg"],
        Some("INDEX"),
        "The device of --split-mode none [default: 0]",
    ),
    flag(
        "tensor-split",
        &["ts"],
        Some("N0,N1,…"),
        "Shares of the devices",
    ),
    flag(
        "override-tensor",
        &["ot"],
        Some("PATTERN=BUFFER,…"),
        "Where tensors go whose names match",
    ),
    flag("cpu-moe", &["cmoe"], None, "All experts on the host"),
    flag(
        "n-cpu-moe",
        &["ncmoe"],
        Some("N"),
        "The experts of the first N layers on the host",
    ),
    flag("no-kv-offload", &["nkvo"], None, "The cache on the host"),
    flag("kv-offload", &["kvo"], None, "The cache with its layers"),
    flag(
        "swa-full",
        &[],
        None,
        "A full cache for layers with a sliding window",
    ),
    flag(
        "no-op-offload",
        &[],
        None,
        "No operations of host layers on devices",
    ),
    flag(
        "op-offload",
        &[],
        None,
        "Large operations of host layers run on a device",
    ),
    flag(
        "fit-target",
        &["fitt"],
        Some("MiB,…"),
        "Margin to leave free per device, one value for all or a list [default: 1024]",
    ),
    flag(
        "fit-ctx",
        &["fitc"],
        Some("N"),
        "Never reduce the context below this [default: 4096]",
    ),
];

/// The flag of a name, long or short.
pub fn find_flag(name: &str) -> Option<&'static Flag> {
    FLAGS
        .iter()
        .find(|f| f.name == name || f.aliases.contains(&name))
}

/// What is to be fitted, as the user says it; names of buffers are resolved against a machine.
#[derive(Debug, Clone)]
pub struct Request {
    params: Params,
    overrides: Vec<(String, String)>,
    targets: Vec<u64>,
    n_ctx_min: u32,
}

impl Default for Request {
    /// The defaults of `llama-fit-params`: one sequence.
    fn default() -> Request {
        Request {
            params: Params::default(),
            overrides: Vec::new(),
            targets: vec![1024 * MIB],
            n_ctx_min: 4096,
        }
    }
}

impl Request {
    /// The defaults of `llama-server`: four sequences with one cache.
    pub fn server() -> Request {
        Request {
            params: Params {
                n_seq: 4,
                kv_unified: true,
                ..Params::default()
            },
            ..Request::default()
        }
    }

    /// Sets a flag by its long name.
    ///
    /// # Errors
    /// What is wrong with the value.
    pub fn set(&mut self, flag: &Flag, value: &str) -> Result<(), String> {
        let p = &mut self.params;
        let bad = |why: String| format!("--{}: {why}", flag.name);
        match flag.name {
            "ctx-size" => {
                p.n_ctx = number(value).map_err(bad)?;
                if p.n_ctx == 0 {
                    // The whole context is asked for: no reduction.
                    self.n_ctx_min = u32::MAX;
                }
            }
            "batch-size" => p.n_batch = batch(value).map_err(bad)?,
            "ubatch-size" => p.n_ubatch = batch(value).map_err(bad)?,
            "parallel" => p.n_seq = number(value).map_err(bad)?,
            "kv-unified" => p.kv_unified = true,
            "no-kv-unified" => p.kv_unified = false,
            "cache-type-k" => p.type_k = cache_type(value).map_err(bad)?,
            "cache-type-v" => p.type_v = cache_type(value).map_err(bad)?,
            "flash-attn" => p.flash_attn = flash_attn(value).map_err(bad)?,
            "gpu-layers" => {
                p.n_gpu_layers = match value {
                    "auto" => -1,
                    "all" => -2,
                    n => n
                        .parse()
                        .map_err(|_| bad(format!("{n:?} is no number, auto or all")))?,
                }
            }
            "split-mode" => {
                p.split_mode = match value {
                    "none" => SplitMode::None,
                    "layer" => SplitMode::Layer,
                    "row" | "tensor" => {
                        return Err(bad(format!("{value} is not planned for: layer or none")));
                    }
                    _ => return Err(bad(format!("{value:?} is not none or layer"))),
                }
            }
            "main-gpu" => p.main_gpu = number(value).map_err(bad)? as usize,
            "tensor-split" => p.tensor_split = shares(value).map_err(bad)?,
            "override-tensor" => self.overrides.extend(pairs(value).map_err(bad)?),
            "cpu-moe" => self.overrides.push((experts(""), "CPU".to_owned())),
            "n-cpu-moe" => {
                let n = number(value).map_err(bad)?;
                if u64::from(n) > crate::arch::MAX_LAYERS {
                    return Err(bad(format!("{n} layers are more than a model can have")));
                }
                let layers = (0..n).map(|il| experts(&format!(r"blk\.{il}")));
                self.overrides.extend(layers.map(|e| (e, "CPU".to_owned())));
            }
            "no-kv-offload" => p.kv_offload = false,
            "kv-offload" => p.kv_offload = true,
            "swa-full" => p.swa_full = true,
            "no-op-offload" => p.op_offload = false,
            "op-offload" => p.op_offload = true,
            "fit-target" => {
                let mib = |part: &str| Ok(u64::from(number(part)?) * MIB);
                let list: Result<_, String> = split(value).map(mib).collect();
                self.targets = list.map_err(bad)?;
            }
            "fit-ctx" => self.n_ctx_min = number(value).map_err(bad)?,
            name => return Err(format!("--{name} is not known")),
        }
        Ok(())
    }

    /// The parameters for a machine.
    ///
    /// # Errors
    /// An override with a pattern that is none, or a buffer that the machine has not.
    pub fn params(&self, machine: &Machine) -> Result<Params, String> {
        let mut params = self.params.clone();
        for (pattern, buffer) in &self.overrides {
            let place = machine.place(buffer).ok_or_else(|| {
                let names = machine.devices.iter().map(|d| d.name.as_str());
                let names: Vec<_> = ["CPU"].into_iter().chain(names).collect();
                let names = names.join(", ");
                format!("--override-tensor: no buffer {buffer:?}; there are {names}")
            })?;
            let made = Override::regex(pattern, place);
            params
                .overrides
                .push(made.map_err(|why| format!("--override-tensor: {why}"))?);
        }
        Ok(params)
    }

    /// Bytes to leave free on a device. One value is for all; behind a list stands the default.
    pub fn target(&self, device: usize) -> u64 {
        match self.targets.as_slice() {
            [one] => *one,
            list => list.get(device).copied().unwrap_or(1024 * MIB),
        }
    }

    /// The context below which it is not reduced, per stream.
    pub fn n_ctx_min(&self) -> u32 {
        self.n_ctx_min
    }

    /// Sequences that share the device, and whether they share a cache.
    pub fn sequences(&self) -> (u32, bool) {
        (self.params.n_seq, self.params.kv_unified)
    }
}

fn number(text: &str) -> Result<u32, String> {
    let n = text.parse::<u32>().ok().filter(|&n| n <= i32::MAX as u32);
    n.ok_or_else(|| format!("{text:?} is no number from 0 to {}", i32::MAX))
}

fn batch(text: &str) -> Result<u32, String> {
    let n = number(text)?;
    if n > MAX_BATCH {
        return Err(format!("{n} is more than {MAX_BATCH}"));
    }
    Ok(n)
}

fn cache_type(text: &str) -> Result<GgmlType, String> {
    let known = CACHE_TYPES.contains(&text).then_some(text);
    let ty = known.and_then(GgmlType::from_name);
    ty.ok_or_else(|| format!("{text:?} is none of {}", CACHE_TYPES.join(", ")))
}

fn flash_attn(text: &str) -> Result<FlashAttn, String> {
    match text {
        "on" | "enabled" | "true" | "1" => Ok(FlashAttn::On),
        "off" | "disabled" | "false" | "0" => Ok(FlashAttn::Off),
        "auto" | "-1" => Ok(FlashAttn::Auto),
        _ => Err(format!("{text:?} is not on, off or auto")),
    }
}

/// The parts of a list: commas or slashes stand between.
fn split(list: &str) -> impl Iterator<Item = &str> {
    list.split([',', '/']).filter(|part| !part.is_empty())
}

fn shares(list: &str) -> Result<Vec<f32>, String> {
    let share = |part: &str| {
        let share = part.parse::<f32>().ok();
        let share = share.filter(|s| s.is_finite() && *s >= 0.0);
        share.ok_or_else(|| format!("{part:?} is no share"))
    };
    split(list).map(share).collect()
}

fn pairs(list: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |item: &str| {
        let (pattern, buffer) = item
            .split_once('=')
            .ok_or_else(|| format!("{item:?} is no PATTERN=BUFFER"))?;
        Ok((pattern.to_owned(), buffer.to_owned()))
    };
    list.split(',').map(pair).collect()
}

/// The pattern of the experts of a layer, or of all (`LLM_FFN_EXPS_REGEX`).
fn experts(layer: &str) -> String {
    format!(r"{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps")
}
