//! Reads the history of a store that stays open: etcd, or the store of a daemon. The reader reads a state of the store
//! in pages, and then watches for changes.
//!
//! An etcd watch does not tell when it has reported all events up to a revision, and servers before 3.4.25 answer a
//! progress request too early. To find out whether an etcd watch has reported all events, a reader that started with
//! `FollowStart::Oldest` compares the reported events with the newest state. A reader has seen all past events once the
//! events that it returned add up to the keys and mod revisions of the newest state, and no further event arrives for a
//! while. If the server reports events late, the reader may miss keys that were created and deleted again; it misses no
//! change of an existing key.
//!
//! In a cluster most revisions change keys outside of the watched range. The server's progress reports move the
//! position of a watch past revisions that changed no watched key. Without progress reports, the position of a quiet
//! watch would stay at its last event until etcd compacts the revision of this event. To advance a quiet watch,
//! [`IdleProbe`] lists the block and affinity keys at the watch's position and at the newest revision, and compares
//! their mod revisions. Block and affinity keys show whether any address changed, because every change of an address
//! changes at least one of them. If the block and affinity keys have the same mod revisions at both revisions, and no
//! event arrives for a while, the watch has reported all events up to the newest revision.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use datastore::OpenStore;
use datastore::served::ServedStore;
use futures::{FutureExt, StreamExt};
use ipam_core::model::keys;
use ipam_operator::events::is_before_unknown;
use kv::{
    Batch, Content, ErrorKind, Event, EventKind, Key, Kv, Prev, Progress, Range, RangeRequest, Revision, Store,
    StoreExt, WatchRequest, WatchStream,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{FollowStart, FollowStop, HistoryPart, ReadPosition, check_after, replaced};
use crate::error::{CommandFailure, CommandResult};
use crate::store::{StoreAccess, StoreUse};

/// Maximum number of keys in a page that is read from a state. The value of a block key can exceed 1 MB, but rarely
/// exceeds 50 kB.
const MAX_PAGE_KEYS: i64 = 64;
/// How long a read waits for the next event of the watch. etcd sends events to a watch that lags behind only every 100
/// ms.
const EVENT_TIMEOUT: Duration = Duration::from_millis(250);
/// How long a reader that started with `FollowStart::Oldest` waits for a missing event before it fails.
const PAST_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of event batches that one read returns.
const MAX_BATCHES: usize = 1000;

/// Reads the history of a store that stays open, from etcd or through a daemon.
pub(crate) struct WatchReader<'l> {
    at: StoreAccess<'l>,
    range: Range,
    position: ReadPosition,
    /// The store's daemon, or `None` for a cluster.
    daemon: Option<ServedStore>,
    /// True if the daemon of the store cannot be reached any more.
    is_cut_off: bool,
    /// The open connection to the cluster, or `None` before its first use.
    open: Option<OpenStore>,
    changes: Option<WatchStream>,
    /// The progress of a reader that started with `FollowStart::Oldest`, or `None` in other readers.
    past: Option<PastProgress>,
    idle: IdleProbe,
}

/// How far a reader that started with `FollowStart::Oldest` has caught up with the newest state.
struct PastProgress {
    head: Revision,
    /// The keys of the newest state, with their mod revisions.
    goal: BTreeMap<Key, Revision>,
    /// The keys and mod revisions that result from all events reported until now.
    reported: BTreeMap<Key, Revision>,
    last: Instant,
}

impl<'l> WatchReader<'l> {
    pub(super) fn new(at: StoreAccess<'l>, range: Range, position: ReadPosition, daemon: Option<ServedStore>) -> Self {
        Self {
            at,
            range,
            position,
            daemon,
            is_cut_off: false,
            open: None,
            changes: None,
            past: None,
            idle: IdleProbe::new(),
        }
    }

    /// Returns the id of the daemon's store, or an empty text for a cluster.
    pub(super) fn id(&self) -> &str {
        self.daemon.as_ref().map_or("", ServedStore::id)
    }

    /// If the daemon cannot be reached any more, returns the position and the store id with which another reader can
    /// continue.
    pub(super) fn position_to_leave(&self) -> Option<(ReadPosition, Option<String>)> {
        self.is_cut_off.then(|| (self.position.clone(), Some(self.id().to_owned())))
    }

    pub(super) fn pause(&mut self) {
        self.changes = None;
    }

    pub(super) async fn close(self) -> CommandResult<()> {
        drop(self.changes);
        match self.open {
            Some(open) => open.close().await.map_err(|error| self.at.explain(error)),
            None => Ok(()),
        }
    }

    pub(super) async fn read(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        match self.read_parts().await {
            Err(ReadError::Store(error)) => {
                match self.part_when_compacted(&error).or_else(|| self.part_when_disconnected(&error)) {
                    Some(part) => Ok(vec![part]),
                    None if *error.kind() == ErrorKind::RevisionRegressed => Err(replaced(self.at)),
                    None => Err(self.at.explain(error).into()),
                }
            }
            Err(ReadError::Stop(stop)) => Err(stop),
            Ok(parts) => Ok(parts),
        }
    }

    async fn read_parts(&mut self) -> Result<Vec<HistoryPart>, ReadError> {
        match self.position.clone() {
            ReadPosition::Before(FollowStart::Newest) => self.read_state(|at| HistoryPart::Begins(at, None)).await,
            ReadPosition::Before(start) => Ok(vec![self.begin(start).await?]),
            ReadPosition::State(at, from) => Ok(vec![self.read_page(at, from).await?]),
            ReadPosition::Lost(after) => self.read_state(|at| HistoryPart::GivenUp(after, at)).await,
            ReadPosition::Log(next) => Ok(vec![self.follow(next).await?]),
        }
    }

    /// Reads the newest state of the store. Returns the state as history parts: the part that `first` builds from the
    /// state's revision, then the block documents, which contain every address and its holder. The watch for later
    /// changes starts before this method returns, because the caller may handle the state for longer than the store
    /// keeps its history.
    async fn read_state(&mut self, first: impl FnOnce(Revision) -> HistoryPart) -> Result<Vec<HistoryPart>, ReadError> {
        let listing = self.store().await?.list(Range::Prefix(keys::blocks_prefix(None))).await?;
        let at = listing.revision;
        check_after(self.at, self.position.read(), at)?;
        let changes = self.watch(at.next()).await?;
        self.changes = Some(changes);
        self.position = ReadPosition::Log(at.next());
        Ok(vec![first(at), HistoryPart::Listed(at, listing.kvs), HistoryPart::Reached(at)])
    }

    /// Starts a watch of the changes from revision `next` on. Cancels any running idle probe, because a probe that was
    /// started during an earlier watch tells nothing about the new watch.
    async fn watch(&mut self, next: Revision) -> Result<WatchStream, ReadError> {
        self.idle.restart();
        let progress = if self.past.is_some() { Progress::Omit } else { Progress::Report };
        let request = WatchRequest::new(self.range.clone(), next).with_prev(Prev::Return).with_progress(progress);
        Ok(self.store().await?.watch(request).await?)
    }

    /// Returns the open store, after connecting to the cluster if this is the first call.
    async fn store(&mut self) -> CommandResult<Arc<dyn Store>> {
        if let Some(daemon) = &self.daemon {
            return Ok(Arc::new(daemon.clone()));
        }
        let open = match self.open.take() {
            Some(open) => open,
            None => self.at.open(StoreUse::Read).await?,
        };
        Ok(self.open.insert(open).store())
    }

    async fn begin(&mut self, start: FollowStart) -> Result<HistoryPart, ReadError> {
        let store = self.store().await?;
        let keys = store.list_at(self.range.clone(), Revision::UNSET, Content::KeysOnly).await?;
        let head = keys.revision;
        let from = self.range.bounds().0;
        let (first, position) = match start {
            FollowStart::Oldest => {
                let goal = keys.kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect();
                self.past = Some(PastProgress { head, goal, reported: BTreeMap::new(), last: Instant::now() });
                let (oldest, time) = match &self.daemon {
                    Some(daemon) => daemon.oldest().await?,
                    None => (oldest_revision(&*store).await?, None),
                };
                ((oldest, time), ReadPosition::State(oldest, from))
            }
            FollowStart::Newest | FollowStart::Next => ((head, None), ReadPosition::Log(head.next())),
            FollowStart::After(after) => {
                check_after(self.at, after, head)?;
                ((after, None), ReadPosition::Log(after.next()))
            }
        };
        self.position = position;
        let (first, time) = first;
        Ok(HistoryPart::Begins(first, time))
    }

    /// Reads the next page of a state, in a reader that started with `FollowStart::Oldest`.
    async fn read_page(&mut self, at: Revision, from: Key) -> Result<HistoryPart, ReadError> {
        let request = RangeRequest::new(self.range.rest(from)).with_at(at).with_limit(MAX_PAGE_KEYS);
        let page = self.store().await?.range(request).await?;
        self.position = match page.kvs.last() {
            Some(last) if page.more => ReadPosition::State(at, last.key.successor()),
            _ => ReadPosition::Log(at.next()),
        };
        if let Some(past) = &mut self.past {
            past.reported.extend(page.kvs.iter().map(|kv| (kv.key.clone(), kv.mod_revision)));
            past.last = Instant::now();
        }
        Ok(HistoryPart::Listed(at, page.kvs))
    }

    /// Returns the next batches of events, or a history part with no events if none arrives within [`EVENT_TIMEOUT`].
    async fn follow(&mut self, next: Revision) -> Result<HistoryPart, ReadError> {
        if let Some(past) = self.past.as_ref().filter(|past| next > past.head) {
            return Ok(HistoryPart::Reached(past.head));
        }
        let mut changes = match self.changes.take() {
            Some(changes) => changes,
            None => {
                let newest = newest_revision(&*self.store().await?).await?;
                check_after(self.at, Revision::new(next.get() - 1), newest)?;
                self.watch(next).await?
            }
        };
        let mut batches = Vec::new();
        let mut first = timeout(EVENT_TIMEOUT, changes.next()).await.ok().flatten();
        while let Some(batch) = first.take() {
            match batch {
                Ok(batch) => batches.push(batch),
                // After an error, the watch returns the same error again at the next read.
                Err(_) if !batches.is_empty() => return Ok(self.part_of_batches(next, batches)),
                Err(error) => return Err(error.into()),
            }
            if batches.len() < MAX_BATCHES {
                first = changes.next().now_or_never().flatten();
            }
        }
        self.changes = Some(changes);
        if batches.is_empty() {
            self.probe_idle(next).await;
            return self.part_when_quiet(next);
        }
        self.idle.restart();
        Ok(self.part_of_batches(next, batches))
    }

    /// If no key of the watched range has changed, moves the position of a quiet cluster watch to a newer revision.
    async fn probe_idle(&mut self, next: Revision) {
        if self.past.is_some() || self.daemon.is_some() {
            return;
        }
        let Ok(store) = self.store().await else { return };
        if let Some(reached) = self.idle.take_reached(&store, Revision::new(next.get() - 1)) {
            self.position = ReadPosition::Log(reached.next().max(next));
        }
    }

    /// Builds a history part from `batches`, and records their events as reported.
    fn part_of_batches(&mut self, next: Revision, mut batches: Vec<Batch>) -> HistoryPart {
        // At the compaction mark etcd might not have the former values of keys any more. If etcd no longer has a key's
        // previous value, the reader continues with a complete state, which `resume_after_loss` chooses.
        let is_unknown = |batch: &Batch| batch.events.iter().any(is_before_unknown);
        if let Some(known) = batches.iter().position(is_unknown) {
            let mark = batches.get(known).map_or(next, |batch| batch.revision);
            batches.truncate(known);
            self.changes = None;
            if batches.is_empty() {
                return self.resume_after_loss(Revision::new(next.get() - 1), mark);
            }
        }
        // A batch with a revision below `next`, such as a change of a handle, may arrive late, and must not move the
        // position back.
        self.position = ReadPosition::Log(batches.last().map_or(next, |batch| batch.revision.next().max(next)));
        if let Some(past) = &mut self.past {
            batches.retain(|batch| batch.revision <= past.head);
            for Event { kind, kv, .. } in batches.iter().flat_map(|batch| &batch.events) {
                match kind {
                    EventKind::Put => past.reported.insert(kv.key.clone(), kv.mod_revision),
                    EventKind::Delete => past.reported.remove(&kv.key),
                };
            }
            past.last = Instant::now();
        }
        match batches.last() {
            Some(last) if batches.iter().all(Batch::is_progress) => HistoryPart::Reached(last.revision),
            _ => HistoryPart::Happened(batches),
        }
    }

    /// Returns what the reader reports after a read without events: `HistoryPart::Reached` if the watch has reported
    /// all events, and otherwise `HistoryPart::Happened` with no batches.
    fn part_when_quiet(&mut self, next: Revision) -> Result<HistoryPart, ReadError> {
        let Some(past) = &self.past else { return Ok(HistoryPart::Reached(self.position.read())) };
        if past.reported == past.goal {
            return Ok(HistoryPart::Reached(past.head));
        }
        if past.last.elapsed() < PAST_TIMEOUT {
            return Ok(HistoryPart::Happened(Vec::new()));
        }
        let failure = CommandFailure::new(format!("{} does not tell what happened since revision {next}", self.at));
        Err(ReadError::Stop(FollowStop::Failed(
            failure.hint("check the etcd members with: etcdctl endpoint status --cluster"),
        )))
    }

    /// If `error` is transient, lets the next read start a new watch. A cluster's store reports a transient error only
    /// after it has retried for a while.
    fn part_when_disconnected(&mut self, error: &kv::Error) -> Option<HistoryPart> {
        let may_go_on = self.past.is_none()
            && matches!(self.position, ReadPosition::Log(_) | ReadPosition::Lost(_))
            && error.kind().is_transient();
        self.changes = None;
        self.is_cut_off = may_go_on && self.daemon.is_some();
        may_go_on.then(|| HistoryPart::Interrupted(error.to_string()))
    }

    /// If `error` says that history was compacted, chooses where the reader continues, and returns the history part to
    /// report; otherwise returns `None`.
    fn part_when_compacted(&mut self, error: &kv::Error) -> Option<HistoryPart> {
        let ErrorKind::Compacted { compact_revision: mark } = *error.kind() else { return None };
        let read = self.position.read();
        self.changes = None;
        if self.past.is_some() && !mark.is_set() {
            // To learn the compaction mark, the next call of `read` starts a watch: a failed watch reports the mark,
            // but a failed range read does not.
            self.position = ReadPosition::Log(read);
            return Some(HistoryPart::Happened(Vec::new()));
        }
        if self.past.is_none() && mark.is_set() && mark <= read {
            // A watch without progress reports restarts at its last event, whose revision may have been compacted
            // since. The reader's position may be later than the last event of the disconnected watch, so a new watch
            // can start at this position.
            return Some(HistoryPart::Happened(Vec::new()));
        }
        Some(self.resume_after_loss(read, mark))
    }

    /// Continues with the newest state, because changes after revision `read` (the last one that was read) were
    /// compacted. A reader that started with `FollowStart::Oldest` continues with the state at the compaction mark
    /// `mark`.
    fn resume_after_loss(&mut self, read: Revision, mark: Revision) -> HistoryPart {
        if let Some(past) = &mut self.past {
            past.reported.clear();
            self.position = ReadPosition::State(mark, self.range.bounds().0);
            return HistoryPart::GivenUp(read, mark);
        }
        self.position = ReadPosition::Lost(read);
        HistoryPart::Happened(Vec::new())
    }
}

enum ReadError {
    Store(kv::Error),
    Stop(FollowStop),
}

impl From<kv::Error> for ReadError {
    fn from(error: kv::Error) -> Self {
        Self::Store(error)
    }
}

impl From<CommandFailure> for ReadError {
    fn from(failure: CommandFailure) -> Self {
        Self::Stop(failure.into())
    }
}

impl From<FollowStop> for ReadError {
    fn from(stop: FollowStop) -> Self {
        Self::Stop(stop)
    }
}

async fn newest_revision(store: &dyn Store) -> kv::Result<Revision> {
    Ok(store.range(revision_request()).await?.revision)
}

/// Returns the oldest revision of the store that can still be read.
async fn oldest_revision(store: &dyn Store) -> kv::Result<Revision> {
    let first = Revision::new(1);
    let revision_request = revision_request();
    match store.range(revision_request.clone().with_at(first)).await {
        Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
        other => return other.map(|_| first),
    }
    // A watch that starts at a compacted revision fails immediately, and its error has the oldest revision at which a
    // watch can start.
    let mut refused = store.watch(WatchRequest::new(revision_request.range, first)).await?;
    match refused.next().await {
        Some(Err(error)) => match error.kind() {
            ErrorKind::Compacted { compact_revision } if compact_revision.is_set() => Ok(*compact_revision),
            _ => Err(error),
        },
        _ => Ok(first),
    }
}

/// How long a watch must be quiet before the first idle probe, and the upper bound to which that wait grows. The
/// interval between two idle probes doubles after each probe, because a probe lists the keys twice.
const IDLE_WAITS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(64)];

/// Finds out up to which revision a quiet watch has reported all events. The documentation of this module explains how
/// the probe works.
struct IdleProbe {
    wait: Duration,
    next: Instant,
    /// The task of the probe that currently runs; empty if no probe runs.
    probe: JoinSet<Option<Revision>>,
    /// The revision up to which the last probe found no change of a watched key. The probe's result is discarded if the
    /// watch reports an event before the next call of `take_reached`.
    candidate: Option<Revision>,
}

impl IdleProbe {
    fn new() -> Self {
        Self { wait: IDLE_WAITS[0], next: Instant::now() + IDLE_WAITS[0], probe: JoinSet::new(), candidate: None }
    }

    /// Restarts the waiting time before the next probe, because the watch has reported an event.
    fn restart(&mut self) {
        self.next = Instant::now() + self.wait;
        self.probe = JoinSet::new();
        self.candidate = None;
    }

    /// Returns the revision up to which the watch has reported all events, if a probe has found this revision. The
    /// caller guarantees that the watch has reported all events up to `at`, and was quiet for a while since the last
    /// call of this method. Errors of the idle probe's requests are ignored, because the watch reports store errors.
    fn take_reached(&mut self, store: &Arc<dyn Store>, at: Revision) -> Option<Revision> {
        if let Some(candidate) = self.candidate.take() {
            return Some(candidate);
        }
        if let Some(seen) = self.probe.try_join_next() {
            self.candidate = seen.ok().flatten();
            self.next = Instant::now() + self.wait;
        } else if self.probe.is_empty() && Instant::now() >= self.next {
            self.wait = (self.wait * 2).min(IDLE_WAITS[1]);
            let store = Arc::clone(store);
            self.probe.spawn(async move { newest_if_unchanged(&*store, at).await.ok().flatten() });
        }
        None
    }
}

/// Returns a cheap range request whose response has only the store's revision.
fn revision_request() -> RangeRequest {
    RangeRequest::new(Range::key(keys::config())).with_content(Content::CountOnly)
}

/// Returns the store's newest revision if no block or affinity key has changed since `at`.
async fn newest_if_unchanged(store: &dyn Store, at: Revision) -> kv::Result<Option<Revision>> {
    let newest = store.range(revision_request()).await?.revision;
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

    /// Polls the idle probe for up to 1.5 s while the watch reports no event.
    async fn reached(idle: &mut IdleProbe, store: &Arc<dyn Store>, at: Revision) -> Option<Revision> {
        for _ in 0..150 {
            if let Some(reached) = idle.take_reached(store, at) {
                return Some(reached);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }

    #[test]
    fn quiet_watch_follows_only_blocks_and_affinities() {
        let folder = tempfile::tempdir().unwrap();
        let location = stores::of_engine("redb", folder.path().join("store")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open = datastore::open(&location, &Create::IfMissing.with_wait(IDLE_WAITS[1])).await.unwrap();
            let store = open.store();
            let put = async |key: Key| store.put(key, "x").await.unwrap();
            let block = keys::block("10.0.0.0/26".parse().unwrap());
            let at = put(block.clone()).await;
            let newest = put(keys::handle("one")).await;
            assert_eq!(reached(&mut IdleProbe::new(), &store, at).await, Some(newest));

            let mut idle = IdleProbe::new();
            while idle.candidate.is_none() {
                assert_eq!(idle.take_reached(&store, at), None);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            idle.restart();
            assert_eq!(idle.take_reached(&store, at), None, "from before an event");

            put(block).await;
            assert_eq!(reached(&mut IdleProbe::new(), &store, at).await, None);
            drop(store);
            open.close().await.unwrap();
        });
    }
}
