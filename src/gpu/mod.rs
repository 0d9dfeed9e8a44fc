//! Facts about this machine: GPUs with total and free memory, and host memory, as llama.cpp sees them.
//!
//! A [`Prober`] answers. It asks each driver in a short-lived child process with a deadline, so that a driver that is
//! missing, broken, hanging or crashing is a [`Reason`] in the answer and nothing worse. [`probe_here`] is what the child
//! does: only there is a driver loaded.

mod amd;
mod child;
mod cuda;
mod host;
mod probe;
mod visible;

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use probe::Prober;

/// How long a probe may take.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// The verb of the command that answers with the JSON of [`probe_here`]; its argument is [`Backend::verb_arg`].
pub const VERB: &str = "probe-gpus";

/// Which llama.cpp backend a device belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Backend {
    /// NVIDIA, asked through the CUDA driver.
    #[serde(rename = "CUDA")]
    Cuda,
    /// AMD, read from sysfs.
    #[serde(rename = "ROCm")]
    Rocm,
}

impl Backend {
    /// All, in the order in which llama.cpp registers them.
    pub const ALL: [Backend; 2] = [Backend::Cuda, Backend::Rocm];

    /// The prefix of device names: `CUDA0`, `ROCm0` (ggml-cuda.h `GGML_CUDA_NAME`).
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cuda => "CUDA",
            Backend::Rocm => "ROCm",
        }
    }

    /// The argument of [`VERB`].
    pub fn verb_arg(self) -> &'static str {
        match self {
            Backend::Cuda => "cuda",
            Backend::Rocm => "rocm",
        }
    }
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As llama.cpp names it: `CUDA0`.
    pub name: String,
    /// What the driver calls it: `NVIDIA H200`.
    pub description: String,
    /// Of which backend of llama.cpp.
    pub backend: Backend,
    /// Address on the PCI bus, `0000:c1:00.0`, if known.
    pub pci: Option<String>,
    /// Bytes; 0 together with `free` when they cannot be told: llama.cpp puts nothing on such a device.
    pub total: u64,
    /// Bytes that can be had now.
    pub free: u64,
    /// A part of the processor, as opposed to a card of its own.
    pub integrated: bool,
    /// Its memory is host memory: what it takes, the host lacks.
    pub unified: bool,
    /// How this was found out.
    pub found: String,
    /// Why a figure is missing.
    pub problem: Option<String>,
}

/// Memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Bytes of RAM, as sysconf counts it. Without a GPU llama.cpp takes all of it for free
    /// (ggml-cpu.cpp, `ggml_backend_cpu_device_get_memory`).
    pub total: u64,
    /// Bytes that programs can get without swapping (`MemAvailable`), if known.
    pub available: Option<u64>,
}

/// Why something was not found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// Who has it: `CUDA`, `ROCm` or `host`.
    pub source: String,
    /// In words.
    pub text: String,
}

impl Reason {
    fn new(source: &str, text: String) -> Reason {
        Reason {
            source: source.to_owned(),
            text,
        }
    }
}

/// What one backend has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// In llama.cpp's order.
    pub devices: Vec<Device>,
    /// Why there are none, or not all.
    pub reasons: Vec<Reason>,
}

/// A machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// All GPUs, CUDA's first.
    pub devices: Vec<Device>,
    /// Host memory.
    pub host: Host,
    /// What was not found, and why.
    pub reasons: Vec<Reason>,
}

impl Found {
    fn nothing(backend: Backend, why: String) -> Found {
        Found {
            devices: Vec::new(),
            reasons: vec![Reason::new(backend.name(), why)],
        }
    }
}

impl Machine {
    /// The devices that llama.cpp takes when it is not told which (llama.cpp, `llama_prepare_model_devices`): discrete ones,
    /// and integrated ones only if there is no other. A build has one of the two backends as a rule, so it is those of
    /// the first backend that has any.
    pub fn used(&self) -> Vec<&Device> {
        let of = |integrated, backend| -> Vec<&Device> {
            let mine = |d: &&Device| d.integrated == integrated && d.backend == backend;
            self.devices.iter().filter(mine).collect()
        };
        [false, true]
            .into_iter()
            .flat_map(|integrated| Backend::ALL.map(|backend| of(integrated, backend)))
            .find(|devices| !devices.is_empty())
            .unwrap_or_default()
    }
}

/// The environment variables that say which devices llama.cpp sees. The caller reads them.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `CUDA_VISIBLE_DEVICES`. The CUDA driver reads it itself; HIP does where `HIP_VISIBLE_DEVICES` says nothing.
    pub cuda_visible_devices: Option<String>,
    /// `HIP_VISIBLE_DEVICES`.
    pub hip_visible_devices: Option<String>,
    /// `ROCR_VISIBLE_DEVICES`.
    pub rocr_visible_devices: Option<String>,
    /// `GGML_CUDA_DEVICES`: so many devices, emulated on those that are there.
    pub ggml_cuda_devices: Option<String>,
    /// Whether `GGML_CUDA_ENABLE_UNIFIED_MEMORY` is set: then CUDA devices have what the host has available.
    pub unified_memory: bool,
}

/// Asks one backend in this process. For the child of a [`Prober`]: it loads the driver, which may do anything. `/sys` and
/// `/proc` are looked for in `root`.
pub fn probe_here(backend: Backend, root: &Path, environment: &Environment) -> Found {
    child::end_by_itself();
    let (physical, mut reasons) = match backend {
        Backend::Cuda => cuda::probe(root, environment),
        Backend::Rocm => amd::probe(root, environment),
    };
    let (devices, more) = visible::emulated(physical, environment.ggml_cuda_devices.as_deref());
    reasons.extend(more);
    let reason = |text| Reason::new(backend.name(), text);
    Found {
        devices,
        reasons: reasons.into_iter().map(reason).collect(),
    }
}
