//! What a mount has done: counters that many threads add to, and a copy of them to be shown.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use super::error::VfsError;

/// Upper bounds of the latency histogram, microseconds. What took longer counts in the total alone.
const BOUNDS: [u64; 16] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000,
    1_000_000, 10_000_000,
];

/// Errno numbers of Linux end below this.
const ERRNOS: usize = 134;

#[derive(Debug)]
pub(super) struct Stats {
    /// Seconds from the epoch to the start.
    since: u64,
    reads: AtomicU64,
    bytes: AtomicU64,
    /// Reads by the first bound that they did not exceed.
    buckets: [AtomicU64; BOUNDS.len()],
    nanoseconds: AtomicU64,
    opens: AtomicU64,
    /// Reads and opens that failed, by errno.
    errors: [AtomicU64; ERRNOS],
    plan_hits: AtomicU64,
    plans: AtomicU64,
    changes: AtomicU64,
    computed: AtomicU64,
    no_memory: AtomicU64,
    not_computed: AtomicU64,
}

impl Stats {
    pub(super) fn new() -> Stats {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        Stats {
            since: now.map_or(0, |since| since.as_secs()),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            buckets: zeros(),
            nanoseconds: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            errors: std::array::from_fn(|_| AtomicU64::new(0)),
            plan_hits: AtomicU64::new(0),
            plans: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            computed: AtomicU64::new(0),
            no_memory: AtomicU64::new(0),
            not_computed: AtomicU64::new(0),
        }
    }

    /// A read that is answered with so many bytes.
    pub(super) fn read(&self, bytes: usize) {
        self.reads.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// How long it took, the answer included.
    pub(super) fn took(&self, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Relaxed);
        let bound = BOUNDS.partition_point(|&bound| bound.saturating_mul(1000) < nanoseconds);
        if let Some(bucket) = self.buckets.get(bound) {
            bucket.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn open(&self) {
        self.opens.fetch_add(1, Relaxed);
    }

    /// A file whose bytes are computed at each open was opened.
    pub(super) fn computed<T>(&self, result: Result<T, VfsError>) -> Result<T, VfsError> {
        let count = match &result {
            Ok(_) => &self.computed,
            Err(VfsError::NoMemory) => &self.no_memory,
            Err(_) => &self.not_computed,
        };
        count.fetch_add(1, Relaxed);
        result
    }

    /// A plan was there when it was needed.
    pub(super) fn plan_hit(&self) {
        self.plan_hits.fetch_add(1, Relaxed);
    }

    /// A model was planned.
    pub(super) fn plan(&self) {
        self.plans.fetch_add(1, Relaxed);
    }

    /// A source was found changed.
    pub(super) fn change(&self) {
        self.changes.fetch_add(1, Relaxed);
    }

    /// Takes note of a failure.
    pub(super) fn count<T>(&self, result: Result<T, VfsError>) -> Result<T, VfsError> {
        if let Err(error) = &result {
            let errno = usize::try_from(error.errno()).unwrap_or(0);
            if let Some(count) = self.errors.get(errno).or(self.errors.first()) {
                count.fetch_add(1, Relaxed);
            }
        }
        result
    }

    pub(super) fn copy(&self, open_handles: usize, models: Models) -> Statistics {
        let mut sum = 0u64;
        let buckets = BOUNDS.iter().zip(&self.buckets).map(|(&bound, count)| {
            sum = sum.saturating_add(count.load(Relaxed));
            (Duration::from_micros(bound), sum)
        });
        let buckets = buckets.collect();
        let errors = (0..).zip(&self.errors);
        Statistics {
            since: self.since,
            reads: self.reads.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            buckets,
            took: Duration::from_nanos(self.nanoseconds.load(Relaxed)),
            opens: self.opens.load(Relaxed),
            errors: errors
                .map(|(errno, count)| (errno, count.load(Relaxed)))
                .filter(|&(_, count)| count > 0)
                .collect(),
            open_handles: open_handles as u64,
            plan_hits: self.plan_hits.load(Relaxed),
            plans: self.plans.load(Relaxed),
            changes: self.changes.load(Relaxed),
            computed: self.computed.load(Relaxed),
            no_memory: self.no_memory.load(Relaxed),
            not_computed: self.not_computed.load(Relaxed),
            models,
        }
    }
}

/// Models by what was last found out about them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Models {
    /// Their files are served.
    pub served: u64,
    /// They cannot be served.
    pub refused: u64,
    /// Nobody has looked as yet.
    pub unseen: u64,
}

/// The counters of a mount at one moment, since its start. They are read one after the other, while others add to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// Seconds from the epoch to the start.
    pub since: u64,
    /// Reads that were answered.
    pub reads: u64,
    /// Bytes that these gave.
    pub bytes: u64,
    /// How long they took: upper bounds, and how many did not take longer.
    pub buckets: Vec<(Duration, u64)>,
    /// How long they took together.
    pub took: Duration,
    /// Files opened.
    pub opens: u64,
    /// Reads and opens that failed: errno, and how many.
    pub errors: Vec<(i32, u64)>,
    /// Files that are open now.
    pub open_handles: u64,
    /// How often a model's plan was in memory when it was needed.
    pub plan_hits: u64,
    /// How often a model was planned.
    pub plans: u64,
    /// How often a source was found changed.
    pub changes: u64,
    /// Opens of files whose bytes are computed then: that gave some,
    pub computed: u64,
    /// that did not fit into the memory that is free,
    pub no_memory: u64,
    /// or that failed.
    pub not_computed: u64,
    /// The models.
    pub models: Models,
}

impl Statistics {
    /// All failures.
    pub fn errors_total(&self) -> u64 {
        let counts = self.errors.iter().map(|&(_, count)| count);
        counts.fold(0, u64::saturating_add)
    }

    /// Value of `user.ggufuse.stats`: a name and a number a line.
    pub(super) fn text(&self) -> String {
        let Models {
            served,
            refused,
            unseen,
        } = self.models;
        let mut text = format!(
            "since {}\nreads {}\nbytes {}\nerrors {}\nopen_handles {}\nopens {}\nread_seconds {}\nplans {}\nplan_hits {}\n\
             changes {}\ncomputed {}\nno_memory {}\nnot_computed {}\nmodels_served {served}\nmodels_refused {refused}\nmodels_unseen {unseen}\n",
            self.since,
            self.reads,
            self.bytes,
            self.errors_total(),
            self.open_handles,
            self.opens,
            self.took.as_secs(),
            self.plans,
            self.plan_hits,
            self.changes,
            self.computed,
            self.no_memory,
            self.not_computed,
        );
        for (errno, count) in &self.errors {
            text.push_str(&format!("errors_errno_{errno} {count}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_bounds_are_inside() {
        let stats = Stats::new();
        let micros = Duration::from_micros;
        for took in [
            micros(0),
            micros(10),
            micros(11),
            micros(1_000),
            micros(99_000_000),
        ] {
            stats.read(7);
            stats.took(took);
        }
        let copy = stats.copy(3, Models::default());
        let count = |bound| {
            let at = |&&(b, _): &&(Duration, u64)| b == bound;
            copy.buckets.iter().find(at).unwrap().1
        };
        assert_eq!(count(micros(10)), 2);
        assert_eq!(count(micros(25)), 3);
        assert_eq!(count(micros(500)), 3);
        assert_eq!(count(micros(1_000)), 4);
        assert_eq!(count(micros(10_000_000)), 4);
        assert_eq!((copy.reads, copy.bytes, copy.open_handles), (5, 35, 3));
        assert_eq!(copy.took, micros(99_001_021));
    }

    #[test]
    fn errors_count_by_errno() {
        let stats = Stats::new();
        for error in [VfsError::Stale, VfsError::Stale, VfsError::IsDir] {
            assert!(stats.count::<()>(Err(error)).is_err());
        }
        assert!(stats.count(Ok(())).is_ok());
        let copy = stats.copy(0, Models::default());
        assert_eq!(copy.errors, [(libc::EISDIR, 1), (libc::ESTALE, 2)]);
        assert_eq!(copy.errors_total(), 3);
    }
}
