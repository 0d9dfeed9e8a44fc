//! Keeps one cause from filling the log: each place in the code may log so many lines at once, and then so many a second.
//! What is left out is counted, and said with the next line from there. Control characters are escaped.

use std::collections::HashMap;
use std::time::Instant;

use log::{Level, Log, Metadata, Record};
use parking_lot::Mutex;

/// Lines at once.
const BURST: f64 = 100.0;
/// Lines a second after that.
const RATE: f64 = 2.0;

/// A logger that hands on what the limit lets through. What is for debugging is not limited.
pub(super) struct Limited<L> {
    pub inner: L,
    pub places: Mutex<Places>,
}

/// The places that have logged, by file and line.
#[derive(Default)]
pub(super) struct Places(HashMap<(Option<&'static str>, Option<u32>), Place>);

struct Place {
    /// Lines that may be logged now.
    left: f64,
    at: Instant,
    left_out: u64,
}

impl Places {
    /// Whether a line from this place may be logged at `now`, and how many were left out since the last one.
    fn admit(
        &mut self,
        file: Option<&'static str>,
        line: Option<u32>,
        now: Instant,
    ) -> Option<u64> {
        let place = self.0.entry((file, line)).or_insert(Place {
            left: BURST,
            at: now,
            left_out: 0,
        });
        let passed = now.saturating_duration_since(place.at).as_secs_f64();
        place.left = BURST.min(passed.mul_add(RATE, place.left));
        place.at = now;
        if place.left < 1.0 {
            place.left_out = place.left_out.saturating_add(1);
            return None;
        }
        place.left -= 1.0;
        Some(std::mem::take(&mut place.left_out))
    }
}

impl<L: Log> Log for Limited<L> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.inner.enabled(record.metadata()) {
            return;
        }
        if record.level() <= Level::Info {
            let (file, line) = (record.file_static(), record.line());
            let admitted = self.places.lock().admit(file, line, Instant::now());
            match admitted {
                None => return,
                Some(0) => {}
                Some(left_out) => {
                    let mut note = Record::builder();
                    note.metadata(record.metadata().clone());
                    self.inner.log(
                        &note
                            .args(format_args!("{left_out} lines like the next were left out"))
                            .build(),
                    );
                }
            }
        }
        let text = record.args().to_string();
        if !text.contains(is_unsafe) {
            return self.inner.log(record);
        }
        // File names may have anything in them, a terminal's commands too.
        let shown: String = text
            .chars()
            .flat_map(|c| match is_unsafe(c) {
                true => c.escape_default().collect::<Vec<_>>(),
                false => vec![c],
            })
            .collect();
        let mut shown_record = record.to_builder();
        self.inner
            .log(&shown_record.args(format_args!("{shown}")).build());
    }

    fn flush(&self) {
        self.inner.flush();
    }
}

/// Lists of problems have line breaks; what follows one is indented.
fn is_unsafe(c: char) -> bool {
    c.is_control() && c != '\n'
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_then_a_rate_for_each_place() {
        let mut places = Places::default();
        let start = Instant::now();
        let mut admit = |line, after| places.admit(Some("a.rs"), Some(line), start + after);
        let zero = Duration::ZERO;
        let let_through = (0..1000).filter(|_| admit(1, zero).is_some()).count();
        assert_eq!(let_through, 100);
        assert_eq!(admit(2, zero), Some(0), "another place");
        assert_eq!(admit(1, Duration::from_millis(400)), None);
        assert_eq!(admit(1, Duration::from_millis(500)), Some(901));
        assert_eq!(admit(1, Duration::from_millis(500)), None);
        let later = Duration::from_secs(3600);
        let let_through = (0..1000).filter(|_| admit(1, later).is_some()).count();
        assert_eq!(let_through, 100, "it has rested");
    }
}
