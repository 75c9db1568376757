//! The progress of a quiet watch whose server does not report it.
//!
//! Without progress a watch of a quiet range stays at its last event, while other keys move the cluster's revision, until
//! compaction passes it. So the reader compares the keys of blocks and affinities, and their revisions, at its place with
//! those of the newest revision: nothing happens without a change of one of them. If they are equal, and no event comes for
//! a while after that, the watch has reported all up to there.

use std::sync::Arc;
use std::time::Duration;

use ipam_core::model::keys;
use kv::{Content, Kv, Range, RangeRequest, Revision, Store, StoreExt};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The quiet times before a look: they double up to the second one, since a look lists the keys twice.
const WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(64)];

/// A quiet time.
pub(super) struct Idle {
    wait: Duration,
    next: Instant,
    /// The look that goes on beside the watch, if there is one.
    look: JoinSet<Option<Revision>>,
    /// The revision up to which there was nothing to report at the last look.
    candidate: Option<Revision>,
}

impl Idle {
    /// It begins now.
    pub(super) fn new() -> Self {
        Self { wait: WAITS[0], next: Instant::now() + WAITS[0], look: JoinSet::new(), candidate: None }
    }

    /// It begins anew, since the watch has reported something.
    pub(super) fn put_off(&mut self) {
        self.next = Instant::now() + self.wait;
        self.look = JoinSet::new();
        self.candidate = None;
    }

    /// The revision up to which all was reported, if it is known now. All up to `at` was reported before, and the watch was
    /// quiet for a while since the last call. An error of the store is left to the watch.
    pub(super) fn reached(&mut self, store: &Arc<dyn Store>, at: Revision) -> Option<Revision> {
        if let Some(candidate) = self.candidate.take() {
            return Some(candidate);
        }
        if let Some(seen) = self.look.try_join_next() {
            self.candidate = seen.ok().flatten();
            self.next = Instant::now() + self.wait;
        } else if self.look.is_empty() && Instant::now() >= self.next {
            self.wait = (self.wait * 2).min(WAITS[1]);
            let store = Arc::clone(store);
            self.look.spawn(async move { unchanged(&*store, at).await.ok().flatten() });
        }
        None
    }
}

/// A request that costs little, for the revision alone.
pub(super) fn nothing() -> RangeRequest {
    RangeRequest::new(Range::key(keys::config())).with_content(Content::CountOnly)
}

/// The newest revision, if the blocks and affinities are there as they are at `at`.
async fn unchanged(store: &dyn Store, at: Revision) -> kv::Result<Option<Revision>> {
    let newest = store.range(nothing()).await?.revision;
    if newest <= at {
        return Ok(None);
    }
    let state = |kvs: Vec<Kv>| -> Vec<_> { kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect() };
    for prefix in [keys::blocks_prefix(None), keys::host_affinities_prefix(), keys::virtual_affinities_prefix()] {
        let before = store.list_at(Range::Prefix(prefix.clone()), at, Content::KeysOnly).await?;
        let now = store.list_at(Range::Prefix(prefix), newest, Content::KeysOnly).await?;
        if state(before.kvs) != state(now.kvs) {
            return Ok(None);
        }
    }
    Ok(Some(newest))
}

#[cfg(test)]
mod tests {
    use datastore::Create;

    use super::*;

    /// The answer within a second or two without an event.
    async fn reached(idle: &mut Idle, store: &Arc<dyn Store>, at: Revision) -> Option<Revision> {
        for _ in 0..150 {
            if let Some(reached) = idle.reached(store, at) {
                return Some(reached);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }

    #[test]
    fn only_blocks_and_affinities_keep_a_quiet_watch_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let location = stores::of_engine("redb", folder.path().join("store")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open = datastore::open(&location, &Create::IfMissing.with_wait(WAITS[1])).await.unwrap();
            let store = open.store();
            let put = async |key: kv::Key| store.put(key, "x").await.unwrap();
            let block = keys::block("10.0.0.0/26".parse().unwrap());
            let at = put(block.clone()).await;
            let newest = put(keys::handle("one")).await;
            assert_eq!(reached(&mut Idle::new(), &store, at).await, Some(newest));

            let mut idle = Idle::new();
            while idle.candidate.is_none() {
                assert_eq!(idle.reached(&store, at), None);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            idle.put_off();
            assert_eq!(idle.reached(&store, at), None, "from before an event");

            put(block).await;
            assert_eq!(reached(&mut Idle::new(), &store, at).await, None);
            drop(store);
            open.close().await.unwrap();
        });
    }
}
