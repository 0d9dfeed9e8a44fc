//! `--metrics`: a listener that answers GET /metrics with the mount's counters in Prometheus' text format (0.0.4). One
//! client at a time, each with a deadline and a limit on what it may send; nothing else is answered.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::exit::CliError;
use crate::gpu::{Machine, Prober};
use crate::vfs::{Fs, Statistics};

/// A request has to be here in this time, and its answer taken.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of a request; those of Prometheus have some 300.
const MOST: usize = 8 << 10;
/// Devices are asked at most this often: each time starts a process for each driver.
const MACHINE_AGE: Duration = Duration::from_secs(15);

/// A listener that nobody answers as yet.
pub(super) struct Metrics(TcpListener);

impl Metrics {
    /// Takes the address.
    ///
    /// # Errors
    /// `Failed` when it cannot be had.
    pub(super) fn listen(address: SocketAddr) -> Result<Metrics, CliError> {
        let failed = |e| CliError::Failed(format!("--metrics {address}: {e}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        if let Ok(address) = listener.local_addr() {
            log::info!("metrics at http://{address}/metrics");
        }
        Ok(Metrics(listener))
    }

    /// Answers from now on, for the life of the process.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn serve(self, fs: Arc<Fs>) -> io::Result<()> {
        let answer = move || {
            let mut machine = Seen::default();
            for client in self.0.incoming() {
                let done = client.and_then(|client| serve(client, || text(&fs, machine.now())));
                if let Err(error) = done {
                    log::debug!("metrics: {error}");
                    // Out of descriptors, accept fails at once: not in a loop without rest.
                    thread::sleep(Duration::from_millis(10));
                }
            }
        };
        let named = thread::Builder::new().name("metrics".to_owned());
        named.spawn(answer).map(drop)
    }
}

/// The machine as it was a moment ago.
#[derive(Default)]
struct Seen {
    prober: Prober,
    last: Option<(Instant, Arc<Machine>)>,
}

impl Seen {
    fn now(&mut self) -> Arc<Machine> {
        match &self.last {
            Some((at, machine)) if at.elapsed() < MACHINE_AGE => Arc::clone(machine),
            _ => {
                let machine = self.prober.machine();
                self.last = Some((Instant::now(), Arc::clone(&machine)));
                machine
            }
        }
    }
}

fn text(fs: &Fs, machine: Arc<Machine>) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_statistics(&mut out, &fs.statistics());
    let _ = write_machine(&mut out, &machine);
    out
}

/// Reads one request and answers it.
fn serve(mut client: TcpStream, text: impl FnOnce() -> String) -> io::Result<()> {
    client.set_write_timeout(Some(PATIENCE))?;
    let request = head(&mut client)?;
    let mut words = request.split(|&b| b == b' ');
    let (method, target) = (words.next(), words.next());
    let path = target.and_then(|target| target.split(|&b| b == b'?').next());
    let (status, body) = match (method, path) {
        (Some(b"GET"), Some(b"/metrics")) => ("200 OK", text()),
        (Some(b"GET"), Some(_)) => ("404 Not Found", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "GET only\n".to_owned()),
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let allow = if status.starts_with("405") {
        "Allow: GET\r\n"
    } else {
        ""
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{allow}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// A request up to its empty line.
fn head(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    let mut got = Vec::new();
    let mut part = [0; 1024];
    while !got.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || got.len() > MOST {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a request that is too slow or too long",
            ));
        }
        client.set_read_timeout(Some(left))?;
        match client.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => got.extend_from_slice(part.get(..n).unwrap_or_default()),
        }
    }
    Ok(got)
}

/// The head of a metric.
fn metric(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(
        out,
        "# HELP ggufuse_{name} {help}\n# TYPE ggufuse_{name} {kind}"
    )
}

fn single(
    out: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    value: impl Display,
) -> fmt::Result {
    metric(out, name, kind, help)?;
    writeln!(out, "ggufuse_{name} {value}")
}

fn write_statistics(out: &mut String, s: &Statistics) -> fmt::Result {
    metric(out, "build_info", "gauge", "The program.")?;
    let version = env!("CARGO_PKG_VERSION");
    writeln!(out, "ggufuse_build_info{{version=\"{version}\"}} 1")?;
    let name = "start_time_seconds";
    single(
        out,
        name,
        "gauge",
        "When the mount was made, seconds from the epoch.",
        s.since,
    )?;
    let name = "read_bytes_total";
    single(out, name, "counter", "Bytes that reads gave.", s.bytes)?;
    let name = "read_duration_seconds";
    metric(
        out,
        name,
        "histogram",
        "How long reads took that were answered.",
    )?;
    for (bound, count) in &s.buckets {
        let bound = bound.as_secs_f64();
        writeln!(out, "ggufuse_{name}_bucket{{le=\"{bound}\"}} {count}")?;
    }
    // The counters are read one after the other: no bucket may have more than all.
    let all = s
        .buckets
        .last()
        .map_or(s.reads, |&(_, most)| s.reads.max(most));
    writeln!(out, "ggufuse_{name}_bucket{{le=\"+Inf\"}} {all}")?;
    writeln!(out, "ggufuse_{name}_sum {}", s.took.as_secs_f64())?;
    writeln!(out, "ggufuse_{name}_count {all}")?;
    single(out, "opens_total", "counter", "Files opened.", s.opens)?;
    single(
        out,
        "open_handles",
        "gauge",
        "Files that are open.",
        s.open_handles,
    )?;
    metric(
        out,
        "errors_total",
        "counter",
        "Reads and opens that failed.",
    )?;
    for (errno, count) in &s.errors {
        let name = errno_name(*errno);
        writeln!(out, "ggufuse_errors_total{{errno=\"{name}\"}} {count}")?;
    }
    let name = "plan_cache_hits_total";
    single(
        out,
        name,
        "counter",
        "How often a model's plan was in memory when needed.",
        s.plan_hits,
    )?;
    single(
        out,
        "plans_total",
        "counter",
        "How often a model was planned.",
        s.plans,
    )?;
    let name = "source_changes_total";
    single(
        out,
        name,
        "counter",
        "How often a source was found changed.",
        s.changes,
    )?;
    metric(
        out,
        "models",
        "gauge",
        "Models by what was last found out about them.",
    )?;
    let m = s.models;
    for (state, count) in [
        ("served", m.served),
        ("refused", m.refused),
        ("unseen", m.unseen),
    ] {
        writeln!(out, "ggufuse_models{{state=\"{state}\"}} {count}")?;
    }
    metric(
        out,
        "fits_total",
        "counter",
        "Models fitted to this machine, by result.",
    )?;
    let results = [
        ("fits", s.computed),
        ("does_not_fit", s.no_memory),
        ("failed", s.not_computed),
    ];
    for (result, count) in results {
        writeln!(out, "ggufuse_fits_total{{result=\"{result}\"}} {count}")?;
    }
    Ok(())
}

fn write_machine(out: &mut String, machine: &Machine) -> fmt::Result {
    metric(
        out,
        "device_memory_free_bytes",
        "gauge",
        "Memory that can be had now.",
    )?;
    for device in &machine.devices {
        let (label, free) = (label(&device.name, &device.description), device.free);
        writeln!(out, "ggufuse_device_memory_free_bytes{label} {free}")?;
    }
    let host = label("host", "");
    if let Some(free) = machine.host.available {
        writeln!(out, "ggufuse_device_memory_free_bytes{host} {free}")?;
    }
    metric(
        out,
        "device_memory_total_bytes",
        "gauge",
        "Memory that there is.",
    )?;
    for device in &machine.devices {
        let (label, total) = (label(&device.name, &device.description), device.total);
        writeln!(out, "ggufuse_device_memory_total_bytes{label} {total}")?;
    }
    let total = machine.host.total;
    writeln!(out, "ggufuse_device_memory_total_bytes{host} {total}")
}

fn label(device: &str, description: &str) -> String {
    let escaped = |text: &str| {
        text.replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n")
    };
    format!(
        "{{device=\"{}\",description=\"{}\"}}",
        escaped(device),
        escaped(description)
    )
}

/// `ESTALE` rather than 116, for those that happen here.
fn errno_name(errno: i32) -> String {
    let name = match errno {
        libc::EACCES => "EACCES",
        libc::EBADF => "EBADF",
        libc::EINVAL => "EINVAL",
        libc::EIO => "EIO",
        libc::EISDIR => "EISDIR",
        libc::EMFILE => "EMFILE",
        libc::ENFILE => "ENFILE",
        libc::ENODEV => "ENODEV",
        libc::ENOENT => "ENOENT",
        libc::ENOMEM => "ENOMEM",
        libc::ENOTCONN => "ENOTCONN",
        libc::ENOTDIR => "ENOTDIR",
        libc::EROFS => "EROFS",
        libc::ESTALE => "ESTALE",
        libc::ETIMEDOUT => "ETIMEDOUT",
        other => return other.to_string(),
    };
    name.to_owned()
}
