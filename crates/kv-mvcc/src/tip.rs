//! The watches that have read all there is. A commit wakes those alone whose range it changes, so that thousands of quiet
//! watches cost it some microseconds.

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
    slots: Vec<Slot>,
    /// The slots without a watch.
    free: Vec<usize>,
    ranges: Ranges,
    /// The slots whose watch wants to know of the next commit, whatever that changes.
    curious: Vec<usize>,
}

/// The place of a watch. Its number is the next one's once the watch is gone.
#[derive(Default)]
struct Slot {
    watch: Option<Watch>,
    is_curious: bool,
}

struct Watch {
    kind: Kind,
    /// The range may have changed from this revision on.
    changed: Option<u64>,
    wake: Arc<Notify>,
}

impl Watches {
    fn watch(&mut self, slot: usize) -> Option<&mut Watch> {
        self.slots.get_mut(slot)?.watch.as_mut()
    }
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

/// Which slots have a key in their range. Watches of a key or of a prefix, as most are, are found without a look at the others.
#[derive(Default)]
struct Ranges {
    keys: Sorted,
    prefixes: Sorted,
    /// How many prefixes there are of each length.
    lengths: Vec<usize>,
    others: Vec<(Range, usize)>,
}

impl Ranges {
    fn insert(&mut self, kind: &Kind, slot: usize) {
        match kind {
            Kind::Key(key) => self.keys.insert(key, slot),
            Kind::Prefix(prefix) => {
                if self.lengths.len() <= prefix.len() {
                    self.lengths.resize(prefix.len() + 1, 0);
                }
                self.count(prefix).into_iter().for_each(|count| *count += 1);
                self.prefixes.insert(prefix, slot);
            }
            Kind::Other(range) => self.others.push((range.clone(), slot)),
        }
    }

    fn remove(&mut self, kind: &Kind, slot: usize) {
        match kind {
            Kind::Key(key) => self.keys.remove(key, slot),
            Kind::Prefix(prefix) => {
                self.count(prefix).into_iter().for_each(|count| *count -= 1);
                self.prefixes.remove(prefix, slot);
            }
            Kind::Other(_) => self.others.retain(|(_, other)| *other != slot),
        }
    }

    fn count(&mut self, prefix: &[u8]) -> Option<&mut usize> {
        self.lengths.get_mut(prefix.len())
    }

    /// Adds the slots that have the key in their range.
    fn find(&self, key: &[u8], found: &mut Vec<usize>) {
        self.keys.find(key, found);
        let lengths = self.lengths.iter().enumerate().filter(|(_, count)| **count > 0);
        for prefix in lengths.filter_map(|(length, _)| key.get(..length)) {
            self.prefixes.find(prefix, found);
        }
        found.extend(self.others.iter().filter(|(range, _)| range.contains(key)).map(|(_, slot)| *slot));
    }
}

/// Slots by texts. A sorted list is smaller than a map, as a program, too: the plugin has all of this.
#[derive(Default)]
struct Sorted(Vec<(Vec<u8>, usize)>);

impl Sorted {
    fn place(&self, text: &[u8], slot: usize) -> usize {
        self.0.partition_point(|(other, at)| (&other[..], *at) < (text, slot))
    }

    fn insert(&mut self, text: &[u8], slot: usize) {
        self.0.insert(self.place(text, slot), (text.to_vec(), slot));
    }

    fn remove(&mut self, text: &[u8], slot: usize) {
        let place = self.place(text, slot);
        if self.0.get(place).is_some_and(|(other, at)| other == text && *at == slot) {
            self.0.remove(place);
        }
    }

    fn find(&self, text: &[u8], found: &mut Vec<usize>) {
        let from = self.0.get(self.place(text, 0)..).unwrap_or_default();
        found.extend(from.iter().take_while(|(other, _)| other == text).map(|(_, slot)| *slot));
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
    slot: usize,
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
        let slot = watches.free.pop().unwrap_or_else(|| {
            watches.slots.push(Slot::default());
            watches.slots.len() - 1
        });
        watches.ranges.insert(&kind, slot);
        if let Some(slot) = watches.slots.get_mut(slot) {
            slot.watch = Some(Watch { kind, changed: None, wake: Arc::clone(&wake) });
        }
        Seat { tip: Arc::clone(self), slot, wake }
    }

    /// Tells of a commit that is published: it led from revision `old` to revision `new` by these writes.
    pub(crate) fn committed(&self, old: u64, new: u64, writes: &[Write]) {
        let mut watches = self.watches();
        watches.passed = new;
        if watches.slots.len() == watches.free.len() {
            return;
        }
        let mut found = Vec::new();
        for write in writes {
            if let Some(key) = write.key().strip_prefix(&[codec::CURRENT]) {
                watches.ranges.find(key, &mut found);
            }
        }
        for slot in found {
            if let Some(watch) = watches.watch(slot).filter(|watch| watch.changed.is_none()) {
                watch.changed = Some(old + 1);
                watch.wake.notify_one();
            }
        }
        while let Some(slot) = watches.curious.pop() {
            if let Some(slot) = watches.slots.get_mut(slot) {
                slot.is_curious = false;
                slot.watch.iter().for_each(|watch| watch.wake.notify_one());
            }
        }
    }

    /// Tells of a state that is published and was reached by unknown writes.
    pub(crate) fn found(&self, new: u64) {
        let mut watches = self.watches();
        let from = watches.passed + 1;
        watches.passed = new;
        for watch in watches.slots.iter_mut().filter_map(|slot| slot.watch.as_mut()) {
            watch.changed.get_or_insert(from);
            watch.wake.notify_one();
        }
    }

    /// Wakes all watches: the store was closed.
    pub(crate) fn close(&self) {
        self.watches().slots.iter().filter_map(|slot| slot.watch.as_ref()).for_each(|watch| watch.wake.notify_one());
    }
}

impl Seat {
    /// The news since it was called last.
    pub(crate) fn news(&self) -> News {
        let mut watches = self.tip.watches();
        let changed = watches.watch(self.slot).and_then(|watch| watch.changed.take());
        changed.map_or(News::Passed(watches.passed), News::Changed)
    }

    /// True if the next news is a change.
    pub(crate) fn has_changed(&self) -> bool {
        self.tip.watches().watch(self.slot).is_some_and(|watch| watch.changed.is_some())
    }

    /// Has the next commit wake this watch, whatever that changes.
    pub(crate) fn wants_any(&self) {
        let mut watches = self.tip.watches();
        let slot = watches.slots.get_mut(self.slot);
        if slot.is_some_and(|slot| !std::mem::replace(&mut slot.is_curious, true)) {
            watches.curious.push(self.slot);
        }
    }

    /// Waits until there may be news.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut watches = self.tip.watches();
        let watch = watches.slots.get_mut(self.slot).and_then(|slot| slot.watch.take());
        if let Some(watch) = watch {
            watches.ranges.remove(&watch.kind, self.slot);
            watches.free.push(self.slot);
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
        assert!(watches.ranges.keys.0.is_empty() && watches.ranges.prefixes.0.is_empty());
        assert!(watches.ranges.lengths.iter().all(|count| *count == 0) && watches.ranges.others.is_empty());
        assert_eq!(watches.slots.len(), watches.free.len());
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
