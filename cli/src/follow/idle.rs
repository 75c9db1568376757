//! The progress of a quiet watch whose server does not report it.
//!
//! Without progress a watch of a quiet range stays at its last event, while other keys move the cluster's revision, until
//! compaction passes it. So the reader compares the keys and their revisions at its place with those of the newest
//! revision. If they are equal, and no event comes for a while after that, the watch has reported all up to there.

use std::time::Duration;

use kv::{Content, Kv, Range, RangeRequest, Revision, Store, StoreExt};
use tokio::time::Instant;

/// The quiet times before a look: they double up to the second one, since a look lists all keys twice.
const WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(64)];

/// A quiet time.
pub(super) struct Idle {
    wait: Duration,
    next: Instant,
    /// The revision up to which there was nothing to report at the last look.
    candidate: Option<Revision>,
}

impl Idle {
    /// It begins now.
    pub(super) fn new() -> Self {
        Self { wait: WAITS[0], next: Instant::now() + WAITS[0], candidate: None }
    }

    /// It begins anew, since the watch has reported something.
    pub(super) fn put_off(&mut self) {
        self.next = Instant::now() + self.wait;
        self.candidate = None;
    }

    /// True if it is time to look. After a look the next one comes when the watch was quiet once more.
    pub(super) fn is_due(&self) -> bool {
        self.candidate.is_some() || Instant::now() >= self.next
    }

    /// The revision up to which all was reported, if it is known now. All up to `at` was reported before. An error of the
    /// store is left to the watch.
    pub(super) async fn look(&mut self, store: &dyn Store, range: &Range, at: Revision) -> Option<Revision> {
        if let Some(candidate) = self.candidate.take() {
            return Some(candidate);
        }
        self.candidate = unchanged(store, range, at).await.ok().flatten();
        self.wait = (self.wait * 2).min(WAITS[1]);
        self.next = Instant::now() + self.wait;
        None
    }
}

/// The newest revision, if the range is there as it is at `at`.
async fn unchanged(store: &dyn Store, range: &Range, at: Revision) -> kv::Result<Option<Revision>> {
    let count = RangeRequest::new(range.clone()).with_content(Content::CountOnly);
    let newest = store.range(count).await?.revision;
    if newest <= at {
        return Ok(None);
    }
    let before = store.list_at(range.clone(), at, Content::KeysOnly).await?;
    let now = store.list_at(range.clone(), newest, Content::KeysOnly).await?;
    let state = |kvs: Vec<Kv>| -> Vec<_> { kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect() };
    Ok((state(before.kvs) == state(now.kvs)).then_some(newest))
}
