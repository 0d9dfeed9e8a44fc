use std::cell::RefCell;
use std::io::{Stdout, Write};
use std::path::Path;

use super::exit::CliError;
use super::inspect::short_value;
use super::progress::Progress;
use crate::diff::{self, Finding, Side};
use crate::export::{Event, Watch};
use crate::gguf::{Kv, Tensor};
use crate::model;

/// Prints what differs, by name, and with `hash` all tensors; the last line says how it ended.
pub(super) fn run(a: &Path, b: &Path, hash: bool) -> Result<(), CliError> {
    let (left, right) = (model::load(a)?, model::load(b)?);
    let tensors = || left.headers.iter().flat_map(|h| h.tensors());
    let total = tensors().fold(0u64, |sum, tensor| sum.saturating_add(tensor.len));
    let progress = RefCell::new(Progress::new(total, |_| ())?);
    let (mut differences, mut written) = (0usize, Ok(()));
    let mut out = std::io::stdout();
    let mut found = |finding: Finding<'_>| {
        differences =
            differences.saturating_add(usize::from(!matches!(finding, Finding::Same { .. })));
        if written.is_ok() {
            written = progress.borrow().aside(|| print(&finding, &mut out));
        }
    };
    let mut read = |n: u64| {
        progress.borrow_mut().event(Event::Copied(n));
        !progress.borrow().stopped()
    };
    diff::diff(&left, &right, hash, &mut found, &mut read)?;
    drop(progress);
    written?;
    if differences > 0 {
        return Err(CliError::Failed(format!(
            "{} and {} differ: {differences} difference(s)",
            a.display(),
            b.display()
        )));
    }
    writeln!(
        out,
        "the same: {} tensors, {total} bytes, and all keys",
        tensors().count()
    )?;
    Ok(())
}

fn print(finding: &Finding<'_>, out: &mut Stdout) -> std::io::Result<()> {
    let name = |tensor: &Tensor| String::from_utf8_lossy(&tensor.name).into_owned();
    match finding {
        Finding::KeyOnly(side, kv) => {
            let key = String::from_utf8_lossy(kv.key);
            writeln!(out, "key {key}: only in {}: {}", letter(*side), value(kv))
        }
        Finding::Key(a, b) => {
            let key = String::from_utf8_lossy(a.key);
            let (a, b) = (value(a), value(b));
            let further = if a == b {
                ", not the same further in"
            } else {
                ""
            };
            writeln!(out, "key {key}: A has {a}, B has {b}{further}")
        }
        Finding::TensorOnly(side, tensor) => {
            writeln!(out, "tensor {}: only in {}", name(tensor), letter(*side))
        }
        Finding::Shape(a, b) => writeln!(
            out,
            "tensor {}: A is {} {:?}, B is {} {:?}",
            name(a),
            a.ty.name(),
            a.dims,
            b.ty.name(),
            b.dims
        ),
        Finding::Bytes { tensor, at, hashes } => {
            write!(
                out,
                "tensor {}: byte {at} of its data differs",
                name(tensor)
            )?;
            match hashes {
                Some((a, b)) => writeln!(out, "; SHA-256 A {a}, B {b}"),
                None => writeln!(out),
            }
        }
        Finding::Same { tensor, hash } => match hash {
            Some(hash) => writeln!(out, "{hash}  {}", name(tensor)),
            None => Ok(()),
        },
    }
}

fn letter(side: Side) -> char {
    match side {
        Side::A => 'A',
        Side::B => 'B',
    }
}

fn value(kv: &Kv<'_>) -> String {
    format!("{} {}", kv.ty.name(), short_value(kv))
}
