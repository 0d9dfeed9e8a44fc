//! `fit-args` and `fit-report` in a model's directory: what fits it into the memory that is free when they are opened.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::exit::CliError;
use super::fit_flags::{DEVICE, DRAFT, FitFlags, MMPROJ};
use super::wish::Wish;
use crate::arch::{self, ArchError};
use crate::fit::{Fit, Machine, NoFit, Outcome, Request, Task, quote, report};
use crate::gguf::Header;
use crate::gpu::Prober;
use crate::vfs::{Compute, VfsError, ViewFile};

/// llama.cpp's flags that a line sets itself, or that are about the search alone.
const OF_THE_LINE: &[&str] = &[
    "ctx-size",
    "gpu-layers",
    "tensor-split",
    "override-tensor",
    "cpu-moe",
    "n-cpu-moe",
    "fit-target",
    "fit-ctx",
    DEVICE,
];

/// What a mount's options ask for, and the one who looks at the machine: shared by all models, so that opens at the same
/// time share a probe.
#[derive(Debug)]
pub(super) struct Advisor {
    wish: Wish,
    prober: Prober,
    /// The flags that the line has to repeat, each with a blank before, quoted.
    repeated: Vec<u8>,
    /// A projector is named among the flags.
    has_projector: bool,
}

impl Advisor {
    /// Assumes what `llama-server` does where the flags say nothing.
    ///
    /// # Errors
    /// As [`Wish::new`]; `Usage` for a path that no line can hold.
    pub(super) fn new(flags: &FitFlags<true>) -> Result<Advisor, CliError> {
        let mut repeated = Vec::new();
        for (flag, value) in flags.given() {
            if OF_THE_LINE.contains(&flag.name) {
                continue;
            }
            repeated.extend(format!(" --{}", flag.name).bytes());
            if flag.value.is_some() {
                let value = match flag.name {
                    MMPROJ | DRAFT => std::path::absolute(value)
                        .map_err(|e| CliError::Failed(format!("{value}: {e}")))?,
                    _ => PathBuf::from(value),
                };
                let quoted = quote(value.as_os_str().as_bytes());
                let broken = || CliError::Usage(format!("--fit-{}: has a line break", flag.name));
                repeated.push(b' ');
                repeated.extend(quoted.ok_or_else(broken)?);
            }
        }
        Ok(Advisor {
            wish: Wish::new(Request::server(), flags)?,
            prober: Prober::default(),
            repeated,
            has_projector: flags.given().iter().any(|(flag, _)| flag.name == MMPROJ),
        })
    }
}

/// A model as it is shown, for the two files.
#[derive(Debug)]
struct Advised {
    advisor: Arc<Advisor>,
    model: Result<arch::Model, ArchError>,
    /// The file to load: of shards the first.
    path: PathBuf,
    /// A projector beside it, and its bytes.
    projector: Option<(PathBuf, u64)>,
}

/// The two files for a model with these headers, to be loaded from `path`, with the projector beside it.
pub(super) fn files(
    advisor: Arc<Advisor>,
    headers: &[Header],
    path: PathBuf,
    projector: Option<(PathBuf, Header)>,
) -> [ViewFile; 2] {
    let bytes = |(path, header)| {
        let bytes = arch::projector_bytes(&[header]);
        bytes.ok().map(|bytes| (path, bytes))
    };
    let named = advisor.has_projector;
    let advised = Arc::new(Advised {
        model: arch::Model::new(headers),
        path,
        projector: projector.filter(|_| !named).and_then(bytes),
        advisor,
    });
    [
        ViewFile::computed("fit-args", Arc::new(FitArgs(Arc::clone(&advised)))),
        ViewFile::computed("fit-report", Arc::new(FitReport(advised))),
    ]
}

impl Advised {
    fn task(&self, machine: Machine) -> Result<Task<'_>, String> {
        let wish = &self.advisor.wish;
        let model = self.model.as_ref().map_err(ToString::to_string)?;
        let beside = self.projector.as_ref().map(|(_, bytes)| *bytes);
        wish.task(model, machine, wish.projector().or(beside))
            .map_err(|why| why.to_string())
    }

    fn look(&self) -> (Machine, Vec<String>) {
        self.advisor.wish.machine(&self.advisor.prober)
    }

    /// The line, quoted for `xargs` and for a shell.
    fn line(&self, task: &Task<'_>, fit: &Fit) -> Option<Vec<u8>> {
        let mut line = fit
            .line
            .command(self.path.as_os_str().as_bytes(), &task.machine)?;
        line.pop_if(|last| *last == b'\n');
        if let Some((path, _)) = &self.projector {
            line.extend(b" --mmproj ");
            line.extend(quote(path.as_os_str().as_bytes())?);
        }
        line.extend(&self.advisor.repeated);
        line.push(b'\n');
        Some(line)
    }
}

#[derive(Debug)]
struct FitArgs(Arc<Advised>);

impl Compute for FitArgs {
    fn weight(&self) -> usize {
        const TENSOR: usize = 128;
        let tensors = |model: &arch::Model| model.tensors().len().saturating_mul(TENSOR);
        self.0.model.as_ref().map_or(0, tensors)
    }

    fn compute(&self) -> Result<Vec<u8>, VfsError> {
        let failed = |why| VfsError::Failed(format!("fit-args: {why}"));
        let task = self.0.task(self.0.look().0).map_err(failed)?;
        match task.fit() {
            Ok(fit) if fit.fits(&task.machine) => self
                .0
                .line(&task, &fit)
                .ok_or_else(|| failed("the path has a line break".to_owned())),
            Err(NoFit::Refused(why)) => Err(failed(why.to_string())),
            Ok(_) | Err(_) => Err(VfsError::NoMemory),
        }
    }
}

#[derive(Debug)]
struct FitReport(Arc<Advised>);

impl Compute for FitReport {
    /// All it has is shared with the other file.
    fn weight(&self) -> usize {
        0
    }

    fn compute(&self) -> Result<Vec<u8>, VfsError> {
        let (machine, notes) = self.0.look();
        let text = match self.0.task(machine) {
            Ok(task) => self.text(&task),
            Err(why) => format!("nothing can be said of this model: {why}\n"),
        };
        let notes = notes.into_iter().map(|note| note + "\n");
        Ok([text].into_iter().chain(notes).collect::<String>().into())
    }
}

impl FitReport {
    fn text(&self, task: &Task<'_>) -> String {
        match task.fit() {
            Ok(fit) => {
                let line = self.0.line(task, &fit).unwrap_or_default();
                let report = report(task, Outcome::Found(&fit.line, &fit.measured));
                format!("fit-args   {}{report}", String::from_utf8_lossy(&line))
            }
            Err(why) => {
                let measured = task.measure(&task.params).ok();
                report(task, Outcome::Nothing(&why, measured.as_ref()))
            }
        }
    }
}
