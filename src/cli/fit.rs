use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::exit::CliError;
use super::fit_flags::FitFlags;
use crate::arch;
use crate::fit::{
    Bytes, Device, HostMemory, Line, Machine, Measured, NoFit, Outcome, Request, Task, fits, report,
};
use crate::gguf::Header;
use crate::gpu::{self, DEADLINE, Prober};
use crate::model;
use crate::units::parse_size;

#[derive(Debug, ClapArgs)]
#[group(id = "form")]
pub(super) struct Fit {
    /// A GGUF file, a member of a shard set, or a directory with one model
    source: PathBuf,
    #[command(flatten)]
    flags: FitFlags<false>,
    /// Plan for this device instead of those of this machine, in bytes or with a unit: CUDA0=23GiB/24GiB (repeatable); CPU is the host
    #[arg(long, value_name = "NAME=FREE[/TOTAL]")]
    device: Vec<String>,
    /// A multimodal projector, loaded beside the model
    #[arg(long, visible_alias = "mm", value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// A draft model, loaded beside the model
    #[arg(
        long,
        visible_alias = "md",
        visible_alias = "spec-draft-model",
        value_name = "FILE"
    )]
    model_draft: Option<PathBuf>,
    /// Draft with the model's own MTP layers: draft-mtp
    #[arg(long, value_name = "TYPE", value_parser = ["draft-mtp"], conflicts_with = "model_draft")]
    spec_type: Option<String>,
    /// Print device, model, context and compute in MiB for the parameters as given, as `llama-fit-params -fitp on` does
    #[arg(long, conflicts_with_all = ["json", "report", "measure"])]
    print: bool,
    /// Print a report for people
    #[arg(long, conflicts_with = "json")]
    report: bool,
    /// Print bytes per device and term, the chosen parameters and the line
    #[arg(long)]
    json: bool,
    /// With --json or --report: measure the parameters as given, search nothing
    #[arg(long)]
    measure: bool,
}

impl Fit {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CliError> {
        if self.measure && !self.json && !self.report {
            return Err(CliError::Usage(
                "--measure goes with --json or --report".to_owned(),
            ));
        }
        let model = load(&self.source)?;
        let draft = self.model_draft.as_deref().map(load).transpose()?;
        let machine = self.machine()?;
        let mut request = Request::default();
        self.flags.apply(&mut request).map_err(CliError::Usage)?;
        let mut task = Task::new(&model, &request, machine).map_err(CliError::Usage)?;
        if let Some(draft) = &draft {
            task.with_draft(draft);
        } else if self.spec_type.is_some() {
            task.with_mtp();
        }
        if let (Some(file), Some(first)) = (&self.mmproj, task.margin.first_mut()) {
            *first = first.saturating_add(projector_bytes(file)?);
        }
        if self.print || self.measure {
            self.given(&task, out)
        } else {
            self.search(&task, out)
        }
    }

    /// The machine that was named, or this one.
    fn machine(&self) -> Result<Machine, CliError> {
        if self.device.is_empty() {
            let prober = Prober::new(Path::new("/proc/self/exe"), Path::new("/"), DEADLINE);
            return Ok(machine_of(&prober.machine()));
        }
        let mut machine = Machine::default();
        for text in &self.device {
            let (name, free, total) = parse_device(text).map_err(CliError::Usage)?;
            if name == "CPU" {
                machine.host = Some(HostMemory { free, total });
            } else if machine.devices.iter().any(|d| d.name == name) {
                return Err(CliError::Usage(format!("--device {name} is given twice")));
            } else {
                let name = name.to_owned();
                machine.devices.push(Device { name, free, total });
            }
        }
        Ok(machine)
    }

    fn given(&self, task: &Task<'_>, out: &mut impl Write) -> Result<(), CliError> {
        let measured = task
            .measure(&task.params)
            .map_err(|why| CliError::Failed(why.to_string()))?;
        if self.json {
            let line = Line::unchanged(&task.params, task.params.n_ctx);
            writeln!(out, "{}", as_json(task, Some(&line), Some(&measured), None))?;
        } else if self.report {
            write!(out, "{}", report(task, Outcome::Given(&measured)))?;
        } else {
            print(task, &measured, out)?;
        }
        Ok(())
    }

    fn search(&self, task: &Task<'_>, out: &mut impl Write) -> Result<(), CliError> {
        match task.fit() {
            Ok(fit) => {
                if self.json {
                    let json = as_json(task, Some(&fit.line), Some(&fit.measured), None);
                    writeln!(out, "{json}")?;
                } else if self.report {
                    write!(
                        out,
                        "{}",
                        report(task, Outcome::Found(&fit.line, &fit.measured))
                    )?;
                } else {
                    writeln!(out, "{}", fit.line.text(&task.machine))?;
                }
                if fit.fits(&task.machine) {
                    Ok(())
                } else {
                    let why = "even this does not fit: --report says by how much";
                    Err(CliError::DoesNotFit(why.to_owned()))
                }
            }
            Err(NoFit::Refused(why)) => Err(CliError::Failed(why.to_string())),
            Err(why) => {
                let measured = task.measure(&task.params).ok();
                if self.json {
                    let reason = Some(why.to_string());
                    writeln!(out, "{}", as_json(task, None, measured.as_ref(), reason))?;
                } else if self.report {
                    write!(
                        out,
                        "{}",
                        report(task, Outcome::Nothing(&why, measured.as_ref()))
                    )?;
                }
                Err(CliError::DoesNotFit(why.to_string()))
            }
        }
    }
}

/// What llama.cpp would plan with on a machine that was probed.
pub(super) fn machine_of(found: &gpu::Machine) -> Machine {
    let device = |d: &&gpu::Device| Device {
        name: d.name.clone(),
        free: d.free,
        total: d.total,
    };
    let host = found.host;
    Machine {
        devices: found.used().iter().map(device).collect(),
        host: Some(HostMemory {
            free: host.available.unwrap_or(host.total),
            total: host.total,
        }),
    }
}

/// Reads a model's headers as llama.cpp sees them.
fn load(source: &Path) -> Result<arch::Model, CliError> {
    let model = model::load(source)?;
    arch::Model::new(&model.headers)
        .map_err(|error| CliError::BadModel(format!("{}: {error}", source.display())))
}

fn projector_bytes(file: &Path) -> Result<u64, CliError> {
    let headers: Vec<Header> = model::load(file)?.headers;
    arch::projector_bytes(&headers)
        .map_err(|error| CliError::BadModel(format!("{}: {error}", file.display())))
}

fn parse_device(text: &str) -> Result<(&str, u64, u64), String> {
    let wrong = || format!("--device {text:?} is no NAME=FREE[/TOTAL]");
    let (name, sizes) = text.split_once('=').ok_or_else(wrong)?;
    let (free, total) = sizes.split_once('/').unwrap_or((sizes, sizes));
    if name.is_empty() {
        return Err(wrong());
    }
    // A full device has no bytes free, which is no size.
    let size = |text: &str| if text == "0" { Ok(0) } else { parse_size(text) };
    Ok((name, size(free)?, size(total)?))
}

/// The form of `llama-fit-params -fitp on`: whole MiB, each with a space behind.
fn print(task: &Task<'_>, measured: &Measured, out: &mut impl Write) -> std::io::Result<()> {
    let names = task.machine.devices.iter().map(|d| d.name.as_str());
    let rows = names.zip(&measured.breakdown.devices);
    for (name, bytes) in rows.chain([("Host", &measured.breakdown.host)]) {
        let Bytes {
            model,
            context,
            compute,
        } = bytes;
        writeln!(
            out,
            "{name} {} {} {} ",
            model >> 20,
            context >> 20,
            compute >> 20
        )?;
    }
    Ok(())
}

fn as_json(
    task: &Task<'_>,
    line: Option<&Line>,
    measured: Option<&Measured>,
    reason: Option<String>,
) -> Value {
    let machine = &task.machine;
    let none = Bytes::default();
    let devices = machine.devices.iter().enumerate().map(|(d, device)| {
        let bytes = measured
            .and_then(|m| m.breakdown.devices.get(d))
            .unwrap_or(&none);
        json!({ "name": device.name, "free": device.free, "total": device.total,
            "model": bytes.model, "context": bytes.context, "compute": bytes.compute })
    });
    let host = measured.map_or(none, |m| m.breakdown.host);
    let mut value = json!({
        "devices": devices.collect::<Vec<_>>(),
        "host": { "model": host.model, "context": host.context, "compute": host.compute },
        "n_ctx": measured.map(|m| m.context.n_ctx),
        "flash_attn": measured.map(|m| m.flash_attn),
        "line": line.map(|line| line.text(machine)),
        "fits": line.is_some() && measured.is_some_and(|m| fits(m, machine)),
    });
    let more = [
        ("estimated", measured.and_then(|m| m.estimated.clone())),
        ("reason", reason),
    ];
    if let Some(object) = value.as_object_mut() {
        for (key, text) in more {
            if let Some(text) = text {
                object.insert(key.to_owned(), text.into());
            }
        }
    }
    value
}
