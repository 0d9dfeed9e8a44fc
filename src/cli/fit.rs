use std::io::Write;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::exit::CliError;
use super::fit_flags::FitFlags;
use super::wish::{Wish, load};
use crate::fit::{Bytes, Line, Measured, NoFit, Outcome, Request, Task, fits, report};
use crate::gpu::Prober;

#[derive(Debug, ClapArgs)]
#[group(id = "form")]
pub(super) struct Fit {
    /// A GGUF file, a member of a shard set, or a directory with one model
    source: PathBuf,
    #[command(flatten)]
    flags: FitFlags<false>,
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
        let wish = Wish::new(Request::default(), &self.flags)?;
        let (machine, notes) = wish.machine(&Prober::default());
        let task = wish.task(&model, machine, wish.projector())?;
        let done = if self.print || self.measure {
            self.given(&task, out)
        } else {
            self.search(&task, out)
        };
        if self.report {
            notes.iter().try_for_each(|note| writeln!(out, "{note}"))?;
        }
        done
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
