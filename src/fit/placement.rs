use super::{Machine, Override, Params, Place, Refusal, SplitMode};
use crate::arch::{Hparams, Model, Role, Tensor};

/// Which device, or the host, each layer and tensor goes to (`llama_model_base::load_tensors`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    layers: Vec<Place>,
    output: Place,
    /// Per tensor: where an override sends it.
    overridden: Vec<Option<Place>>,
    /// Per tensor: where it goes without one.
    home: Vec<Option<Place>>,
    n_devices: usize,
}

impl Placement {
    /// Places a model.
    ///
    /// # Errors
    /// When a split leaves no device for a layer, or the main device does not exist.
    pub fn new(model: &Model, params: &Params, machine: &Machine) -> Result<Placement, Refusal> {
        let hp = &model.hparams;
        let layers = layers(hp.n_layer_all, params, machine)?;
        let output = layers.last().copied().unwrap_or(Place::Host);
        let layer = |il: usize| layers.get(il).copied().unwrap_or(Place::Host);
        let home = |t: &Tensor| match t.role {
            Role::Layer(_) | Role::Output if !runs_on_device(hp, t) => Some(Place::Host),
            Role::Input => Some(Place::Host),
            Role::Layer(il) if il < hp.n_layer() || params.mtp => Some(layer(il)),
            Role::Layer(_) if hp.n_layer_nextn == 0 => Some(Place::Host),
            Role::Rope | Role::Output => Some(output),
            Role::Layer(_) | Role::Unused => None,
        };
        let first_match = |name: &str| {
            let hit = params.overrides.iter().find(|o| o.matches(name));
            hit.map(|o: &Override| o.place)
        };
        let tensors = model.tensors();
        Ok(Placement {
            home: tensors.iter().map(home).collect(),
            overridden: tensors.iter().map(|t| first_match(&t.name)).collect(),
            output,
            layers,
            n_devices: machine.devices.len(),
        })
    }

    /// The place of a layer, whatever overrides say of its tensors: where its cache lies.
    pub fn layer(&self, il: usize) -> Place {
        self.layers.get(il).copied().unwrap_or(Place::Host)
    }

    /// The place of the output layer.
    pub fn output(&self) -> Place {
        self.output
    }

    /// The place of a tensor by its number in the model; `None` if it is not loaded.
    pub fn tensor(&self, index: usize) -> Option<Place> {
        let home = self.home.get(index).copied().flatten()?;
        Some(self.redirect(index, home))
    }

    /// The place of a tensor that is made for the layer at `home`.
    pub fn redirect(&self, index: usize, home: Place) -> Place {
        self.overridden
            .get(index)
            .copied()
            .flatten()
            .unwrap_or(home)
    }

    /// Whether every layer and the output are on devices.
    pub fn all_offloaded(&self) -> bool {
        self.layers.iter().all(|&place| place != Place::Host)
    }

    /// Number of devices.
    pub fn n_devices(&self) -> usize {
        self.n_devices
    }
}

/// Whether a device has the operation that reads a tensor; what it has not stays on the host (`weight_buft_supported`).
fn runs_on_device(hp: &Hparams, t: &Tensor) -> bool {
    let [width, rows, ..] = t.ne;
    let ssm = hp.ssm;
    let scans = matches!(
        hp.arch(),
        "mamba"
            | "mamba2"
            | "jamba"
            | "falcon-h1"
            | "plamo2"
            | "granitehybrid"
            | "nemotron_h"
            | "nemotron_h_moe"
    );
    match t
        .name
        .rsplit_once("blk.")
        .and_then(|(_, rest)| rest.split_once('.'))
    {
        // The decay of a state space model: the kernels have few sizes.
        Some((_, "ssm_a")) if scans => {
            let head = ssm.d_inner.checked_div(rows).unwrap_or(0);
            if width == 1 {
                matches!(ssm.d_state, 96 | 128 | 256) && head % 16 == 0
            } else {
                width == 16 && head == 1 && rows % 128 == 0 && ssm.n_group <= 1
            }
        }
        Some((_, "ssm_conv1d.weight" | "shortconv.conv.weight")) => rows % 128 == 0,
        _ => true,
    }
}

/// The places of all layers and, last, of the output layer.
fn layers(n: usize, params: &Params, machine: &Machine) -> Result<Vec<Place>, Refusal> {
    let n_devices = machine.devices.len();
    if n_devices == 0 {
        return Ok(vec![Place::Host; n + 1]);
    }
    let all = n + 1;
    let on_devices = usize::try_from(params.n_gpu_layers).map_or(all, |ngl| ngl.min(all));
    let first = all - on_devices;
    if params.split_mode == SplitMode::None {
        if params.main_gpu >= n_devices {
            return Err(Refusal::Device(params.main_gpu));
        }
        let place = |il| {
            if il < first {
                Place::Host
            } else {
                Place::Device(params.main_gpu)
            }
        };
        return Ok((0..all).map(place).collect());
    }
    let ends = split_ends(params, machine);
    let place = |il: usize| {
        if il < first {
            return Ok(Place::Host);
        }
        // Single precision, as llama.cpp computes it: with splits like 7,9,5 layers move otherwise.
        let at = (il - first) as f32 / on_devices as f32;
        let device = ends.iter().position(|&end| at < end);
        device.map(Place::Device).ok_or(Refusal::Split(il))
    };
    (0..all).map(place).collect()
}

/// Where each device's share of the layers ends, between 0 and 1.
fn split_ends(params: &Params, machine: &Machine) -> Vec<f32> {
    // Where that is not known such devices get equal shares.
    let host = machine.host.map_or(1, |host| host.free);
    let share = |(d, device): (usize, &super::Device)| {
        if params.has_split() {
            params.tensor_split.get(d).copied().unwrap_or(0.0)
        } else if device.free == 0 && device.total == 0 {
            host as f32
        } else {
            device.free as f32
        }
    };
    let mut sum = 0.0f32;
    let shares = machine.devices.iter().enumerate().map(share);
    let sums: Vec<f32> = shares
        .map(|share| {
            sum += share;
            sum
        })
        .collect();
    sums.iter().map(|end| end / sum).collect()
}
