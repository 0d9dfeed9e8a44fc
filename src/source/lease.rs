//! Read leases (fcntl F_SETLEASE): while one is held no process has the file open for writing, and one that wants to
//! waits until we let go. So a range of the map can be handed to the kernel without a check before and after.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use memmap2::Mmap;
use parking_lot::Mutex;
use signal_hook::consts::SIGIO;
use signal_hook::iterator::Signals;

/// A map that stands still: `File` cannot be written by anyone while `held`.
#[derive(Debug)]
pub(super) struct Leased {
    file: Arc<File>,
    map: Mmap,
    held: AtomicBool,
    lent: AtomicUsize,
}

/// A range of the map on loan; the lease is not given back before it is dropped.
#[derive(Debug)]
pub struct Lent {
    leased: Arc<Leased>,
    range: Range<usize>,
}

impl Lent {
    /// The bytes, for a system call to copy. An I/O error of the medium is EFAULT there, but SIGBUS to whoever looks.
    pub fn bytes(&self) -> &[u8] {
        self.leased.map.get(self.range.clone()).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.leased.lent.fetch_sub(1, SeqCst);
    }
}

/// All that may have to be given back, looked through by the thread that SIGIO wakes.
static HELD: Mutex<Vec<Weak<Leased>>> = Mutex::new(Vec::new());

impl Leased {
    /// Takes the lease and maps the file. `None` where the file system, its owner or a writer does not let us.
    pub(super) fn take(file: &Arc<File>) -> Option<Arc<Leased>> {
        if !is_local(file) || !watch() {
            return None;
        }
        // SAFETY: read-only, handed to system calls alone (see `Lent`), and no one can write or truncate the file
        // while `held`; after that nothing is lent.
        let map = unsafe { Mmap::map(&**file) }.ok()?;
        let leased = Arc::new(Leased {
            file: Arc::clone(file),
            map,
            held: AtomicBool::new(true),
            lent: AtomicUsize::new(0),
        });
        let mut all = HELD.lock();
        // Under the lock, so that a break that comes at once finds the entry.
        set_lease(file, libc::F_RDLCK).ok()?;
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&leased));
        Some(leased)
    }

    /// A range on loan; `None` once the lease is gone, and for a range past the end.
    pub(super) fn lend(self: &Arc<Leased>, offset: u64, len: u64) -> Option<Lent> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        if end > self.map.len() {
            return None;
        }
        // Counted first, then asked: `give_back` clears first, then waits for the count.
        self.lent.fetch_add(1, SeqCst);
        let lent = Lent {
            leased: Arc::clone(self),
            range: start..end,
        };
        self.held.load(SeqCst).then_some(lent)
    }

    /// Whether someone waits for the file.
    fn is_wanted(&self) -> bool {
        // SAFETY: takes no pointer.
        let now = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETLEASE) };
        now != libc::F_RDLCK
    }

    fn give_back(&self) {
        self.held.store(false, SeqCst);
        while self.lent.load(SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        if let Err(error) = set_lease(&self.file, libc::F_UNLCK) {
            log::debug!("a lease was gone already: {error}");
        }
    }
}

impl Drop for Leased {
    /// The descriptor may live on in the pool: a lease that nobody watches would block writers.
    fn drop(&mut self) {
        if self.held.load(SeqCst) {
            drop(set_lease(&self.file, libc::F_UNLCK));
        }
    }
}

/// Whether a lease is refused because somebody has the file open for writing. The file must not be leased.
pub(super) fn has_writer(file: &File) -> bool {
    if !watch() {
        return false;
    }
    match set_lease(file, libc::F_RDLCK) {
        Ok(()) => {
            drop(set_lease(file, libc::F_UNLCK));
            false
        }
        Err(error) => error.raw_os_error() == Some(libc::EAGAIN),
    }
}

fn set_lease(file: &File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: takes no pointer.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// File systems of this machine alone: what changes their files asks this kernel, which asks us.
fn is_local(file: &File) -> bool {
    const LOCAL: [i64; 10] = [
        0xEF53,      // ext2, ext3, ext4
        0x5846_5342, // XFS
        0x9123_683E, // Btrfs
        0x0102_1994, // tmpfs
        0xF2F5_2010, // F2FS
        0x2FC1_2FC1, // ZFS
        0xCA45_1A4E, // bcachefs
        0x4D44,      // FAT
        0x2011_BAB0, // exFAT
        0x7366_746E, // NTFS
    ];
    // SAFETY: all-zero bytes are a valid statfs, which the call fills.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the pointer is to a live statfs.
    let failed = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut fs) } != 0;
    #[allow(
        clippy::useless_conversion,
        reason = "the field's type differs between C libraries"
    )]
    let kind = i64::from(fs.f_type);
    !failed && LOCAL.contains(&kind)
}

/// Starts the thread that gives leases back, once. Before the first lease: SIGIO without a handler ends the process.
fn watch() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    *STARTED.get_or_init(|| {
        let Ok(mut signals) = Signals::new([SIGIO]) else {
            return false;
        };
        let run = move || {
            for _ in signals.forever() {
                let all: Vec<_> = HELD.lock().iter().filter_map(Weak::upgrade).collect();
                let wanted = all
                    .iter()
                    .filter(|leased| leased.held.load(SeqCst) && leased.is_wanted());
                wanted.for_each(|leased| leased.give_back());
            }
        };
        std::thread::Builder::new()
            .name("leases".to_owned())
            .spawn(run)
            .is_ok()
    })
}
