//! The command under ptrace: stopped at every system call, before and after it, and killed where a test likes.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A stop at a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    /// Its number.
    pub nr: i64,
    pub args: [u64; 6],
    /// Before it is done; else after.
    pub before: bool,
}

/// `ggufuse` with these arguments. All calls must come from the thread that started it.
pub struct Traced {
    pid: libc::pid_t,
    /// Of the call under way.
    call: Option<Stop>,
    ended: Option<i32>,
}

impl Traced {
    pub fn start(args: &[&str]) -> Traced {
        Traced::logging(args, Path::new("/dev/null"))
    }

    /// With its stderr in a file.
    pub fn logging(args: &[&str], stderr: &Path) -> Traced {
        let log = File::create(stderr).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggufuse"));
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        // SAFETY: between fork and exec only one system call is made.
        unsafe {
            command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let pid = command.spawn().unwrap().id().try_into().unwrap();
        let mut traced = Traced {
            pid,
            call: None,
            ended: None,
        };
        // The stop at its exec.
        traced.wait();
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        // SAFETY: of a child that is stopped; takes no pointer.
        let set = unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid, 0, options) };
        assert_eq!(set, 0);
        traced
    }

    /// Status of the next stop, or none once it has ended.
    fn wait(&mut self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: the pointer is to a live int.
        let got = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
        assert_eq!(got, self.pid);
        if libc::WIFSTOPPED(status) {
            return Some(libc::WSTOPSIG(status));
        }
        self.ended = Some(if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            -libc::WTERMSIG(status)
        });
        None
    }

    /// On to the next stop at a system call; none once it has ended.
    pub fn step(&mut self) -> Option<Stop> {
        let mut signal = 0;
        loop {
            // SAFETY: of a child that is stopped; takes no pointer.
            unsafe { libc::ptrace(libc::PTRACE_SYSCALL, self.pid, 0, signal) };
            match self.wait()? {
                stop if stop == libc::SIGTRAP | 0x80 => break,
                other => signal = other,
            }
        }
        if let Some(call) = self.call.take() {
            return Some(Stop {
                before: false,
                ..call
            });
        }
        // SAFETY: all-zero bytes are a valid ptrace_syscall_info.
        let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
        let size = size_of_val(&info);
        // SAFETY: the pointer is to a live struct of the size that is given.
        let got =
            unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, self.pid, size, &raw mut info) };
        assert!(got > 0, "{}", std::io::Error::last_os_error());
        // SAFETY: at an entry this variant is the one that is filled in.
        let entry = unsafe { info.u.entry };
        let stop = Stop {
            nr: entry.nr as i64,
            args: entry.args,
            before: true,
        };
        self.call = Some(stop);
        Some(stop)
    }

    /// Another signal, which it gets with its next step.
    pub fn signal(&self, signal: i32) {
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { libc::kill(self.pid, signal) }, 0);
    }

    /// The most memory that it has had, in KiB.
    pub fn peak_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// kill -9, where it stands.
    pub fn kill(mut self) {
        // SAFETY: takes no pointer.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        while self.ended.is_none() {
            self.wait();
        }
    }

    /// Lets it go on to its end. Returns the exit code.
    pub fn finish(mut self) -> i32 {
        while self.ended.is_none() {
            self.step();
        }
        self.ended.unwrap()
    }
}
