//! `gpus`, and the hidden verb that it starts for each driver.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use serde_json::{Value, json};

use super::args::BackendArg;
use super::exit::CliError;
use crate::gpu::{self, DEADLINE, Device, Environment, Machine, Prober};

const MIB: u64 = 1 << 20;

/// Prints what llama.cpp would find here. That there is no GPU, or a driver that does not work, is part of the answer.
pub(super) fn run(root: &Path, json: bool, out: &mut impl Write) -> Result<(), CliError> {
    let machine = Prober::new(Path::new("/proc/self/exe"), root, DEADLINE).machine();
    if json {
        writeln!(out, "{:#}", as_json(&machine))?;
    } else {
        print(&machine, out)?;
    }
    Ok(())
}

fn is_used(machine: &Machine, device: &Device) -> bool {
    machine.used().iter().any(|used| used.name == device.name)
}

fn as_json(machine: &Machine) -> Value {
    let devices = machine.devices.iter().map(|device| {
        let mut value = json!(device);
        if let Some(object) = value.as_object_mut() {
            object.insert("used".to_owned(), is_used(machine, device).into());
        }
        value
    });
    json!({ "devices": devices.collect::<Vec<_>>(), "host": machine.host, "reasons": machine.reasons })
}

fn print(machine: &Machine, out: &mut impl Write) -> io::Result<()> {
    let header = ["", "MiB total", "MiB free", "kind", "what", "found by"].map(str::to_owned);
    let device = |d: &Device| {
        let kind = match (d.integrated, d.unified) {
            (false, false) => "discrete",
            (false, true) => "discrete, unified memory",
            (true, false) => "integrated",
            (true, true) => "integrated, unified memory",
        };
        let (total, free) = (d.total / MIB, d.free / MIB);
        let found = match &d.problem {
            Some(problem) => problem,
            None => &d.found,
        };
        let not_used = if is_used(machine, d) {
            ""
        } else {
            ", not used"
        };
        [
            d.name.clone(),
            total.to_string(),
            free.to_string(),
            format!("{kind}{not_used}"),
            d.description.clone(),
            found.clone(),
        ]
    };
    let host = &machine.host;
    let available = host.available.map(|bytes| (bytes / MIB).to_string());
    let host = [
        "host".to_owned(),
        (host.total / MIB).to_string(),
        available.unwrap_or_else(|| "?".to_owned()),
        String::new(),
        "RAM; free is what can be had without swapping".to_owned(),
        "sysconf, /proc/meminfo".to_owned(),
    ];
    let devices = machine.devices.iter().map(device);
    let mut rows: Vec<_> = [header].into_iter().chain(devices).chain([host]).collect();
    for cell in rows.iter_mut().flatten() {
        // Names come from drivers and files: nothing in them reaches a terminal as a command.
        cell.retain(|c| !c.is_control());
    }
    let width = |column| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell: &String| cell.chars().count()).max()
    };
    let widths = [0, 1, 2, 3, 4, 5].map(|column| width(column).unwrap_or(0));
    for row in &rows {
        let [name, total, free, kind, what, found] = row;
        let [a, b, c, d, e, _] = widths;
        writeln!(
            out,
            "{name:a$}  {total:>b$}  {free:>c$}  {kind:d$}  {what:e$}  {found}"
        )?;
    }
    for reason in &machine.reasons {
        let text: String = reason.text.chars().filter(|c| !c.is_control()).collect();
        writeln!(out, "{}: {text}", reason.source)?;
    }
    Ok(())
}

/// The child: answers as JSON on what was its stdout. A driver may write to stdout as well; that goes to stderr.
pub(super) fn probe(backend: BackendArg, root: &Path) -> Result<(), CliError> {
    // Closed at an exec, so that what the driver starts does not hold it.
    let mut answer = std::fs::File::from(io::stdout().as_fd().try_clone_to_owned()?);
    // SAFETY: both descriptors are open; dup2 replaces the second atomically.
    if unsafe { libc::dup2(io::stderr().as_raw_fd(), io::stdout().as_raw_fd()) } < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let found = gpu::probe_here(backend.into(), root, &environment());
    Ok(writeln!(answer, "{}", json!(found))?)
}

fn environment() -> Environment {
    let text = |name| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    Environment {
        cuda_visible_devices: text("CUDA_VISIBLE_DEVICES"),
        hip_visible_devices: text("HIP_VISIBLE_DEVICES"),
        rocr_visible_devices: text("ROCR_VISIBLE_DEVICES"),
        ggml_cuda_devices: text("GGML_CUDA_DEVICES"),
        unified_memory: std::env::var_os("GGML_CUDA_ENABLE_UNIFIED_MEMORY").is_some(),
    }
}
