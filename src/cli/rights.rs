//! Which rights a mount has and keeps. It becomes the user that was named before it looks at anything; once it has mounted
//! it keeps what reading its sources takes, and nothing else. Another process, started before that, unmounts in the end.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::exit::CliError;
use crate::confine::{self, Capabilities, Confined, Reach, User};
use crate::mount::{CacheMode, Unmounter};

/// The hidden verb of the process that unmounts.
pub(super) const UNMOUNTER: &str = "unmounter";

/// Becomes the user, who keeps the right to mount until [`Kept::give_up`].
///
/// # Errors
/// `Usage` when there is no such user, `Failed` when not root.
pub(super) fn become_user(user: &str) -> Result<(), CliError> {
    let found = User::find(user).map_err(|why| CliError::Usage(format!("--user {why}")))?;
    found
        .become_now(Capabilities::SYS_ADMIN)
        .map_err(|e| CliError::Failed(format!("--user {user}: {e} (only root can)")))
}

/// Starts the process that unmounts.
///
/// # Errors
/// `Failed` when it cannot be started.
pub(super) fn start_unmounter() -> Result<Unmounter, CliError> {
    let start = || {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ggufuse").arg(UNMOUNTER);
        Unmounter::start(&mut command)
    };
    confine::lending(Capabilities::SYS_ADMIN, start)
        .map_err(|e| CliError::Failed(format!("cannot start the process that unmounts: {e}")))
}

/// The life of the process that unmounts: it goes on when others are told to end, since it ends with the one it works for.
///
/// # Errors
/// `Write` when that one does not listen.
pub(super) fn unmounter() -> Result<(), CliError> {
    // SAFETY: setsid and signal take no pointer to memory of ours; SIG_IGN is no handler.
    unsafe {
        libc::setsid();
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    crate::mount::unmount_when_told(io::stdin().lock(), io::stdout().lock())?;
    Ok(())
}

/// What a mount needs until its end.
#[derive(Debug)]
pub(super) struct Kept {
    pub cache: CacheMode,
    /// Confine to `sources`?
    pub landlock: bool,
    /// Folders that sources are opened in, now and when they change.
    pub sources: Vec<PathBuf>,
}

impl Kept {
    /// Gives up all else. To be called while there is one thread, after mounting.
    ///
    /// # Errors
    /// Of the system calls. That the kernel has no Landlock is logged.
    pub(super) fn give_up(self) -> io::Result<()> {
        // Sources of others may be read, and kept from changing, by root; not by the user that root has become.
        let mut keep = Capabilities::DAC_READ_SEARCH | Capabilities::LEASE;
        if self.cache == CacheMode::Passthrough {
            // The kernel asks for it whenever it is given a file to read itself.
            keep |= Capabilities::SYS_ADMIN;
        }
        confine::drop_capabilities(keep)?;
        if !self.landlock {
            return Ok(());
        }
        let confined = confine::confine(&self.reach()).map_err(io::Error::other)?;
        match confined {
            Confined::Fully => log::debug!("confined to the sources"),
            Confined::Partly => log::debug!("confined to the sources as far as this kernel can"),
            Confined::Not => log::info!("this kernel has no Landlock: not confined to the sources"),
        }
        Ok(())
    }

    /// Beside the sources: what a process that asks a GPU's driver has to open.
    fn reach(self) -> Reach {
        let mut run: Vec<PathBuf> = [
            "/usr",
            "/lib",
            "/lib64",
            "/bin",
            "/opt",
            "/nix/store",
            "/run/opengl-driver",
        ]
        .map(PathBuf::from)
        .to_vec();
        run.extend(std::env::current_exe());
        run.extend(
            std::env::var_os("LD_LIBRARY_PATH")
                .iter()
                .flat_map(std::env::split_paths),
        );
        let mut read = self.sources;
        read.extend(
            [
                "/proc",
                "/sys",
                "/etc/ld.so.cache",
                "/etc/ld.so.conf",
                "/etc/ld.so.conf.d",
            ]
            .map(PathBuf::from),
        );
        Reach {
            read,
            run,
            devices: vec!["/dev".into()],
        }
    }
}

/// The folders of files, by the paths that are given and where these lead.
pub(super) fn folders<'a>(files: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = files
        .flat_map(|file| {
            let canonical = file.canonicalize().ok();
            [Some(file.to_owned()), canonical].into_iter().flatten()
        })
        .filter_map(|file| file.parent().map(Path::to_owned))
        .collect();
    folders.sort();
    folders.dedup();
    folders
}
