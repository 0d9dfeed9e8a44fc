//! Where log lines go (stderr, a file, or syslog) and what they look like.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use env_logger::fmt::Formatter;
use log::kv::{self, Key, VisitSource};
use log::{Level, LevelFilter, Record};
use serde_json::{Map, Value};

use super::args::LogFormat;
use super::log_limit::Limited;

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

/// What is logged, and how.
#[derive(Debug, Clone, Copy)]
pub(super) struct Logging<'a> {
    pub verbose: u8,
    pub quiet: bool,
    pub format: LogFormat,
    /// Append to this file.
    pub file: Option<&'a Path>,
    /// Without a file, to syslog; where there is none stderr hears of it, until the mount is ready and lets go of it.
    pub background: bool,
}

/// Starts logging.
///
/// # Errors
/// When the file cannot be opened for appending.
pub(super) fn start(how: Logging<'_>) -> io::Result<()> {
    let level = match (how.quiet, how.verbose) {
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
    let mut deaf = false;
    if let Some(file) = how.file {
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(file)?;
        builder.target(env_logger::Target::Pipe(Box::new(file)));
    } else if how.background {
        match syslog() {
            Ok(syslog) => {
                let pipe = env_logger::Target::Pipe(Box::new(syslog));
                builder.target(pipe).format_timestamp(None);
            }
            Err(_) => deaf = true,
        }
    } else if is_journal() && how.format == LogFormat::Text {
        builder.format(journal);
    }
    if how.format == LogFormat::Json {
        builder.format(json);
    }
    let logger = builder.build();
    let most = logger.filter();
    let limited = Limited {
        inner: logger,
        places: Default::default(),
    };
    // It fails when there is a logger already: then that one logs.
    if log::set_boxed_logger(Box::new(limited)).is_ok() {
        log::set_max_level(most);
    }
    if deaf {
        log::warn!(
            "no syslog on this machine: nothing is logged in the background without --log-file"
        );
    }
    Ok(())
}

/// Whether stderr is systemd's journal, which adds the time and wants the level as a prefix.
fn is_journal() -> bool {
    let Ok(journal) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::fs::metadata("/proc/self/fd/2");
    !io::stderr().is_terminal()
        && stderr.is_ok_and(|meta| format!("{}:{}", meta.dev(), meta.ino()) == journal)
}

/// `sd-daemon(3)`'s prefix: the priorities of syslog.
fn journal(out: &mut Formatter, record: &Record<'_>) -> io::Result<()> {
    let priority = match record.level() {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    };
    writeln!(out, "<{priority}>{}", record.args())
}

/// One object a line: time, level, module, message, and what the message is about.
fn json(out: &mut Formatter, record: &Record<'_>) -> io::Result<()> {
    let mut fields = Fields::default();
    // No key of ours fails to be read.
    drop(record.key_values().visit(&mut fields));
    let mut line = Map::new();
    line.insert("time".into(), out.timestamp_millis().to_string().into());
    line.insert(
        "level".into(),
        record.level().as_str().to_lowercase().into(),
    );
    line.insert("module".into(), record.target().into());
    line.insert("message".into(), record.args().to_string().into());
    line.extend(fields.0);
    writeln!(out, "{}", Value::Object(line))
}

#[derive(Default)]
struct Fields(BTreeMap<String, Value>);

impl<'kvs> VisitSource<'kvs> for Fields {
    fn visit_pair(&mut self, key: Key<'kvs>, value: kv::Value<'kvs>) -> Result<(), kv::Error> {
        let value = match (value.to_u64(), value.to_i64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => value.to_string().into(),
        };
        self.0.insert(key.to_string(), value);
        Ok(())
    }
}
