//! The search of `common/fit.cpp`: the context is reduced first, then layers fill the devices back to front, and at last
//! experts come back to the front. Steps, roundings and comparisons are the peer's, so that the line is.

use super::{Bytes, Fraction, Line, Override, Params, Place, Refusal};

/// Contexts are rounded down to this many tokens per stream.
const CONTEXT_STEP: u32 = 256;
/// llama.cpp's `llama_max_tensor_buft_overrides`.
const MAX_OVERRIDES: usize = 4096;

/// What the search asks of the memory model: bytes per device with parameters.
pub type Measure<'a> = dyn FnMut(&Params) -> Result<Vec<Bytes>, Refusal> + 'a;

/// What the search works with.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The parameters as given.
    pub params: Params,
    /// Layers, without NextN layers unless they are loaded.
    pub n_layer: u32,
    /// Context the model was trained on.
    pub n_ctx_train: u32,
    /// Whether it is a mixture of experts.
    pub moe: bool,
    /// Context below which it is not reduced, per stream.
    pub n_ctx_min: u32,
    /// Bytes free per device.
    pub free: Vec<u64>,
    /// Bytes to leave free per device.
    pub margin: Vec<u64>,
    /// Bytes of host memory, for a machine without devices.
    pub host_total: u64,
}

/// Why there is no line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum NoFit {
    #[error("n_gpu_layers already set by user to {0}")]
    LayersSet(i32),
    #[error("tensor_split already set by user")]
    SplitSet,
    #[error("tensor_buft_overrides already set by user")]
    OverridesSet,
    #[error("was unable to fit model into system memory by reducing context")]
    SystemMemory,
    #[error("{MAX_OVERRIDES} tensor overrides are not enough for this model")]
    TooManyOverrides,
    #[error("{0}")]
    Refused(#[from] Refusal),
}

/// Layers of one device. The peer counts in 32 bits that wrap, and takes a partial layer from a device that has none: the
/// count is then one below zero until another device is filled, and so it is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    /// All.
    layers: u32,
    /// Those that are not whole, the first ones.
    partial: u32,
    /// What the first of those keeps; the others keep all but the experts.
    keeps: Fraction,
}

impl Share {
    fn full(self) -> u32 {
        self.layers.wrapping_sub(self.partial)
    }
}

/// A distribution of layers over devices.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shares {
    devices: Vec<Share>,
    /// Where the first partial layer of a device overflows to.
    overflow: Vec<Place>,
}

struct Search<'a, 'm> {
    problem: &'a Problem,
    measure: &'a mut Measure<'m>,
    n_ctx: u32,
    targets: Vec<i64>,
}

fn bytes(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn totals(memory: &[Bytes]) -> Vec<i64> {
    memory.iter().map(|b| bytes(b.total())).collect()
}

fn sum(list: impl IntoIterator<Item = i64>) -> i64 {
    list.into_iter().fold(0, i64::saturating_add)
}

fn at(list: &[i64], i: usize) -> i64 {
    list.get(i).copied().unwrap_or(0)
}

/// Finds the parameters that `llama-fit-params` finds.
///
/// # Errors
/// [`NoFit`] where the peer gives up. Success does not mean that the result fits: the peer does not check the last state either.
pub fn search(problem: &Problem, measure: &mut Measure<'_>) -> Result<Line, NoFit> {
    let n_ctx = match reduce_context(problem, measure)? {
        Context::Final(n_ctx) => return Ok(Line::unchanged(&problem.params, n_ctx)),
        Context::Next(n_ctx) => n_ctx,
    };
    let params = &problem.params;
    let n_devices = problem.free.len();
    if n_devices == 0 {
        return Err(NoFit::SystemMemory);
    }
    if params.n_gpu_layers != -1 {
        return Err(NoFit::LayersSet(params.n_gpu_layers));
    }
    if n_devices > 1 && params.has_split() {
        return Err(NoFit::SplitSet);
    }
    if !params.overrides.is_empty() {
        return Err(NoFit::OverridesSet);
    }
    let targets = problem.free.iter().zip(&problem.margin);
    let mut search = Search {
        targets: targets.map(|(&f, &m)| bytes(f) - bytes(m)).collect(),
        problem,
        measure,
        n_ctx,
    };
    let shares = search.distribute()?;
    search.line(&shares)
}

enum Context {
    /// Nothing else is to be done.
    Final(u32),
    /// Go on with this one.
    Next(u32),
}

/// Steps 1 and 2 of the peer: everything as given, then less context.
fn reduce_context(p: &Problem, measure: &mut Measure<'_>) -> Result<Context, Refusal> {
    let streams = p.params.n_streams();
    let auto = p.params.n_ctx == 0;
    let n_ctx_max = p.n_ctx_train.saturating_mul(streams);
    let n_ctx_min = p.n_ctx_min.saturating_mul(streams);
    let mut at_context = |n_ctx| {
        measure(&Params {
            n_ctx,
            ..p.params.clone()
        })
    };
    let n_ctx = if auto { n_ctx_max } else { p.params.n_ctx };
    let full = at_context(n_ctx)?;
    let used = totals(&full);
    let (free, margin): (Vec<i64>, Vec<i64>) = if p.free.is_empty() {
        let margin = p.margin.first().copied().unwrap_or(0);
        (vec![bytes(p.host_total)], vec![bytes(margin)])
    } else {
        let list = |list: &[u64]| list.iter().map(|&n| bytes(n)).collect();
        (list(&p.free), list(&p.margin))
    };
    let left = |d: usize| at(&free, d) - at(&used, d);
    if (0..free.len()).all(|d| left(d) >= at(&margin, d)) {
        return Ok(Context::Final(n_ctx));
    }
    let sum_used = sum(used.iter().copied());
    let sum_free = sum(free.iter().copied());
    let mut target = sum_free - sum(margin.iter().copied());
    if target - sum_used >= 0 || !auto || n_ctx_max <= n_ctx_min {
        return Ok(Context::Next(n_ctx));
    }
    let n_devices = bytes(p.free.len() as u64);
    if n_devices > 1 {
        // Only whole layers, or a third of one with experts, can be moved: half of one is lost per device.
        let model = sum(full.iter().map(|b| bytes(b.model)));
        // -1 is cast to a large number there.
        let layers = (p.params.n_gpu_layers as u32).min(p.n_layer).max(1);
        target -= (n_devices + 1) * (model / i64::from(layers)) / if p.moe { 6 } else { 2 };
    }
    let used_min = sum(totals(&at_context(n_ctx_min)?));
    if target <= used_min {
        return Ok(Context::Next(n_ctx_min));
    }
    let more = i128::from(n_ctx_max - n_ctx_min) * i128::from(target - used_min);
    let more = more / i128::from(sum_used - used_min).max(1);
    let n_ctx = n_ctx_min.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
    let step = CONTEXT_STEP * streams;
    let n_ctx = (n_ctx - n_ctx % step).max(n_ctx_min);
    Ok(if n_devices <= 1 {
        Context::Final(n_ctx)
    } else {
        Context::Next(n_ctx)
    })
}

impl Search<'_, '_> {
    fn n_devices(&self) -> usize {
        self.targets.len()
    }

    fn target(&self, d: usize) -> i64 {
        at(&self.targets, d)
    }

    /// The arguments of a distribution.
    fn line(&self, shares: &Shares) -> Result<Line, NoFit> {
        let params = &self.problem.params;
        let layers = shares.devices.iter().map(|s| s.layers);
        let n_gpu_layers = layers.clone().fold(0, u32::wrapping_add);
        let mut il = (self.problem.n_layer + 1).wrapping_sub(n_gpu_layers);
        let mut overrides = Vec::new();
        for (share, &overflow) in shares.devices.iter().zip(&shares.overflow) {
            il = il.wrapping_add(share.full());
            let end = il.wrapping_add(share.partial);
            for layer in il..end {
                let (keeps, place) = if layer == il {
                    (share.keeps, overflow)
                } else {
                    (Fraction::Moe, Place::Host)
                };
                if overrides.len() + 1 >= MAX_OVERRIDES {
                    return Err(NoFit::TooManyOverrides);
                }
                overrides.push(Override::overflow(Some(layer as usize), keeps, place));
            }
            il = end;
        }
        Ok(Line {
            n_ctx: self.n_ctx,
            n_gpu_layers: i32::try_from(n_gpu_layers).unwrap_or(i32::MAX),
            tensor_split: if self.n_devices() > 1 {
                layers.map(|n| n as f32).collect()
            } else {
                params.tensor_split.clone()
            },
            overrides,
        })
    }

    /// Bytes per device with a distribution.
    fn memory(&mut self, shares: &Shares) -> Result<Vec<i64>, NoFit> {
        let line = self.line(shares)?;
        let params = line.apply(&self.problem.params);
        Ok(totals(&(self.measure)(&params)?))
    }

    /// Steps 3 and 4 of the peer.
    fn distribute(&mut self) -> Result<Shares, NoFit> {
        let surplus = if self.problem.moe {
            self.surplus_without_experts()?
        } else {
            0
        };
        let empty = Share {
            layers: 0,
            partial: 0,
            keeps: Fraction::Moe,
        };
        let mut shares = Shares {
            devices: vec![empty; self.n_devices()],
            overflow: vec![Place::Host; self.n_devices()],
        };
        let mut memory = self.memory(&shares)?;
        for d in (0..self.n_devices()).rev() {
            self.fill(d, &mut shares, &mut memory)?;
        }
        if surplus > 0 {
            self.bring_experts_back(&mut shares, &mut memory)?;
        }
        Ok(shares)
    }

    /// What is left of all devices when every expert is on the host.
    fn surplus_without_experts(&mut self) -> Result<i64, NoFit> {
        let params = Params {
            n_ctx: self.n_ctx,
            overrides: vec![Override::overflow(None, Fraction::Moe, Place::Host)],
            ..self.problem.params.clone()
        };
        let used = sum(totals(&(self.measure)(&params)?));
        Ok(sum(self.targets.iter().copied()) - used)
    }

    /// Gives a device as many of the layers left as fit, by false position; of a mixture of experts without the experts.
    fn fill(&mut self, d: usize, low: &mut Shares, memory: &mut Vec<i64>) -> Result<(), NoFit> {
        let moe = self.problem.moe;
        let last = d + 1 == self.n_devices();
        let assigned: u32 = low.devices.iter().skip(d + 1).map(|s| s.layers).sum();
        let unassigned = (self.problem.n_layer + 1).saturating_sub(assigned);
        if unassigned == 0 {
            return Ok(());
        }
        let mut high = low.clone();
        if let Some(share) = high.devices.get_mut(d) {
            share.layers = unassigned;
            // The output layer cannot be partial.
            share.partial = u32::from(moe) * (unassigned - u32::from(last));
        }
        let mut memory_high = self.memory(&high)?;
        if at(&memory_high, d) <= self.target(d) {
            *low = high;
            *memory = memory_high;
            return Ok(());
        }
        let layers = |s: &Shares| s.devices.get(d).map_or(0, |share| share.layers);
        loop {
            let delta = layers(&high).saturating_sub(layers(low));
            if delta <= 1 {
                return Ok(());
            }
            let step = step(delta, self.target(d), at(memory, d), at(&memory_high, d));
            let mut test = low.clone();
            if let Some(share) = test.devices.get_mut(d) {
                let output = u32::from(last && share.partial == 0);
                share.layers += step;
                share.partial += u32::from(moe) * (step - output);
            }
            let memory_test = self.memory(&test)?;
            if at(&memory_test, d) <= self.target(d) {
                *low = test;
                *memory = memory_test;
            } else {
                high = test;
                memory_high = memory_test;
            }
        }
    }

    /// Makes layers whole again, front to back, each moved to the device that is being filled.
    fn bring_experts_back(
        &mut self,
        shares: &mut Shares,
        memory: &mut Vec<i64>,
    ) -> Result<(), NoFit> {
        let n = self.n_devices();
        let used = shares.devices.iter().rev().take_while(|s| s.layers > 0);
        // The first device of those behind which all have layers.
        let mut start = n - used.count();
        let mut d = 0;
        while d <= start && start < n {
            self.make_whole(d, shares, memory, &mut start)?;
            self.add_part(d, shares, memory, &mut start)?;
            d += 1;
        }
        Ok(())
    }

    fn make_whole(
        &mut self,
        d: usize,
        low: &mut Shares,
        memory: &mut Vec<i64>,
        start: &mut usize,
    ) -> Result<(), NoFit> {
        let n = self.n_devices();
        let mut high = low.clone();
        for j in *start..n {
            let mut moved = 0;
            if let Some(from) = high.devices.get_mut(j) {
                // The last device keeps the output layer.
                moved = from.layers.wrapping_sub(u32::from(j + 1 == n));
            }
            if let Some(to) = high.devices.get_mut(d) {
                to.layers = to.layers.wrapping_add(moved);
            }
            if let Some(from) = high.devices.get_mut(j) {
                from.layers = from.layers.wrapping_sub(moved);
                from.partial = 0;
            }
        }
        let mut memory_high = self.memory(&high)?;
        if at(&memory_high, d) <= self.target(d) {
            *low = high;
            *memory = memory_high;
            *start = n - 1;
            return Ok(());
        }
        let full = |s: &Shares| s.devices.get(d).map_or(0, |share| share.full());
        loop {
            let delta = full(&high).saturating_sub(full(low));
            if delta <= 1 {
                return Ok(());
            }
            let step = step(delta, self.target(d), at(memory, d), at(&memory_high, d));
            let (test, start_test) = convert(low, d, *start, step);
            let memory_test = self.memory(&test)?;
            if at(&memory_test, d) <= self.target(d) {
                *low = test;
                *memory = memory_test;
                *start = start_test;
            } else {
                high = test;
                memory_high = memory_test;
            }
        }
    }

    /// Tries to give a device a part of one more layer.
    fn add_part(
        &mut self,
        d: usize,
        shares: &mut Shares,
        memory: &mut Vec<i64>,
        start: &mut usize,
    ) -> Result<(), NoFit> {
        let n = self.n_devices();
        let keep = u32::from(d + 1 == n);
        if shares.devices.get(*start).is_none_or(|s| s.layers <= keep) {
            return Ok(());
        }
        let mut test = shares.clone();
        if let Some(from) = test.devices.get_mut(*start) {
            from.layers -= 1;
            from.partial = from.partial.wrapping_sub(1);
        }
        if let Some(to) = test.devices.get_mut(d) {
            to.layers += 1;
            to.partial = to.partial.wrapping_add(1);
        }
        let emptied = test.devices.get(*start).is_some_and(|s| s.partial == 0);
        let start_test = *start + usize::from(emptied);
        let mut attempt = |keeps: Fraction, overflow: Place| -> Result<bool, NoFit> {
            if let Some(to) = test.devices.get_mut(d) {
                to.keeps = keeps;
            }
            if let Some(place) = test.overflow.get_mut(d) {
                *place = overflow;
            }
            let memory_test = self.memory(&test)?;
            let fits = |d: usize| at(&memory_test, d) < self.target(d);
            let accepted = fits(d) && (d + 1 == n || fits(d + 1));
            if accepted {
                *shares = test.clone();
                *memory = memory_test;
                *start = start_test;
            }
            Ok(accepted)
        };
        let next = if d + 1 < n {
            Place::Device(d + 1)
        } else {
            Place::Host
        };
        if attempt(Fraction::Up, next)? {
            attempt(Fraction::Gate, next)?;
        } else {
            attempt(Fraction::Attention, next)?;
        }
        Ok(())
    }
}

/// The step of false position: 64-bit, cut to 32 bits before it is bounded, so that a negative one is the largest.
fn step(delta: u32, target: i64, low: i64, high: i64) -> u32 {
    let step = i128::from(delta) * i128::from(target - low);
    let step = step.checked_div(i128::from(high - low)).unwrap_or(0);
    (step as u32).max(1).min(delta - 1)
}

/// Takes partial layers from `start` on and makes them whole layers of `d`.
fn convert(shares: &Shares, d: usize, mut start: usize, step: u32) -> (Shares, usize) {
    let mut out = shares.clone();
    let mut converted = 0;
    while let Some(from) = out.devices.get_mut(start) {
        let taken = (step - converted).min(from.partial);
        from.layers = from.layers.wrapping_sub(taken);
        from.partial -= taken;
        let left = from.partial;
        if let Some(to) = out.devices.get_mut(d) {
            to.layers += taken;
        }
        converted += taken;
        if left > 0 {
            break;
        }
        start += 1;
    }
    (out, start)
}
