//! Background start: the same command runs again as a child in a session of its own and says on stdout when
//! the mount answers. Readiness is a message, not a sleep; the child's own stderr says what went wrong.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::exit::{self, CliError};

/// Set for the child.
const CHILD: &str = "GGUFUSE_BACKGROUND_CHILD";

/// Whether this is the child.
pub(super) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Starts the child and waits until it is ready or has failed.
///
/// # Errors
/// `Child` with the child's exit code.
pub(super) fn start() -> Result<(), CliError> {
    let failed =
        |error: io::Error| CliError::Mount(format!("cannot start the background process: {error}"));
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_else(|| "ggufuse".into());
    let mut child = Command::new("/proc/self/exe")
        .arg0(name)
        .args(args)
        .env(CHILD, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut said = Vec::new();
    if let Some(pipe) = child.stdout.take() {
        pipe.take(1).read_to_end(&mut said).map_err(failed)?;
    }
    if !said.is_empty() {
        return Ok(());
    }
    let status = child.wait().map_err(failed)?;
    Err(CliError::Child(
        status
            .code()
            .and_then(|c| u8::try_from(c).ok())
            .filter(|&c| c != exit::OK)
            .unwrap_or(1),
    ))
}

/// In the child, once it has mounted: leaves the terminal's session. Not before: an automount that waits for this mount
/// lets only the process group through that the mount was started in.
pub(super) fn detach() {
    // SAFETY: setsid takes no pointers. It fails only for a group leader, which a fresh child is not.
    unsafe { libc::setsid() };
}

/// In the child: tells the parent, then lets go of the terminal and of the working directory.
pub(super) fn report_ready() -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(b"\n")?;
    out.flush()?;
    std::env::set_current_dir("/")?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for fd in [1, 2] {
        // SAFETY: both descriptors are open; dup2 replaces the second atomically.
        if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
