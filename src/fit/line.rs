use super::quote::quote;
use super::{Machine, Override, Params};

/// The arguments that a fit ends in.
#[derive(Debug, Clone)]
pub struct Line {
    /// Context.
    pub n_ctx: u32,
    /// Layers on devices; -1 is all, unchanged.
    pub n_gpu_layers: i32,
    /// Shares of the devices; empty or all zero where nothing is split.
    pub tensor_split: Vec<f32>,
    /// Where tensors go.
    pub overrides: Vec<Override>,
}

impl Line {
    /// The arguments that leave parameters as they are, but for the context.
    pub fn unchanged(params: &Params, n_ctx: u32) -> Line {
        Line {
            n_ctx,
            n_gpu_layers: params.n_gpu_layers,
            tensor_split: params.tensor_split.clone(),
            overrides: params.overrides.clone(),
        }
    }

    /// The parameters with these arguments.
    pub fn apply(&self, params: &Params) -> Params {
        Params {
            n_ctx: self.n_ctx,
            n_gpu_layers: self.n_gpu_layers,
            tensor_split: self.tensor_split.clone(),
            overrides: self.overrides.clone(),
            ..params.clone()
        }
    }

    /// All but the overrides.
    fn head(&self) -> String {
        let mut line = format!("-c {} -ngl {}", self.n_ctx, self.n_gpu_layers);
        let used = self.tensor_split.iter().rposition(|&share| share != 0.0);
        if let Some(last) = used.filter(|&last| last > 0) {
            // Printed as whole numbers, as the peer does.
            let shares = self.tensor_split.iter().take(last + 1);
            let shares: Vec<_> = shares.map(|&share| (share as u32).to_string()).collect();
            line += &format!(" -ts {}", shares.join(","));
        }
        line
    }

    /// The value of `-ot`.
    fn overrides_text(&self, machine: &Machine) -> Option<String> {
        let item = |o: &Override| format!("{}={}", o.text(), machine.buffer(o.place));
        let items: Vec<_> = self.overrides.iter().map(item).collect();
        (!items.is_empty()).then(|| items.join(","))
    }

    /// The line as `llama-fit-params` prints it, without newline.
    pub fn text(&self, machine: &Machine) -> String {
        match self.overrides_text(machine) {
            Some(overrides) => format!("{} -ot \"{overrides}\"", self.head()),
            None => self.head(),
        }
    }

    /// The line for `xargs llama-server`, and for a shell: the model's path and the arguments, quoted for both, with a
    /// newline at the end. `None` for a path with a line break, which cannot be quoted for both.
    pub fn command(&self, model: &[u8], machine: &Machine) -> Option<Vec<u8>> {
        let mut line = b"-m ".to_vec();
        line.extend(quote(model)?);
        line.push(b' ');
        line.extend(self.head().bytes());
        if let Some(overrides) = self.overrides_text(machine) {
            line.extend(b" -ot ");
            line.extend(quote(overrides.as_bytes())?);
        }
        line.push(b'\n');
        Some(line)
    }
}
