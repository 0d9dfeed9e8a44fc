//! How far a copy is: a bar on a terminal, else a line now and then. Signals end the copy, not the process.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::export::{Event, Watch};

/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

/// Shows the events of an export on stderr.
pub(super) struct Progress {
    bar: ProgressBar,
    /// Where there is no terminal: when the last line was printed.
    last: Instant,
    began: Instant,
    /// Called for every event, with the bar out of the way.
    say: Box<dyn FnMut(Event<'_>)>,
    stop: Arc<AtomicBool>,
}

impl Progress {
    /// For `total` bytes; `say` prints what is to be printed of an event besides the progress.
    ///
    /// # Errors
    /// When a signal cannot be handled.
    pub(super) fn new(
        total: u64,
        say: impl FnMut(Event<'_>) + 'static,
    ) -> std::io::Result<Progress> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The second one ends the process as it is; that loses nothing either.
            flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))?;
            flag::register(signal, Arc::clone(&stop))?;
        }
        // On stderr, and hidden where that is no terminal.
        let bar = ProgressBar::new(total);
        let template = "{wide_bar} {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let now = Instant::now();
        Ok(Progress {
            bar,
            last: now,
            began: now,
            say: Box::new(say),
            stop,
        })
    }

    /// Prints something with the bar out of the way.
    pub(super) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Sets how many bytes are to come, where that is known only now.
    fn expect(&mut self, total: u64) {
        if self.bar.length() == Some(0) {
            self.bar.set_length(total);
        }
    }

    fn line(&mut self) {
        if self.last.elapsed() < EVERY || std::io::stderr().is_terminal() {
            return;
        }
        self.last = Instant::now();
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let seconds = self.began.elapsed().as_secs_f64();
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a speed for people"
        )]
        let speed = (done as f64 / seconds.max(0.001)) as u64;
        let left = all.saturating_sub(done).checked_div(speed);
        let left = left.map_or_else(String::new, |left| {
            format!(", {} left", HumanDuration(Duration::from_secs(left)))
        });
        let (done, all, speed) = (HumanBytes(done), HumanBytes(all), HumanBytes(speed));
        drop(writeln!(
            std::io::stderr(),
            "{done} of {all}, {speed}/s{left}"
        ));
    }
}

impl Watch for Progress {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Copied(n) => {
                self.bar.inc(n);
                self.line();
            }
            Event::Writing(_, total) => self.expect(total),
            Event::Written(_) | Event::Kept(_) | Event::Deleted(_) => {}
        }
        let say = &mut self.say;
        if !matches!(event, Event::Copied(_)) {
            self.bar.suspend(|| say(event));
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A line on stderr.
pub(super) fn note(path: &Path, what: &str) {
    drop(writeln!(std::io::stderr(), "{}: {what}", path.display()));
}
