//! What a service manager is told over `NOTIFY_SOCKET`: readiness, a line of status, that the mount still answers, the end.
//! Without that variable nothing is sent.

use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::mount::ask;

/// The mount answers. The status is what `systemctl status` shows.
pub(super) fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The mount is being taken down.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("the service manager cannot be told: {error}");
    }
}

/// Tells the watchdog that the mount at `point` answers, twice in the time that it allows, if it wants to know. The question
/// goes through the kernel and a serving thread, so threads that hang stop the answers.
///
/// # Errors
/// When no thread can be started.
pub(super) fn watch(point: &Path) -> io::Result<()> {
    let Some(allowed) = sd_notify::watchdog_enabled() else {
        return Ok(());
    };
    let point = point.to_owned();
    let ask = move || {
        loop {
            match ask(&point) {
                Ok(()) => notify(&[NotifyState::Watchdog]),
                Err(error) => log::warn!("{}: the mount does not answer: {error}", point.display()),
            }
            thread::sleep(allowed.min(Duration::from_secs(3600)) / 2);
        }
    };
    let named = thread::Builder::new().name("watchdog".to_owned());
    named.spawn(ask).map(drop)
}
