//! The watches that have read all there is. A commit wakes those alone whose range it changes, so that thousands of quiet
//! watches cost it some microseconds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::Range;
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
    ranges: Ranges,
    /// The watches that want to know of the next commit, whatever that changes.
    curious: HashSet<u64>,
}

struct Watch {
    kind: Kind,
    /// The range may have changed from this revision on.
    changed: Option<u64>,
    wake: Arc<Notify>,
}

/// The range of a watch, as the index has it.
#[derive(Clone)]
enum Kind {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    Other(Range),
}

impl Kind {
    fn of(range: &Range) -> Self {
        match range {
            Range::Key(key) => Self::Key(key.as_bytes().to_vec()),
            Range::Prefix(prefix) => Self::Prefix(prefix.as_bytes().to_vec()),
            // As clients of etcd spell a prefix.
            Range::FromTo(from, to) if from.prefix_end().as_ref() == Some(to) => Self::Prefix(from.as_bytes().to_vec()),
            other => Self::Other(other.clone()),
        }
    }
}

/// Which watches have a key in their range. Watches of a key or of a prefix, as most are, are found without a look at the others.
#[derive(Default)]
struct Ranges {
    keys: HashMap<Vec<u8>, HashSet<u64>>,
    prefixes: HashMap<Vec<u8>, HashSet<u64>>,
    /// How many prefixes there are of each length.
    lengths: BTreeMap<usize, usize>,
    others: Vec<(u64, Range)>,
}

impl Ranges {
    fn insert(&mut self, number: u64, kind: &Kind) {
        match kind {
            Kind::Key(key) => _ = self.keys.entry(key.clone()).or_default().insert(number),
            Kind::Prefix(prefix) => {
                let watches = self.prefixes.entry(prefix.clone()).or_default();
                if watches.is_empty() {
                    *self.lengths.entry(prefix.len()).or_default() += 1;
                }
                watches.insert(number);
            }
            Kind::Other(range) => self.others.push((number, range.clone())),
        }
    }

    fn remove(&mut self, number: u64, kind: &Kind) {
        match kind {
            Kind::Key(key) => _ = drop_from(&mut self.keys, key, number),
            Kind::Prefix(prefix) => {
                if drop_from(&mut self.prefixes, prefix, number)
                    && let Some(count) = self.lengths.get_mut(&prefix.len())
                {
                    *count -= 1;
                    if *count == 0 {
                        self.lengths.remove(&prefix.len());
                    }
                }
            }
            Kind::Other(_) => self.others.retain(|(other, _)| *other != number),
        }
    }

    /// Calls `found` with each watch that has the key in its range.
    fn of(&self, key: &[u8], mut found: impl FnMut(u64)) {
        self.keys.get(key).into_iter().flatten().copied().for_each(&mut found);
        let lengths = self.lengths.range(..=key.len()).filter_map(|(length, _)| key.get(..*length));
        lengths.filter_map(|prefix| self.prefixes.get(prefix)).flatten().copied().for_each(&mut found);
        self.others.iter().filter(|(_, range)| range.contains(key)).for_each(|(number, _)| found(*number));
    }
}

/// Removes a watch of a range. True if it was the last one.
fn drop_from(map: &mut HashMap<Vec<u8>, HashSet<u64>>, range: &[u8], number: u64) -> bool {
    let Some(watches) = map.get_mut(range) else { return false };
    watches.remove(&number);
    let is_last = watches.is_empty();
    if is_last {
        map.remove(range);
    }
    is_last
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
        let (kind, wake) = (Kind::of(range), Arc::new(Notify::new()));
        let mut watches = self.watches();
        watches.next += 1;
        let number = watches.next;
        watches.ranges.insert(number, &kind);
        watches.all.insert(number, Watch { kind, changed: None, wake: Arc::clone(&wake) });
        Seat { tip: Arc::clone(self), number, wake }
    }

    /// Tells of a commit that is published: it led from revision `old` to revision `new` by these writes.
    pub(crate) fn committed(&self, old: u64, new: u64, writes: &[Write]) {
        let mut watches = self.watches();
        let Watches { passed, all, ranges, curious, .. } = &mut *watches;
        let changed = writes.iter().filter_map(|write| match write {
            Write::Put(row, _) | Write::Delete(row) => row.strip_prefix(&[codec::CURRENT]),
        });
        for key in changed {
            ranges.of(key, |number| {
                if let Some(watch) = all.get_mut(&number)
                    && watch.changed.is_none()
                {
                    watch.changed = Some(old + 1);
                    watch.wake.notify_one();
                }
            });
        }
        for number in curious.drain() {
            if let Some(watch) = all.get(&number) {
                watch.wake.notify_one();
            }
        }
        *passed = new;
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

    /// Has the next commit wake this watch, whatever that changes. Once for each time that it is woken.
    pub(crate) fn wants_any(&self) {
        self.tip.watches().curious.insert(self.number);
    }

    /// Waits until there may be news.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut watches = self.tip.watches();
        watches.curious.remove(&self.number);
        if let Some(watch) = watches.all.remove(&self.number) {
            watches.ranges.remove(self.number, &watch.kind);
        }
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
        let seats = [Range::key("b"), Range::prefix("b"), Range::From("c".into()), Range::All].map(|r| tip.seat(&r));
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
        let watches = tip.watches();
        assert!(watches.all.is_empty() && watches.ranges.keys.is_empty() && watches.ranges.prefixes.is_empty());
        assert!(watches.ranges.lengths.is_empty() && watches.ranges.others.is_empty());
    }

    /// The index finds what a look at each range finds.
    #[test]
    fn the_index_agrees_with_the_ranges() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut text = |most: usize| -> Vec<u8> {
            (0..random.usize(..=most)).map(|_| *random.choice(&[b'a', b'b', 0xff]).unwrap()).collect()
        };
        let mut ranges: Vec<Range> = vec![Range::All, Range::Prefix(kv::Key::default())];
        for _ in 0..100 {
            let (one, other) = (kv::Key::new(text(3)), kv::Key::new(text(3)));
            let end = one.prefix_end().unwrap_or_else(|| other.clone());
            ranges.extend([Range::Key(one.clone()), Range::Prefix(one.clone()), Range::From(one.clone())]);
            ranges.extend([Range::FromTo(one.clone(), end), Range::FromTo(one, other)]);
        }
        let tip = Arc::<Tip>::default();
        let mut seats: Vec<_> = ranges.iter().map(|range| (range, tip.seat(range))).collect();
        for revision in 1..300 {
            let key = text(4);
            tip.committed(revision - 1, revision, &[Write::Put(codec::current_key(&key), Vec::new())]);
            for (range, seat) in &seats {
                let is_changed = seat.news() == News::Changed(revision);
                assert_eq!(is_changed, range.contains(&key), "{range:?} {key:?}");
            }
            if revision % 10 == 0 {
                seats.pop();
            }
        }
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
