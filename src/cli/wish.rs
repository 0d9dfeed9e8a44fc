//! What is to be fitted: a request in llama.cpp's flags, what is there beside the model, and the machine.

use std::path::Path;

use super::exit::CliError;
use super::fit_flags::{DEVICE, DRAFT, FitFlags, MMPROJ, SPEC_TYPE};
use crate::arch;
use crate::fit::{Device, HostMemory, Machine, Request, Task};
use crate::gguf::Header;
use crate::gpu::{self, Prober};
use crate::model;
use crate::units::parse_size;

/// Flags that were understood, and the files that they name, read.
#[derive(Debug)]
pub(super) struct Wish {
    request: Request,
    /// The machine, where devices were named.
    named: Option<Machine>,
    projector: Option<u64>,
    draft: Option<arch::Model>,
    mtp: bool,
}

impl Wish {
    /// Of the flags, on top of the defaults in `request`.
    ///
    /// # Errors
    /// `Usage` for a value that makes no sense; those of reading a projector or a draft model.
    pub(super) fn new<const PREFIXED: bool>(
        request: Request,
        flags: &FitFlags<PREFIXED>,
    ) -> Result<Wish, CliError> {
        let mut wish = Wish {
            request,
            named: None,
            projector: None,
            draft: None,
            mtp: false,
        };
        for (flag, value) in flags.given() {
            match flag.name {
                DEVICE => wish.add_device(value).map_err(CliError::Usage)?,
                MMPROJ => wish.projector = Some(projector_bytes(Path::new(value))?),
                DRAFT => wish.draft = Some(load(Path::new(value))?),
                SPEC_TYPE if value == "draft-mtp" => wish.mtp = true,
                SPEC_TYPE => {
                    let why = format!("--spec-type {value:?} is not planned for: draft-mtp");
                    return Err(CliError::Usage(why));
                }
                _ => wish.request.set(flag, value).map_err(CliError::Usage)?,
            }
        }
        if wish.mtp && wish.draft.is_some() {
            let why = "--spec-type draft-mtp and --model-draft exclude each other";
            return Err(CliError::Usage(why.to_owned()));
        }
        Ok(wish)
    }

    fn add_device(&mut self, text: &str) -> Result<(), String> {
        let (name, free, total) = parse_device(text)?;
        let machine = self.named.get_or_insert_default();
        if name == "CPU" {
            machine.host = Some(HostMemory { free, total });
        } else if machine.devices.iter().any(|d| d.name == name) {
            return Err(format!("--device {name} is given twice"));
        } else {
            let name = name.to_owned();
            machine.devices.push(Device { name, free, total });
        }
        Ok(())
    }

    /// Bytes of the projector that was named.
    pub(super) fn projector(&self) -> Option<u64> {
        self.projector
    }

    /// The machine that was named, or this one as it is now; and what is to be known of that.
    pub(super) fn machine(&self, prober: &Prober) -> (Machine, Vec<String>) {
        if let Some(named) = &self.named {
            let note = "planned for the devices that were named, not for those of this machine";
            return (named.clone(), vec![note.to_owned()]);
        }
        let found = prober.machine();
        let reasons = found.reasons.iter();
        let notes = reasons.map(|reason| format!("{}: {}", reason.source, reason.text));
        (machine_of(&found), notes.collect())
    }

    /// What to fit for a model, with so many bytes of a projector on the first device.
    ///
    /// # Errors
    /// `Usage` for a buffer or a device that the machine has not.
    pub(super) fn task<'a>(
        &'a self,
        model: &'a arch::Model,
        machine: Machine,
        projector: Option<u64>,
    ) -> Result<Task<'a>, CliError> {
        let mut task = Task::new(model, &self.request, machine).map_err(CliError::Usage)?;
        if let Some(draft) = &self.draft {
            task.with_draft(draft);
        } else if self.mtp {
            task.with_mtp();
        }
        if let (Some(bytes), Some(first)) = (projector, task.margin.first_mut()) {
            *first = first.saturating_add(bytes);
        }
        Ok(task)
    }
}

/// What llama.cpp would plan with on a machine that was probed.
fn machine_of(found: &gpu::Machine) -> Machine {
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
pub(super) fn load(source: &Path) -> Result<arch::Model, CliError> {
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
