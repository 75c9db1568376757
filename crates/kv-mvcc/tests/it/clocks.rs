//! Tests stores whose clock jumps by years at any moment. Jumps of the clock must neither remove history too early nor
//! keep history for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use kv::{ErrorKind, Range, RangeRequest, Revision, Store, StoreExt};
use kv_mvcc::{Clock, MemoryTable, MvccStore, Options, Retention, Table};
use proptest::prelude::*;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
const TEN_YEARS: i64 = 3652 * DAY;
/// The maximum age of revisions that these tests configure, in seconds.
const AGE: i64 = 3 * DAY;
/// Maximum clock error, in seconds, that the store tolerates without suspending the age limit.
const TRUST: i64 = DAY;

/// A store whose clock a test sets, and the real times to compare with.
struct Watched {
    store: MvccStore,
    table: MemoryTable,
    /// The time of the store's clock, in seconds since 2026.
    clock: Arc<AtomicI64>,
    /// The real time of the test, in seconds since 2026.
    now: i64,
    /// By how many seconds the store's clock is ahead of the real time.
    off: i64,
    /// The real time at which each revision was made, starting with revision 2.
    made: Vec<i64>,
}

impl Watched {
    fn new(revisions: Option<u64>) -> Self {
        let clock = Arc::new(AtomicI64::new(0));
        let shown = Arc::clone(&clock);
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let clock_of_store = Clock::new(move || {
            let seconds = shown.load(Ordering::SeqCst);
            let by = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { start - by } else { start + by }
        });
        let age = Some(Duration::from_secs(AGE.unsigned_abs()));
        let retention = Retention { age, revisions, ..Retention::UNBOUNDED };
        let table = MemoryTable::new();
        let options = Options { retention, clock: clock_of_store, ..Options::default() };
        let store = MvccStore::open(Box::new(table.clone()), options).unwrap();
        Self { store, table, clock, now: 0, off: 0, made: Vec::new() }
    }

    async fn commit_after(&mut self, seconds: i64) {
        self.now += seconds;
        self.clock.store(self.now + self.off, Ordering::SeqCst);
        let before = self.store.status().time;
        self.store.put("k", "v").await.unwrap();
        assert!(self.store.status().time >= before, "time does not go back");
        self.made.push(self.now);
    }

    /// The real age, in seconds, of the newest revision that the store has removed; `None` if all revisions are
    /// readable.
    async fn age_of_what_is_gone(&self) -> Option<i64> {
        let newest = self.store.status().revision.get();
        for revision in 2..=newest {
            match self.store.range(RangeRequest::new(Range::All).with_at(Revision::new(revision))).await {
                Ok(_) => return self.age_of(revision - 1),
                Err(error) => assert!(matches!(error.kind(), ErrorKind::Compacted { .. }), "{error}"),
            }
        }
        panic!("the newest revision can always be read")
    }

    fn age_of(&self, revision: i64) -> Option<i64> {
        let index = usize::try_from(revision - 2).ok()?;
        Some(self.now - self.made[index])
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Generates random steps for a clock test. In each step, the test waits some seconds, may change the error of the
/// clock, and makes a revision.
fn steps(most: usize) -> impl Strategy<Value = Vec<(i64, i64)>> {
    let off = prop_oneof![4 => Just(None), 1 => Just(Some(0)), 1 => Just(Some(TEN_YEARS)), 1 => Just(Some(-TEN_YEARS))];
    prop::collection::vec((0..5 * HOUR, off), 1..most).prop_map(|steps| {
        let go_on = |current: &mut i64, (after, off): (i64, Option<i64>)| {
            *current = off.unwrap_or(*current);
            Some((after, *current))
        };
        steps.into_iter().scan(0, go_on).collect()
    })
}

/// While the store's clock is ten years ahead, neither the first nor any later commit may remove history. Because the
/// clock jumped before the first commit, the newest revision already has a wrong time at the second commit.
#[tokio::test]
async fn clock_ten_years_ahead_takes_no_history() {
    let mut watched = Watched::new(None);
    for _ in 0..20 {
        watched.commit_after(HOUR).await;
    }
    watched.off = TEN_YEARS;
    for _ in 0..30 {
        watched.commit_after(HOUR).await;
    }
    assert_eq!(watched.age_of_what_is_gone().await, None);
    // Revisions from before the clock's jump are removed three days after the jump.
    for _ in 0..50 {
        watched.commit_after(HOUR).await;
    }
    assert_eq!(watched.age_of_what_is_gone().await, Some(AGE + HOUR));
    watched.store.verify().await.unwrap();
}

/// After a simulated month of being off, the store removes expired revisions only after three more days: it cannot tell
/// a month without writes from a jump of the clock.
#[tokio::test]
async fn clock_after_idle_month_drops_history_when_age_is_sure() {
    let mut watched = Watched::new(None);
    for _ in 0..5 {
        watched.commit_after(HOUR).await;
    }
    watched.commit_after(30 * DAY).await;
    for _ in 0..71 {
        watched.commit_after(HOUR).await;
    }
    assert_eq!(watched.age_of_what_is_gone().await, None);
    watched.commit_after(HOUR).await;
    watched.commit_after(HOUR).await;
    assert_eq!(watched.age_of_what_is_gone().await, Some(AGE + HOUR));
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::with_cases(64) })]

    /// Whatever the store's clock does, removed revisions must be old enough by the real time.
    #[test]
    fn clock_drops_only_old_history_by_age(steps in steps(120)) {
        block_on(async {
            let mut watched = Watched::new(None);
            for (after, off) in steps {
                watched.off = off;
                watched.commit_after(after).await;
                if let Some(age) = watched.age_of_what_is_gone().await {
                    assert!(age >= AGE - TRUST, "a revision is gone that was {age} s old");
                }
            }
            watched.store.verify().await.unwrap();
            // After the clock has run for a while without jumps, the store trusts the ages of revisions again.
            watched.off = TEN_YEARS;
            for _ in 0..AGE / HOUR + 30 {
                watched.commit_after(HOUR).await;
            }
            let gone = watched.age_of_what_is_gone().await.unwrap();
            assert!((AGE..=AGE + 2 * HOUR).contains(&gone), "what is gone was {gone} s old");
            watched.store.verify().await.unwrap();
        });
    }

    /// While the store does not trust the ages of revisions, the other limits on the history must still apply.
    #[test]
    fn clock_never_makes_store_grow(steps in steps(200)) {
        block_on(async {
            let mut watched = Watched::new(Some(20));
            for (after, off) in steps {
                watched.off = off;
                watched.commit_after(after).await;
                // The table has at most a log row, a value and a live key for each readable revision, and four rows of
                // metadata.
                let rows = crate::wrapped::rows(&watched.table as &dyn Table).len();
                assert!(rows <= 20 * 3 + 4, "{rows} rows");
            }
            watched.store.verify().await.unwrap();
        });
    }
}
