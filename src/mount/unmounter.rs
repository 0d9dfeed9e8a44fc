//! A process that keeps the rights which taking a mount off needs, while the one that serves it gives up its own. It does
//! nothing else: told a path, it unmounts what is there if that is a mount of this program. It ends with the other one.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use parking_lot::Mutex;

use super::table::{FSTYPE, mounts, unmount};

/// The process, as seen by the one that serves.
#[derive(Debug, Default)]
pub struct Unmounter(Option<Running>);

#[derive(Debug)]
struct Running {
    child: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Unmounter {
    /// No other process: for one that keeps its rights.
    pub fn here() -> Unmounter {
        Unmounter(None)
    }

    /// Starts `command`, which has to call [`unmount_when_told`].
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Unmounter> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .current_dir("/")
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Unmounter(Some(Running {
            child,
            pipes: Mutex::new((input, BufReader::new(output))),
        })))
    }

    /// As [`unmount`]; if the process is gone, with the rights that this one has.
    ///
    /// # Errors
    /// As [`unmount`].
    pub fn unmount(&self, path: &Path, lazy: bool) -> io::Result<()> {
        let told = self.0.as_ref().and_then(|it| it.ask(path, lazy).ok());
        told.unwrap_or_else(|| unmount(path, lazy))
    }
}

impl Running {
    /// What the process says; the outer error is that it does not answer.
    fn ask(&self, path: &Path, lazy: bool) -> io::Result<io::Result<()>> {
        let (input, output) = &mut *self.pipes.lock();
        let how = if lazy { b"l" } else { b"u" };
        input.write_all(&[how.as_slice(), path.as_os_str().as_bytes(), b"\0"].concat())?;
        let mut answer = String::new();
        output.read_line(&mut answer)?;
        let (errno, why) = answer
            .trim_end()
            .split_once(' ')
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(match errno.parse() {
            Ok(0) => Ok(()),
            Ok(errno) => Err(io::Error::from_raw_os_error(errno)),
            Err(_) => Err(io::Error::other(why.to_owned())),
        })
    }
}

impl Drop for Unmounter {
    fn drop(&mut self) {
        if let Some(Running { mut child, pipes }) = self.0.take() {
            // The end of its input ends it.
            drop(pipes);
            drop(child.wait());
        }
    }
}

/// What the process does: unmounts what it is told on `input`, and answers on `output`, until the end of `input`.
///
/// # Errors
/// When nobody listens any more.
pub fn unmount_when_told(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    for request in input.split(0) {
        let request = request?;
        let done = match request.split_first() {
            Some((how, path)) => take_off(Path::new(OsStr::from_bytes(path)), *how == b'l'),
            None => Err(io::ErrorKind::InvalidInput.into()),
        };
        match done {
            Ok(()) => writeln!(output, "0 ok")?,
            Err(error) => match error.raw_os_error() {
                Some(errno) => writeln!(output, "{errno} {error}")?,
                None => writeln!(output, "? {}", error.to_string().replace('\n', " "))?,
            },
        }
        output.flush()?;
    }
    Ok(())
}

fn take_off(path: &Path, lazy: bool) -> io::Result<()> {
    let table = mounts()?;
    let top = table.iter().rev().find(|entry| entry.mountpoint == path);
    if top.is_none_or(|entry| entry.fstype != FSTYPE) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    unmount(path, lazy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ours_is_left_alone() {
        let mut answers = Vec::new();
        unmount_when_told(&b"l/\0u/proc\0\0"[..], &mut answers).unwrap();
        let answers = String::from_utf8(answers).unwrap();
        let lines: Vec<&str> = answers.lines().collect();
        assert!(
            lines[0].starts_with("22 ") && lines[1].starts_with("22 "),
            "{answers}"
        );
        assert!(lines[2].starts_with("? "), "{answers}");
        assert!(
            mounts()
                .unwrap()
                .iter()
                .any(|m| m.mountpoint == Path::new("/proc"))
        );
    }
}
