//! The report for people: what was assumed, what goes where, what does not fit and by how much.

use std::fmt::Write;

use super::plan::fits;
use super::{Bytes, FlashAttn, LLAMA_CPP, Line, Machine, Measured, NoFit, Task};

const MIB: f64 = (1u64 << 20) as f64;

/// What the report is about.
#[derive(Debug, Clone, Copy)]
pub enum Outcome<'a> {
    /// The parameters that were found.
    Found(&'a Line, &'a Measured),
    /// The parameters as given were measured, and nothing was searched.
    Given(&'a Measured),
    /// Nothing was found; what the parameters as given take, if that could be measured.
    Nothing(&'a NoFit, Option<&'a Measured>),
}

/// Writes the report.
pub fn report(task: &Task<'_>, outcome: Outcome<'_>) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, task, outcome);
    out
}

fn write(out: &mut String, task: &Task<'_>, outcome: Outcome<'_>) -> std::fmt::Result {
    let hp = &task.model.hparams;
    let machine = &task.machine;
    let experts = match hp.n_expert {
        0 => String::new(),
        n => format!(", {n} experts"),
    };
    writeln!(
        out,
        "model      {}, {} layers{experts}, trained for {} tokens",
        hp.arch(),
        hp.n_layer(),
        hp.n_ctx_train
    )?;
    if hp.n_layer_nextn > 0 {
        let use_of = if task.params.mtp {
            "loaded"
        } else {
            "not loaded"
        };
        writeln!(out, "           {} MTP layers, {use_of}", hp.n_layer_nextn)?;
    }
    let measured = match outcome {
        Outcome::Found(line, measured) => {
            writeln!(out, "arguments  {}", line.text(machine))?;
            Some(measured)
        }
        Outcome::Given(measured) => {
            writeln!(out, "arguments  as given")?;
            Some(measured)
        }
        Outcome::Nothing(why, measured) => {
            writeln!(out, "arguments  none found: {why}")?;
            measured
        }
    };
    assumptions(out, task, measured)?;
    if let Some(measured) = measured {
        table(out, task, measured)?;
        verdict(out, task, outcome, measured)?;
        host(out, machine, &measured.breakdown.host)?;
    }
    Ok(())
}

fn assumptions(out: &mut String, task: &Task<'_>, measured: Option<&Measured>) -> std::fmt::Result {
    let p = &task.params;
    let cache = if p.kv_unified {
        "one cache"
    } else {
        "a cache each"
    };
    let sequences = match p.n_seq {
        0 | 1 => "1 sequence".to_owned(),
        n => format!("{n} sequences, {cache}"),
    };
    let types = format!("{}/{}", p.type_k.name(), p.type_v.name()).to_lowercase();
    let flash_attn = match (p.flash_attn, measured.map(|m| m.flash_attn)) {
        (FlashAttn::Auto, Some(true)) => "flash attention auto (on)",
        (FlashAttn::Auto, Some(false)) => "flash attention auto (off)",
        (FlashAttn::Auto, None) => "flash attention auto",
        (FlashAttn::On, _) => "flash attention on",
        (FlashAttn::Off, _) => "flash attention off",
    };
    writeln!(
        out,
        "assumed    {sequences}, batch {}/{}, cache {types}, {flash_attn}, logits of a whole batch",
        p.n_batch, p.n_ubatch
    )?;
    writeln!(
        out,
        "           llama.cpp {LLAMA_CPP}; CUDA's own use is in what is free, its pools are in the margin"
    )?;
    if let Some(why) = measured.and_then(|m| m.estimated.as_ref()) {
        writeln!(
            out,
            "           compute buffers are estimated, with a safety margin: {why}"
        )?;
    }
    if let Some(context) = measured.map(|m| m.context) {
        let each = match context.n_streams {
            1 => String::new(),
            n => format!(", {} for each of {n} sequences", context.n_ctx / n),
        };
        writeln!(out, "context    {} tokens{each}", context.n_ctx)?;
    }
    Ok(())
}

fn mib(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / MIB)
}

/// A difference of bytes, which may be negative.
fn left(free: u64, used: u64) -> String {
    format!("{:.0}", (free as f64 - used as f64) / MIB)
}

fn table(out: &mut String, task: &Task<'_>, measured: &Measured) -> std::fmt::Result {
    let columns = [
        "free", "model", "context", "compute", "used", "left", "margin",
    ];
    write!(out, "\n{:<10}", "MiB")?;
    columns.iter().try_for_each(|c| write!(out, "{c:>10}"))?;
    writeln!(out)?;
    let terms = |b: &Bytes| [b.model, b.context, b.compute, b.total()].map(mib);
    let devices = task.machine.devices.iter();
    for (d, (device, bytes)) in devices.zip(&measured.breakdown.devices).enumerate() {
        let margin = task.margin.get(d).copied().unwrap_or(0);
        write!(out, "{:<10}{:>10}", device.name, mib(device.free))?;
        for cell in terms(bytes) {
            write!(out, "{cell:>10}")?;
        }
        writeln!(
            out,
            "{:>10}{:>10}",
            left(device.free, bytes.total()),
            mib(margin)
        )?;
    }
    let free = task.machine.host.map_or_else(String::new, |h| mib(h.free));
    write!(out, "{:<10}{free:>10}", "Host")?;
    for cell in terms(&measured.breakdown.host) {
        write!(out, "{cell:>10}")?;
    }
    writeln!(out, "\n")
}

fn verdict(
    out: &mut String,
    task: &Task<'_>,
    outcome: Outcome<'_>,
    measured: &Measured,
) -> std::fmt::Result {
    let machine = &task.machine;
    let devices = machine.devices.iter().zip(&measured.breakdown.devices);
    for (d, (device, bytes)) in devices.enumerate() {
        let margin = task.margin.get(d).copied().unwrap_or(0);
        let used = bytes.total();
        if used > device.free {
            let short = mib(used - device.free);
            writeln!(out, "{} lacks {short} MiB, without any margin", device.name)?;
        } else if used.saturating_add(margin) > device.free {
            let short = mib(used.saturating_add(margin) - device.free);
            writeln!(out, "{} misses its margin by {short} MiB", device.name)?;
        }
    }
    let what = match outcome {
        Outcome::Found(..) => "this",
        Outcome::Given(_) | Outcome::Nothing(..) => "what was asked for",
    };
    if fits(measured, machine) {
        writeln!(out, "{what} fits")
    } else {
        writeln!(out, "{what} does not fit")
    }
}

/// Host memory: weights are mapped from the file, and can be dropped and read again; the rest has to stay.
fn host(out: &mut String, machine: &Machine, bytes: &Bytes) -> std::fmt::Result {
    let Some(memory) = machine.host else {
        return writeln!(out, "host memory is not known and not checked");
    };
    let stays = bytes.context.saturating_add(bytes.compute);
    if stays > memory.free {
        let short = mib(stays - memory.free);
        writeln!(
            out,
            "the host lacks {short} MiB for its caches and compute buffers ({} MiB are available)",
            mib(memory.free)
        )
    } else if bytes.total() > memory.free {
        let over = mib(bytes.total() - memory.free);
        writeln!(
            out,
            "the host has no room for {over} MiB of its weights: mapped from the file (the default) they are read again and again, \
             without mmap they do not fit"
        )
    } else {
        writeln!(out, "the host has room for its part, weights included")
    }
}
