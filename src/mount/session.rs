//! The life of a mount: from mounting until a signal or an unmount from outside.

use std::io;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::fuse::{Adaptor, CacheMode};
use super::table::{FSTYPE, mounts, unmount};
use super::unmounter::Unmounter;
use crate::vfs::{Fs, ROOT};

const POLL: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(10);

const READ_AHEAD_KB: &str = "2048";

/// How to mount.
#[derive(Debug, Clone, Default)]
pub struct MountOptions {
    /// The source in the mount table; empty leaves it to the kernel.
    pub fsname: String,
    /// Other users may enter; the kernel then checks permissions.
    pub allow_other: bool,
    /// Root may enter as well as the owner.
    pub allow_root: bool,
    /// The kernel checks permissions.
    pub default_permissions: bool,
    /// fusermount3 unmounts when the process dies; needs one of the `allow_*`.
    pub auto_unmount: bool,
    /// Whether the kernel caches what it reads.
    pub cache: CacheMode,
    /// Serving threads; 0 means 4.
    pub threads: usize,
}

/// Why a mount ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGINT, SIGTERM or SIGHUP.
    Signal,
    /// It was unmounted by someone else, or the connection was aborted.
    External,
}

impl MountOptions {
    fn config(&self) -> Config {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::RO,
            // fuser leaves `Subtype` out when it mounts without fusermount3; the kernel and fusermount3 take this.
            MountOption::CUSTOM("subtype=ggufuse".into()),
            MountOption::NoSuid,
            MountOption::NoDev,
        ];
        if !self.fsname.is_empty() {
            config
                .mount_options
                .push(MountOption::FSName(self.fsname.clone()));
        }
        // Without the kernel's check, allow_other would let everyone read what only the owner may.
        if self.default_permissions || self.allow_other {
            config.mount_options.push(MountOption::DefaultPermissions);
        }
        if self.auto_unmount {
            config.mount_options.push(MountOption::AutoUnmount);
        }
        config.acl = match (self.allow_other, self.allow_root) {
            (true, _) => SessionACL::All,
            (false, true) => SessionACL::RootAndOwner,
            (false, false) => SessionACL::Owner,
        };
        config.n_threads = Some(if self.threads == 0 { 4 } else { self.threads });
        config.clone_fd = true;
        config
    }
}

/// Mounts `fs`, calls `mounted` when no thread serves as yet, and `ready` once the mount answers, and serves until a
/// signal or an unmount from outside. In the end `unmounter` takes the mount off.
///
/// # Errors
/// Of mounting, of `mounted` and `ready` (the mount is taken off again), or of unmounting.
pub fn serve(
    fs: Arc<Fs>,
    mountpoint: &Path,
    options: &MountOptions,
    unmounter: &Unmounter,
    mounted: impl FnOnce() -> io::Result<()>,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<End> {
    // Before mounting: a signal that found no handler would leave a dead mount point.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let mountpoint = mountpoint.canonicalize()?;
    let below = std::fs::metadata(&mountpoint)?.dev();
    let session = Session::new(
        Adaptor::new(fs, options.cache),
        &mountpoint,
        &options.config(),
    )?;
    let device = device_on_top(&mountpoint);
    if let Some(device) = &device {
        read_ahead(device);
    }
    let session = match mounted().and_then(|()| session.spawn()) {
        Ok(session) => session,
        Err(error) => {
            // The session, which is dropped by now, has taken the mount off if it still had the right to.
            if device.is_some_and(|device| on_top(&mountpoint, &device)) {
                drop(unmounter.unmount(&mountpoint, true));
            }
            return Err(error);
        }
    };
    let started = answers(&mountpoint, below, &session).and_then(|device| ready().map(|()| device));
    let device = match started {
        Ok(device) => device,
        Err(error) => {
            let off = unmounter.unmount(&mountpoint, true);
            mem::forget(session);
            off.unwrap_or_else(|e| log::warn!("{}: unmount: {e}", mountpoint.display()));
            return Err(error);
        }
    };
    loop {
        if session.guard.is_finished() {
            finish(session);
            if on_top(&mountpoint, &device) && is_dead(&mountpoint) {
                // The connection was aborted but the mount is still there, dead.
                unmounter.unmount(&mountpoint, true)?;
            }
            return Ok(End::External);
        }
        if signals.pending().next().is_some() {
            stop(session, &mountpoint, &device, unmounter, &mut signals)?;
            return Ok(End::Signal);
        }
        thread::sleep(POLL);
    }
}

/// Has the kernel read ahead further than the 128 KiB that a mount may ask for at its start: 2 MiB, which fill maps and
/// the page cache faster. Root may; others keep what they have.
fn read_ahead(device: &str) {
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&path, READ_AHEAD_KB) {
        log::debug!("{path}: {error}");
    }
}

/// Waits until the mount answers; its device number as the mount table writes it.
fn answers(mountpoint: &Path, below: u64, session: &BackgroundSession) -> io::Result<String> {
    let start = Instant::now();
    loop {
        let meta = std::fs::metadata(mountpoint);
        if let Ok(meta) = &meta
            && meta.dev() != below
            && meta.ino() == ROOT
        {
            return Ok(format!(
                "{}:{}",
                libc::major(meta.dev()),
                libc::minor(meta.dev())
            ));
        }
        if session.guard.is_finished() || start.elapsed() > PATIENCE {
            meta?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the mount does not answer",
            ));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Asks a mount for its root, past the attributes that the kernel has cached: the question goes through a serving thread.
///
/// # Errors
/// `ENOTCONN` or `ECONNABORTED` when its process is gone.
pub fn ask(mountpoint: &Path) -> io::Result<()> {
    statx(
        CWD,
        mountpoint,
        AtFlags::STATX_FORCE_SYNC,
        StatxFlags::MTIME,
    )?;
    Ok(())
}

/// No process answers for what is mounted there. The device number alone does not tell: the next mount may get ours.
fn is_dead(mountpoint: &Path) -> bool {
    ask(mountpoint).is_err_and(|error| {
        matches!(
            error.raw_os_error(),
            Some(libc::ENOTCONN | libc::ECONNABORTED)
        )
    })
}

/// Takes the mount at `mountpoint` (as the mount table names it) off, if it is one of ours whose process is gone.
/// False when it is not.
///
/// # Errors
/// Of reading the mount table, or of the unmount.
pub fn clear_stale(mountpoint: &Path) -> io::Result<bool> {
    let table = mounts()?;
    let top = table
        .iter()
        .rev()
        .find(|entry| entry.mountpoint == mountpoint);
    if top.is_none_or(|entry| entry.fstype != FSTYPE) || !is_dead(mountpoint) {
        return Ok(false);
    }
    unmount(mountpoint, true).map(|()| true)
}

/// Device number of what an unmount of the path would take.
fn device_on_top(mountpoint: &Path) -> Option<String> {
    let table = mounts().unwrap_or_default();
    let top = table
        .into_iter()
        .rev()
        .find(|entry| entry.mountpoint == mountpoint);
    top.map(|entry| entry.device)
}

/// Is our mount the one that an unmount of the path would take?
fn on_top(mountpoint: &Path, device: &str) -> bool {
    device_on_top(mountpoint).is_some_and(|top| top == device)
}

/// Where an unmount takes our mount off: the place where it was mounted, or where it was moved to (`mount --move`).
fn place(mountpoint: &Path, device: &str) -> Option<PathBuf> {
    if on_top(mountpoint, device) {
        return Some(mountpoint.to_owned());
    }
    let table = mounts().unwrap_or_default();
    let mut ours = table.into_iter().filter(|entry| entry.device == device);
    let moved = ours.find(|entry| on_top(&entry.mountpoint, device))?;
    Some(moved.mountpoint)
}

/// Unmounts, lazily when busy, and lets the serving threads end. A second signal ends the waiting.
fn stop(
    session: BackgroundSession,
    mountpoint: &Path,
    device: &str,
    unmounter: &Unmounter,
    signals: &mut Signals,
) -> io::Result<()> {
    if session.guard.is_finished() {
        mem::forget(session);
        return Ok(());
    }
    let Some(mountpoint) = place(mountpoint, device) else {
        log::warn!(
            "{}: something else is mounted on top; it is left alone",
            mountpoint.display()
        );
        mem::forget(session);
        return Ok(());
    };
    let mountpoint = mountpoint.as_path();
    match unmounter.unmount(mountpoint, false) {
        Ok(()) => {
            let start = Instant::now();
            while !session.guard.is_finished()
                && start.elapsed() < PATIENCE
                && signals.pending().next().is_none()
            {
                thread::sleep(Duration::from_millis(5));
            }
            finish(session);
            Ok(())
        }
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            log::warn!(
                "{}: files are still open; unmounted lazily, their readers get errors",
                mountpoint.display()
            );
            mem::forget(session);
            unmounter.unmount(mountpoint, true)
        }
        Err(error) => {
            log::warn!(
                "{}: unmount: {error}; unmounting lazily",
                mountpoint.display()
            );
            mem::forget(session);
            unmounter.unmount(mountpoint, true)
        }
    }
}

/// Reports how an ended session ended. It is forgotten, not dropped: dropping unmounts the path again, and takes
/// off whatever lies beneath.
fn finish(mut session: BackgroundSession) {
    if session.guard.is_finished()
        && let Ok(stub) = thread::Builder::new().spawn(|| Ok(()))
    {
        match mem::replace(&mut session.guard, stub).join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warn!("the FUSE session ended: {error}"),
            Err(_) => log::error!("the FUSE session panicked"),
        }
    }
    mem::forget(session);
}
