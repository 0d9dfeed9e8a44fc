use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::exit::CliError;
use crate::mount::{MountEntry, ggufuse_mounts};

/// Prints the mounts, or only the one asked for.
///
/// # Errors
/// `Failed` when the one asked for is not there or does not answer.
pub(super) fn run(only: Option<PathBuf>, json: bool, out: &mut impl Write) -> Result<(), CliError> {
    let mut mounts =
        ggufuse_mounts().map_err(|e| CliError::Failed(format!("cannot list mounts: {e}")))?;
    mounts.retain(|m| only.as_ref().is_none_or(|p| *p == m.mountpoint));
    if let (Some(point), true) = (&only, mounts.is_empty()) {
        return Err(CliError::Failed(format!(
            "{}: no ggufuse mount",
            point.display()
        )));
    }
    let described: Vec<_> = mounts
        .iter()
        .map(|m| {
            (
                m,
                xattr(&m.mountpoint, "user.ggufuse.view"),
                stats(&m.mountpoint),
            )
        })
        .collect();
    if json {
        let list = described.iter().map(|(m, view, stats)| {
            json!({ "mountpoint": m.mountpoint.to_string_lossy(), "source": m.source.to_string_lossy(),
                "view": view.as_ref().ok(), "stats": stats, "stale": view.as_ref().is_err_and(is_stale) })
        });
        writeln!(out, "{:#}", list.collect::<Value>())?;
    } else {
        print(&described, out)?;
    }
    match (&only, described.first()) {
        (Some(point), Some((_, Err(error), _))) => Err(CliError::Failed(format!(
            "{}: does not answer: {error}",
            point.display()
        ))),
        _ => Ok(()),
    }
}

type Described<'a> = (
    &'a MountEntry,
    io::Result<String>,
    Option<Map<String, Value>>,
);

fn print(described: &[Described<'_>], out: &mut impl Write) -> io::Result<()> {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |now| now.as_secs());
    for (m, view, stats) in described {
        let view = match view {
            Ok(view) => view.clone(),
            Err(error) if is_stale(error) => "stale".to_owned(),
            Err(error) => error.to_string(),
        };
        write!(
            out,
            "{} on {} ({view}",
            m.source.display(),
            m.mountpoint.display()
        )?;
        for (name, value) in stats.iter().flatten() {
            match value.as_u64().filter(|_| name == "since") {
                Some(since) => write!(out, ", up {}", duration(now.saturating_sub(since)))?,
                None => write!(out, ", {name} {value}")?,
            }
        }
        writeln!(out, ")")?;
    }
    Ok(())
}

/// The process is gone. Another error says nothing of that: a mount of another user lets nobody in.
fn is_stale(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOTCONN | libc::ECONNABORTED)
    )
}

/// Seconds as `3d 4h`, `4h 5m`, `5m 6s` or `6s`.
fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

fn stats(point: &Path) -> Option<Map<String, Value>> {
    let text = xattr(point, "user.ggufuse.stats").ok()?;
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    Some(
        pairs
            .map(|(name, value)| {
                (
                    name.to_owned(),
                    value.parse::<u64>().map_or(Value::Null, Value::from),
                )
            })
            .collect(),
    )
}

/// An extended attribute of at most 4 KiB, as text.
fn xattr(path: &Path, name: &str) -> io::Result<String> {
    let mut value = vec![0; 4096];
    let n = rustix::fs::getxattr(path, name, value.as_mut_slice())?;
    value.truncate(n);
    String::from_utf8(value).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_show_two_units() {
        let shown = [0, 59, 61, 3600, 90_061].map(duration);
        assert_eq!(shown, ["0s", "59s", "1m 1s", "1h 0m", "1d 1h"]);
    }
}
