//! The watches that have read all there is. A commit wakes those alone whose range it changes, so that thousands of quiet
//! watches cost it some microseconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::{Key, Range};
use tokio::sync::Notify;

use crate::codec;
use crate::table::Write;

/// The watches of a store.
#[derive(Default)]
pub(crate) struct Tip {
    watches: Mutex<Watches>,
}

#[derive(Default)]
struct Watches {
    /// All commits up to this revision were compared with the ranges.
    passed: u64,
    next: u64,
    all: HashMap<u64, Watch>,
}

struct Watch {
    from: Key,
    to: Option<Key>,
    /// The range may have changed from this revision on.
    changed: Option<u64>,
    /// It wants to know of the next commit, whatever that changes.
    wants_any: bool,
    wake: Arc<Notify>,
}

impl Watch {
    /// True if one of these keys, which are sorted, is in the range.
    fn is_touched(&self, keys: &[&[u8]]) -> bool {
        let first = keys.partition_point(|key| *key < self.from.as_bytes());
        keys.get(first).is_some_and(|key| self.to.as_ref().is_none_or(|to| *key < to.as_bytes()))
    }
}

/// The news of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Its range may have changed from this revision on.
    Changed(u64),
    /// Nothing in its range has changed up to this revision.
    Passed(u64),
}

/// The place of a watch among the others, until it is dropped.
pub(crate) struct Seat {
    tip: Arc<Tip>,
    number: u64,
    wake: Arc<Notify>,
}

impl Tip {
    /// For a store at this revision.
    pub(crate) fn at(revision: u64) -> Arc<Self> {
        Arc::new(Self { watches: Mutex::new(Watches { passed: revision, ..Watches::default() }) })
    }

    fn watches(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a watch of this range. Changes from before are not among its news.
    pub(crate) fn seat(self: &Arc<Self>, range: &Range) -> Seat {
        let ((from, to), wake) = (range.bounds(), Arc::new(Notify::new()));
        let mut watches = self.watches();
        watches.next += 1;
        let number = watches.next;
        let watch = Watch { from, to, changed: None, wants_any: false, wake: Arc::clone(&wake) };
        watches.all.insert(number, watch);
        Seat { tip: Arc::clone(self), number, wake }
    }

    /// Tells of a commit that is published: it led from revision `old` to revision `new` by these writes.
    pub(crate) fn committed(&self, old: u64, new: u64, writes: &[Write]) {
        let mut watches = self.watches();
        let watches = &mut *watches;
        if watches.all.is_empty() {
            watches.passed = new;
            return;
        }
        let changed = writes.iter().filter_map(|write| match write {
            Write::Put(row, _) | Write::Delete(row) => row.strip_prefix(&[codec::CURRENT]),
        });
        let mut keys: Vec<&[u8]> = changed.collect();
        keys.sort_unstable();
        for watch in watches.all.values_mut() {
            let is_touched = watch.is_touched(&keys);
            if is_touched {
                watch.changed.get_or_insert(old + 1);
            }
            if is_touched || watch.wants_any {
                watch.wants_any = false;
                watch.wake.notify_one();
            }
        }
        watches.passed = new;
    }

    /// Tells of a state that is published and was reached by unknown writes.
    pub(crate) fn found(&self, new: u64) {
        let mut watches = self.watches();
        let from = watches.passed + 1;
        for watch in watches.all.values_mut() {
            watch.changed.get_or_insert(from);
            watch.wake.notify_one();
        }
        watches.passed = new;
    }

    /// Wakes all watches: the store was closed.
    pub(crate) fn close(&self) {
        self.watches().all.values().for_each(|watch| watch.wake.notify_one());
    }
}

impl Seat {
    /// The news since it was called last.
    pub(crate) fn news(&self) -> News {
        let mut watches = self.tip.watches();
        let passed = watches.passed;
        let changed = watches.all.get_mut(&self.number).and_then(|watch| watch.changed.take());
        changed.map_or(News::Passed(passed), News::Changed)
    }

    /// True if the next news is a change.
    pub(crate) fn has_changed(&self) -> bool {
        self.tip.watches().all.get(&self.number).is_some_and(|watch| watch.changed.is_some())
    }

    /// Has the next commit wake this watch, whatever that changes.
    pub(crate) fn wants_any(&self) {
        if let Some(watch) = self.tip.watches().all.get_mut(&self.number) {
            watch.wants_any = true;
        }
    }

    /// Waits until there may be news.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.tip.watches().all.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Write {
        Write::Put(codec::current_key(key.as_bytes()), Vec::new())
    }

    #[test]
    fn a_commit_is_news_for_the_ranges_that_it_changes() {
        let tip = Arc::<Tip>::default();
        let seats =
            [Range::key("b"), Range::prefix("b"), Range::From(Key::from("c")), Range::All].map(|r| tip.seat(&r));
        let news = || seats.each_ref().map(Seat::news);
        let (changed, passed) = (News::Changed, News::Passed);
        tip.committed(1, 2, &[put("b")]);
        assert_eq!(news(), [changed(2), changed(2), passed(2), changed(2)]);
        assert_eq!(news(), [passed(2); 4]);
        tip.committed(2, 5, &[put("ba"), Write::Delete(codec::current_key(b"a"))]);
        tip.committed(5, 6, &[put("d")]);
        assert_eq!(news(), [passed(6), changed(3), changed(6), changed(3)]);
        // Rows that are no live keys are no change.
        tip.committed(6, 7, &[Write::Put(vec![codec::LOG, b'b'], Vec::new())]);
        assert_eq!(news(), [passed(7); 4]);
        tip.found(9);
        assert_eq!(news(), [changed(8); 4]);
        drop(seats);
        assert!(tip.watches().all.is_empty());
    }

    #[tokio::test]
    async fn a_watch_is_woken_by_its_range_or_by_any_commit_if_it_wants_that() {
        let tip = Arc::<Tip>::default();
        let (quiet, other) = (tip.seat(&Range::key("a")), tip.seat(&Range::key("b")));
        tip.committed(1, 2, &[put("b")]);
        other.woken().await;
        assert!(futures::poll!(std::pin::pin!(quiet.woken())).is_pending());
        quiet.wants_any();
        tip.committed(2, 3, &[put("b")]);
        quiet.woken().await;
        tip.committed(3, 4, &[put("b")]);
        assert!(futures::poll!(std::pin::pin!(quiet.woken())).is_pending(), "once");
        tip.close();
        quiet.woken().await;
    }
}
