//! When a library changes: inotify on every directory of it.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use inotify::{Inotify, WatchDescriptor, WatchMask};

use super::scan::{Library, Scan};

/// Events that follow each other are answered together: at least this long after the first one, and for long enough that
/// the scans take a fifth of the time at most.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Where a directory cannot be watched the library is read again after this time.
const POLL: Duration = Duration::from_secs(1);

/// Watches a library.
#[derive(Debug)]
pub struct Watch {
    library: Library,
    inotify: Option<Inotify>,
    watched: HashSet<WatchDescriptor>,
    /// Not every directory can be watched.
    partial: bool,
    /// How long the last scan took.
    took: Duration,
    reported: HashSet<PathBuf>,
}

impl Watch {
    /// Watches nothing before the first scan.
    pub fn new(library: Library) -> Watch {
        let inotify = Inotify::init();
        let inotify = inotify.map_err(|error| log::warn!("{}", slow(&error)));
        Watch {
            library,
            inotify: inotify.ok(),
            watched: HashSet::new(),
            partial: false,
            took: Duration::ZERO,
            reported: HashSet::new(),
        }
    }

    /// What is watched.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Reads the library, and watches every directory that is read from then on.
    pub fn scan(&mut self) -> Scan {
        let start = Instant::now();
        let (mut now, mut at_root, mut failed) = (HashSet::new(), false, None);
        let (inotify, root) = (self.inotify.as_ref(), &self.library.root);
        let scan = self.library.scan(&mut |dir| match add(inotify, dir) {
            Ok(watch) => {
                at_root |= dir == root;
                now.insert(watch);
            }
            Err(error) => failed = Some(error),
        });
        for gone in self.watched.difference(&now) {
            remove(inotify, gone.clone());
        }
        self.watched = now;
        if let Some(error) = failed.as_ref().filter(|_| !self.partial) {
            log::warn!("{}", slow(error));
        }
        self.partial = failed.is_some() || !at_root;
        for (dir, error) in &scan.problems {
            if self.reported.insert(dir.clone()) {
                log::warn!("{}: cannot be read: {error}", dir.display());
            }
        }
        self.took = start.elapsed();
        scan
    }

    /// Waits until something has changed since the last scan, or may have.
    pub fn wait(&mut self) {
        let Some(inotify) = self.inotify.as_mut().filter(|_| !self.partial) else {
            thread::sleep(POLL);
            return;
        };
        let mut events = [0; 4096];
        match inotify.read_events_blocking(&mut events) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::warn!("{}", slow(&error));
                self.inotify = None;
                return;
            }
        }
        thread::sleep((self.took * 4).clamp(PAUSE, LONGEST_PAUSE));
        // Whatever else has happened meanwhile is seen by the next scan.
        while inotify
            .read_events(&mut events)
            .is_ok_and(|mut events| events.next().is_some())
        {}
    }
}

fn add(inotify: Option<&Inotify>, dir: &Path) -> io::Result<WatchDescriptor> {
    let inotify = inotify.ok_or(io::ErrorKind::Unsupported)?;
    let changes = WatchMask::CREATE
        | WatchMask::MOVE
        | WatchMask::DELETE
        | WatchMask::CLOSE_WRITE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    inotify.watches().add(dir, changes)
}

fn remove(inotify: Option<&Inotify>, watch: WatchDescriptor) {
    // Already gone with its directory, as a rule.
    drop(inotify.map(|inotify| inotify.watches().remove(watch)));
}

fn slow(error: &io::Error) -> String {
    format!(
        "not all directories can be watched ({error}; fs.inotify.max_user_watches may be too low): the library is read again every {} s",
        POLL.as_secs()
    )
}
