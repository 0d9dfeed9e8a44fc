//! Where log lines go: stderr, a file, or syslog.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use log::LevelFilter;

/// One datagram per line to the local syslog socket, facility daemon.
struct Syslog(UnixDatagram);

impl Write for Syslog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut message = format!("<30>ggufuse[{}]: ", std::process::id()).into_bytes();
        message.extend_from_slice(line.trim_ascii_end());
        // A full or missing syslog must not stop the mount.
        drop(self.0.send(&message));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn syslog() -> io::Result<Syslog> {
    let socket = UnixDatagram::unbound()?;
    socket.connect("/dev/log")?;
    socket.set_nonblocking(true)?;
    Ok(Syslog(socket))
}

/// Starts logging. Without `file`, the background logs to syslog; where there is none it says so on stderr, which
/// it lets go of once it is mounted.
///
/// # Errors
/// When `file` cannot be opened for appending.
pub(super) fn start(
    verbose: u8,
    quiet: bool,
    file: Option<&Path>,
    background: bool,
) -> io::Result<()> {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::Error,
        (false, 0) => LevelFilter::Info,
        (false, 1) => LevelFilter::Debug,
        (false, _) => LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    builder
        .filter_level(LevelFilter::Warn)
        .filter_module("ggufuse", level)
        .parse_default_env();
    if let Some(file) = file {
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(file)?;
        builder.target(env_logger::Target::Pipe(Box::new(file)));
    } else if background {
        match syslog() {
            Ok(syslog) => {
                let pipe = env_logger::Target::Pipe(Box::new(syslog));
                builder.target(pipe).format_timestamp(None);
            }
            Err(_) => {
                builder.init();
                log::warn!(
                    "no syslog on this machine: nothing is logged in the background without --log-file"
                );
                return Ok(());
            }
        }
    }
    builder.init();
    Ok(())
}
