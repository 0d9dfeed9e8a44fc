//! A probe of the whole machine: a child for each backend, host memory from here.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::child::Running;
use super::{Backend, DEADLINE, Found, Machine, Reason, VERB, child, host};

/// Looks at the machine when asked. Who asks while a probe is running gets what that finds.
#[derive(Debug)]
pub struct Prober {
    program: PathBuf,
    root: PathBuf,
    deadline: Duration,
    running: Mutex<Option<Arc<OnceLock<Arc<Machine>>>>>,
    /// Children that the kernel did not let go when they were killed: of such a backend no other is started.
    held: Mutex<Vec<(Backend, Child)>>,
}

impl Default for Prober {
    /// Starts this very program as the child, also when its file has been replaced or deleted since.
    fn default() -> Prober {
        Prober::new(Path::new("/proc/self/exe"), Path::new("/"), DEADLINE)
    }
}

impl Prober {
    /// Starts `program`, which has to know [`VERB`], and looks for `/sys` and `/proc` in `root`.
    pub fn new(program: &Path, root: &Path, deadline: Duration) -> Prober {
        Prober {
            program: program.to_owned(),
            root: root.to_owned(),
            deadline,
            running: Mutex::default(),
            held: Mutex::default(),
        }
    }

    /// The machine as it is now. Takes as long as the slowest driver; at most the deadline and a moment.
    pub fn machine(&self) -> Arc<Machine> {
        let probe = Arc::clone(self.running.lock().get_or_insert_default());
        let machine = probe.get_or_init(|| {
            let machine = Arc::new(self.probe());
            // Who comes from now on starts another.
            self.running.lock().take();
            machine
        });
        Arc::clone(machine)
    }

    fn probe(&self) -> Machine {
        let end = Instant::now() + self.deadline;
        // All are started before the first is listened to.
        let started = Backend::ALL.map(|backend| (backend, self.start(backend)));
        let founds = started.map(|(backend, running)| {
            let found = running.and_then(|running| self.listen(backend, running, end));
            found.unwrap_or_else(|why| Found::nothing(backend, why))
        });
        let (host, problem) = host::memory(&self.root);
        let problem = problem.map(|text| Reason::new("host", text));
        let (devices, reasons): (Vec<_>, Vec<_>) =
            founds.into_iter().map(|f| (f.devices, f.reasons)).unzip();
        Machine {
            devices: devices.concat(),
            host,
            reasons: reasons.into_iter().flatten().chain(problem).collect(),
        }
    }

    fn start(&self, backend: Backend) -> Result<Running, String> {
        let mut held = self.held.lock();
        held.retain_mut(|(_, child)| !matches!(child.try_wait(), Ok(Some(_))));
        if held.iter().any(|(of, _)| *of == backend) {
            return Err("an earlier probe hangs in the kernel and cannot be ended".to_owned());
        }
        let mut command = Command::new(&self.program);
        command.arg(VERB).arg(backend.verb_arg());
        child::start(command.arg("--root").arg(&self.root))
    }

    fn listen(&self, backend: Backend, running: Running, end: Instant) -> Result<Found, String> {
        let (found, left) = running.answer(end, |out| serde_json::from_slice(out).ok());
        self.held.lock().extend(left.map(|child| (backend, child)));
        found
    }
}
