use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::exit::CliError;
use crate::mount::{FSTYPE, mounts, unmount};

/// A mount can be busy for a moment after its last file was closed.
const PATIENCE: Duration = Duration::from_secs(1);

pub(super) fn run(point: &Path, lazy: bool) -> Result<(), CliError> {
    let failed = |why: String| CliError::Failed(format!("{}: {why}", point.display()));
    let mounts = mounts().map_err(|e| failed(format!("cannot list mounts: {e}")))?;
    let top = mounts.iter().rev().find(|mount| mount.mountpoint == point);
    if top.is_none_or(|mount| mount.fstype != FSTYPE) {
        return Err(failed("no ggufuse mount".to_owned()));
    }
    let start = Instant::now();
    loop {
        match unmount(point, lazy) {
            Ok(()) => return Ok(()),
            Err(error) if is_busy(&error) && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                let hint = if is_busy(&error) {
                    ": files are open there; close them, or use --lazy"
                } else {
                    ""
                };
                return Err(failed(format!("cannot unmount: {error}{hint}")));
            }
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}
