use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::exit::CliError;
use crate::mount::ggufuse_mounts;

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
    let described = mounts.iter().map(|m| {
        (
            m,
            xattr(&m.mountpoint, "user.ggufuse.view"),
            stats(&m.mountpoint),
        )
    });
    if json {
        let list = described.map(|(m, view, stats)| {
            json!({ "mountpoint": m.mountpoint.to_string_lossy(), "source": m.source.to_string_lossy(),
                "view": view, "stats": stats, "stale": view.is_none() })
        });
        writeln!(out, "{:#}", list.collect::<Value>())?;
        return Ok(());
    }
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |now| now.as_secs());
    for (m, view, stats) in described {
        let view = view.unwrap_or_else(|| "stale".to_owned());
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
    let text = xattr(point, "user.ggufuse.stats")?;
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
fn xattr(path: &Path, name: &str) -> Option<String> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let name = std::ffi::CString::new(name).ok()?;
    let mut value = vec![0u8; 4096];
    // SAFETY: both strings end in NUL, and the buffer is as long as the call is told.
    let n = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    value.truncate(usize::try_from(n).ok()?);
    String::from_utf8(value).ok()
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
