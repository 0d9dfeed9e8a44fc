//! A fit from beginning to end: what is asked for, the search, and what its line takes.

use super::{
    Bytes, Line, Machine, Measured, NoFit, Params, Place, Problem, Refusal, Request, SplitMode,
    measure, search,
};
use crate::arch::Model;

/// A second model on the same devices: a draft model, or the MTP blocks of the main one. Its context follows that of the main model.
#[derive(Debug, Clone)]
pub struct Extra<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its parameters, but for the context.
    pub params: Params,
    /// Whether its weights are those of the main model.
    pub shares_weights: bool,
}

/// What is to be fitted.
#[derive(Debug, Clone)]
pub struct Task<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its parameters as given.
    pub params: Params,
    /// The machine.
    pub machine: Machine,
    /// Bytes to leave free per device.
    pub margin: Vec<u64>,
    /// Context below which it is not reduced, per stream.
    pub n_ctx_min: u32,
    /// A second model.
    pub extra: Option<Extra<'a>>,
}

/// What a fit comes to.
#[derive(Debug, Clone)]
pub struct Fit {
    /// The arguments.
    pub line: Line,
    /// What the model takes with them, the second model included.
    pub measured: Measured,
}

impl Fit {
    /// Whether every device can hold its part; the margin may be missed.
    pub fn fits(&self, machine: &Machine) -> bool {
        fits(&self.measured, machine)
    }
}

/// Whether every device (or, without one, the host) can hold its part.
pub fn fits(measured: &Measured, machine: &Machine) -> bool {
    let breakdown = &measured.breakdown;
    if machine.devices.is_empty() {
        let total = machine.host.map_or(u64::MAX, |host| host.total);
        return breakdown.host.total() <= total;
    }
    let mut devices = machine.devices.iter().zip(&breakdown.devices);
    devices.all(|(device, bytes)| bytes.total() <= device.free)
}

impl<'a> Task<'a> {
    /// What a request asks for on a machine.
    ///
    /// # Errors
    /// An override, or a main device, that the machine has not.
    pub fn new(model: &'a Model, request: &Request, machine: Machine) -> Result<Task<'a>, String> {
        let devices = 0..machine.devices.len().max(1);
        let mut task = Task {
            model,
            params: request.params(&machine)?,
            margin: devices.map(|d| request.target(d)).collect(),
            n_ctx_min: request.n_ctx_min(),
            extra: None,
            machine,
        };
        if task.params.split_mode == SplitMode::None && !task.machine.devices.is_empty() {
            task.use_main_gpu()?;
        }
        Ok(task)
    }

    /// Plans for the main device alone, as llama.cpp does without a split.
    fn use_main_gpu(&mut self) -> Result<(), String> {
        let main = self.params.main_gpu;
        let device = self.machine.devices.get(main).cloned();
        let device = device.ok_or_else(|| format!("--main-gpu: device {main} does not exist"))?;
        self.machine.devices = vec![device];
        self.margin = self.margin.get(main).copied().into_iter().collect();
        self.params.main_gpu = 0;
        for o in &mut self.params.overrides {
            o.place = match o.place {
                Place::Device(d) if d == main => Place::Device(0),
                // What another device holds is not looked at.
                Place::Device(_) => Place::Device(usize::MAX),
                Place::Host => Place::Host,
            };
        }
        Ok(())
    }

    /// Adds a draft model beside the main one. As in the server it has its own defaults for layers and cache types, and
    /// one row of logits per sequence.
    pub fn with_draft(&mut self, draft: &'a Model) {
        let fresh = Params::default();
        let params = Params {
            n_gpu_layers: fresh.n_gpu_layers,
            overrides: fresh.overrides,
            type_k: fresh.type_k,
            type_v: fresh.type_v,
            n_outputs_max: self.params.n_seq.max(1),
            ..self.params.clone()
        };
        self.extra = Some(Extra {
            model: draft,
            params,
            shares_weights: false,
        });
    }

    /// Loads the model's own MTP blocks, with a context that drafts.
    pub fn with_mtp(&mut self) {
        self.params.mtp = true;
        let params = Params {
            mtp_context: true,
            n_outputs_max: self.params.n_seq.max(1),
            ..self.params.clone()
        };
        self.extra = Some(Extra {
            model: self.model,
            params,
            shares_weights: true,
        });
    }

    /// What the model takes with parameters, the second model included.
    ///
    /// # Errors
    /// [`Refusal`] where llama.cpp would not load it so.
    pub fn measure(&self, params: &Params) -> Result<Measured, Refusal> {
        let mut measured = measure(self.model, params, &self.machine)?;
        // As the peer does: a second model that cannot be measured is left out.
        if let Some(Ok(extra)) = self.measure_extra(params.n_ctx) {
            add(&mut measured, &extra);
        }
        Ok(measured)
    }

    fn measure_extra(&self, n_ctx: u32) -> Option<Result<Measured, Refusal>> {
        let extra = self.extra.as_ref()?;
        let params = Params {
            n_ctx,
            ..extra.params.clone()
        };
        let mut measured = measure(extra.model, &params, &self.machine);
        if let (Ok(measured), true) = (&mut measured, extra.shares_weights) {
            for bytes in &mut measured.breakdown.devices {
                bytes.model = 0;
            }
            measured.breakdown.host.model = 0;
        }
        Some(measured)
    }

    /// Fits the parameters to the machine.
    ///
    /// # Errors
    /// [`NoFit`] where `llama-fit-params` gives up.
    pub fn fit(&self) -> Result<Fit, NoFit> {
        let hp = &self.model.hparams;
        let layers = if self.params.mtp {
            hp.n_layer_all
        } else {
            hp.n_layer()
        };
        let problem = Problem {
            params: self.params.clone(),
            n_layer: u32::try_from(layers).unwrap_or(u32::MAX),
            n_ctx_train: hp.n_ctx_train,
            moe: hp.n_expert > 0,
            n_ctx_min: self.n_ctx_min,
            free: self.machine.devices.iter().map(|d| d.free).collect(),
            margin: self.margin.clone(),
            host_total: self.machine.host.map_or(0, |host| host.total),
        };
        // The context of the second model changes less often than the layers of the first.
        let mut extra: Option<(u32, Option<Measured>)> = None;
        let mut ask = |params: &Params| -> Result<Vec<Bytes>, Refusal> {
            let mut measured = measure(self.model, params, &self.machine)?;
            if extra
                .as_ref()
                .is_none_or(|(n_ctx, _)| *n_ctx != params.n_ctx)
            {
                let second = self.measure_extra(params.n_ctx).and_then(Result::ok);
                extra = Some((params.n_ctx, second));
            }
            if let Some((_, Some(second))) = &extra {
                add(&mut measured, second);
            }
            Ok(per_device(&measured))
        };
        let line = search(&problem, &mut ask)?;
        let measured = self.measure(&line.apply(&self.params))?;
        Ok(Fit { line, measured })
    }
}

/// Bytes per device; of the host where there is none.
fn per_device(measured: &Measured) -> Vec<Bytes> {
    let breakdown = &measured.breakdown;
    if breakdown.devices.is_empty() {
        vec![breakdown.host]
    } else {
        breakdown.devices.clone()
    }
}

fn add(to: &mut Measured, second: &Measured) {
    let pairs = to
        .breakdown
        .devices
        .iter_mut()
        .zip(&second.breakdown.devices);
    let hosts = (&mut to.breakdown.host, &second.breakdown.host);
    for (sum, more) in pairs.chain([hosts]) {
        sum.model = sum.model.saturating_add(more.model);
        sum.context = sum.context.saturating_add(more.context);
        sum.compute = sum.compute.saturating_add(more.compute);
    }
    if to.estimated.is_none() {
        to.estimated.clone_from(&second.estimated);
    }
}
