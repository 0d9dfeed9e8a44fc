//! The plans that are kept: the least recently used is given up when they take more memory than they may.

use std::sync::Arc;

use lru::LruCache;

use super::planned::Planned;

/// Plans by the number of their directory.
#[derive(Debug)]
pub(super) struct Cache {
    plans: LruCache<u64, Arc<Planned>>,
    /// Bytes of all, roughly; at most this many, but for one plan that is larger.
    weight: usize,
    most: usize,
}

impl Cache {
    pub(super) fn new(most: usize) -> Cache {
        Cache {
            plans: LruCache::unbounded(),
            weight: 0,
            most,
        }
    }

    /// Keeps a plan as the most recently used. What falls out is returned, to be dropped without the lock: that may
    /// close files.
    pub(super) fn keep(&mut self, dir: u64, plan: &Arc<Planned>) -> Vec<Arc<Planned>> {
        if self
            .plans
            .get(&dir)
            .is_some_and(|kept| Arc::ptr_eq(kept, plan))
        {
            return Vec::new();
        }
        let mut out = Vec::new();
        self.weight = self.weight.saturating_add(plan.weight());
        let same_dir = self.plans.push(dir, Arc::clone(plan));
        out.extend(same_dir.map(|(_, old)| old));
        self.weight = out
            .iter()
            .fold(self.weight, |sum, old| sum.saturating_sub(old.weight()));
        while self.weight > self.most && self.plans.len() > 1 {
            let Some((_, old)) = self.plans.pop_lru() else {
                break;
            };
            self.weight = self.weight.saturating_sub(old.weight());
            out.push(old);
        }
        out
    }

    /// Gives up a plan, if it is still this one.
    pub(super) fn forget(&mut self, dir: u64, plan: &Arc<Planned>) {
        if self
            .plans
            .peek(&dir)
            .is_some_and(|kept| Arc::ptr_eq(kept, plan))
        {
            self.plans.pop(&dir);
            self.weight = self.weight.saturating_sub(plan.weight());
        }
    }

    /// All plans that are kept, with the number of their directory.
    pub(super) fn all(&self) -> Vec<(u64, Arc<Planned>)> {
        self.plans
            .iter()
            .map(|(&dir, plan)| (dir, Arc::clone(plan)))
            .collect()
    }
}
