//! A process that answers on its stdout or is ended: within a time, with an answer of bounded size, whatever it does.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::DEADLINE;

/// More is not read of an answer.
const LONGEST: usize = 1 << 16;
/// More is not kept of what it says on stderr.
const LONGEST_COMPLAINT: usize = 1 << 12;
/// How long we wait for a process that was killed, and how often we look.
const DYING: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(1);

/// A child that has been started.
pub(super) struct Running {
    child: Child,
    out: File,
    err: File,
}

/// Starts it.
///
/// # Errors
/// Why it cannot be started, in words.
pub(super) fn start(command: &mut Command) -> Result<Running, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| format!("cannot start the probe: {e}"))?;
    match (child.stdout.take(), child.stderr.take()) {
        (Some(out), Some(err)) => Ok(Running {
            child,
            out: OwnedFd::from(out).into(),
            err: OwnedFd::from(err).into(),
        }),
        _ => Err("the probe has no pipes".to_owned()),
    }
}

impl Running {
    /// What `parse` makes of its whole stdout, or why there is no answer, in words. After that it is gone, and all that it
    /// has started. A process that hangs in the kernel cannot be ended, though: that is the second value.
    pub(super) fn answer<T>(
        mut self,
        end: Instant,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> (Result<T, String>, Option<Child>) {
        let heard = listen(&mut self.out, &mut self.err, end);
        let (status, held) = kill(self.child);
        let answer = heard
            .map_err(|e| format!("cannot read from the probe: {e}"))
            .and_then(|heard| {
                let why = match (&heard.ended, status) {
                    (Ended::Late, _) => "no answer in time".to_owned(),
                    (Ended::Long, _) => format!("an answer of more than {LONGEST} bytes"),
                    (Ended::Closed, Some(status)) if !status.success() => {
                        format!("the probe ended with {status}")
                    }
                    (Ended::Closed, _) => "the answer cannot be read".to_owned(),
                };
                // A whole answer counts, however the process has ended after it.
                let parsed = matches!(heard.ended, Ended::Closed).then(|| parse(&heard.out));
                parsed.flatten().ok_or_else(|| match last_line(&heard.err) {
                    Some(line) => format!("{why}: {line}"),
                    None => why,
                })
            });
        (answer, held)
    }
}

enum Ended {
    /// It closed its stdout.
    Closed,
    /// The time was over.
    Late,
    /// It said too much.
    Long,
}

struct Heard {
    out: Vec<u8>,
    err: Vec<u8>,
    ended: Ended,
}

/// Reads both until the first is closed.
fn listen(out: &mut File, err: &mut File, end: Instant) -> io::Result<Heard> {
    let mut heard = Heard {
        out: Vec::new(),
        err: Vec::new(),
        ended: Ended::Closed,
    };
    let (mut out_open, mut err_open) = (true, true);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // Once stdout is closed, only what has been said on stderr already.
        let wait = if out_open { left } else { Duration::ZERO };
        let [out_ready, err_ready] = ready([(out, out_open), (err, err_open)], wait)?;
        if err_ready {
            err_open = take(err, &mut heard.err)?;
            heard.err.truncate(LONGEST_COMPLAINT);
        }
        if out_ready {
            out_open = take(out, &mut heard.out)?;
            if heard.out.len() > LONGEST {
                heard.ended = Ended::Long;
                return Ok(heard);
            }
        }
        if out_open && !out_ready && left.is_zero() {
            heard.ended = Ended::Late;
            return Ok(heard);
        }
        if !out_open && (!err_ready || left.is_zero()) {
            return Ok(heard);
        }
    }
}

/// Which of the open ones have something to read, or are at their end, waiting for that long at most.
fn ready(files: [(&File, bool); 2], wait: Duration) -> io::Result<[bool; 2]> {
    let mut polled = files.map(|(file, open)| libc::pollfd {
        // A negative descriptor is passed over.
        fd: if open { file.as_raw_fd() } else { -1 },
        events: libc::POLLIN,
        revents: 0,
    });
    // Rounded up, so that it does not spin through the last millisecond.
    let wait = i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: the array is as long as the call is told.
    let n = unsafe { libc::poll(polled.as_mut_ptr(), 2, wait) };
    match io::Error::last_os_error() {
        e if n < 0 && e.kind() != io::ErrorKind::Interrupted => Err(e),
        _ if n <= 0 => Ok([false; 2]),
        _ => Ok(polled.map(|p| p.revents != 0)),
    }
}

/// What is there to read now; false at the end.
fn take(file: &mut File, into: &mut Vec<u8>) -> io::Result<bool> {
    let mut piece = [0u8; 4096];
    match file.read(&mut piece) {
        Ok(n) => {
            into.extend(piece.iter().take(n));
            Ok(n > 0)
        }
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
        Err(e) => Err(e),
    }
}

/// Kills the child and what it has started, and reaps it, or gives it back if the kernel does not let it go.
fn kill(mut child: Child) -> (Option<ExitStatus>, Option<Child>) {
    if let Ok(group) = i32::try_from(child.id()) {
        // SAFETY: kill takes no pointers. The child is not reaped, so the number is still that of its group.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    let end = Instant::now() + DYING;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return (Some(status), None),
            Ok(None) if Instant::now() < end => thread::sleep(LOOK),
            _ => return (None, Some(child)),
        }
    }
}

/// The last line that is not empty, without control characters, cut to a readable length.
fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    let shown = line.chars().filter(|c| !c.is_control()).take(200);
    Some(shown.collect())
}

/// In the child: it ends by itself soon after the deadline, even if who started it is gone, and leaves no core file.
pub(super) fn end_by_itself() {
    let after = u32::try_from(DEADLINE.as_secs()).unwrap_or(u32::MAX - 1) + 1;
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointer is to a local value; the other call takes none. Should one fail, the parent's deadline still holds.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::alarm(after);
    }
}
