//! Tests assignments that are aborted after their commit was sent, but before the commit's answer arrived.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::{Owner, keys};
use ipam_core::pending_commits::{PendingCommit, PendingCommitId, PendingCommits};
use ipam_core::{Ipam, Nodes};
use kv::wrap::{Fault, FaultyStore};
use kv::{Deadline, ErrorKind, Operation, Outcome, Store, Txn};
use tokio::sync::Notify;

use crate::world::{World, attachment, held, soon};

/// A list of pending commits that is kept in memory.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    kept: Mutex<BTreeMap<String, (Attachment, Txn)>>,
    recorded: AtomicU32,
    is_full: bool,
}

impl Notes {
    pub(crate) fn count(&self) -> usize {
        self.kept.lock().unwrap().len()
    }
}

#[async_trait]
impl PendingCommits for Notes {
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<PendingCommitId> {
        if self.is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let id = self.recorded.fetch_add(1, SeqCst).to_string();
        self.kept.lock().unwrap().insert(id.clone(), (attachment.clone(), txn.clone()));
        Ok(PendingCommitId(id))
    }

    fn forget(&self, id: &PendingCommitId) {
        self.kept.lock().unwrap().remove(&id.0);
    }

    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        let kept = self.kept.lock().unwrap();
        let own = kept.iter().filter(|(_, (noted, _))| noted == attachment);
        Ok(own.map(|(id, (_, txn))| PendingCommit { id: PendingCommitId(id.clone()), txn: txn.clone() }).collect())
    }
}

pub(crate) fn allocator(store: &Arc<dyn Store>, notes: &Arc<Notes>) -> Ipam {
    Ipam::new(Arc::clone(store), Nodes::Registered).with_pending_commits(Arc::clone(notes) as Arc<dyn PendingCommits>)
}

fn request() -> AssignRequest {
    AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 0))
}

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    // Creates a block before the test, so that the test's commit guards an existing block. A commit that creates a
    // block guards only absent keys.
    world.one("a", "before").await.unwrap();
    world
}

/// Returns the store of a test `World` with one fault, and a `Notify` that fires when a call hangs. Transaction number
/// `reads`, counted from 0, gets the given fault. Every later call hangs and fires the `Notify`.
pub(crate) fn breaking(world: &World, fault: Fault, reads: u32) -> (FaultyStore<Arc<dyn Store>>, Arc<Notify>) {
    let commits = AtomicU32::new(0);
    let reported = Arc::new(Notify::new());
    let tell = Arc::clone(&reported);
    let faulty = FaultyStore::new(Arc::clone(&world.store), move |operation| {
        // The outcome of a commit that guards only absent keys is decided by reading the history. In this test, a read
        // of the history after the faulty commit hangs, as a retry of the commit would.
        let begun = if operation == Operation::Txn { commits.fetch_add(1, SeqCst) } else { commits.load(SeqCst) };
        match (begun, operation) {
            (before, _) if before < reads => None,
            (commit, Operation::Txn) if commit == reads => Some(fault),
            (commit, _) if commit == reads => None,
            _ => {
                tell.notify_one();
                Some(Fault::Delay(Duration::from_secs(3600)))
            }
        }
    });
    (faulty, reported)
}

/// Starts an assignment, and aborts it after its commit was sent, but before the commit's answer arrived.
async fn break_off(world: &World, notes: &Arc<Notes>, fault: Fault) -> FaultyStore<Arc<dyn Store>> {
    // The assignment's first transaction reads the pools and other documents. If the node has no block, a second
    // transaction looks for a free block.
    let reads = if world.block("10.0.0.0/30").await.is_some() { 1 } else { 2 };
    let (faulty, reported) = breaking(world, fault, reads);
    let ipam = allocator(&(Arc::new(faulty.clone()) as Arc<dyn Store>), notes);
    let killed = tokio::spawn(async move { ipam.assign(&request(), soon()).await });
    reported.notified().await;
    killed.abort();
    assert!(killed.await.unwrap_err().is_cancelled());
    assert_eq!(notes.count(), 1);
    faulty
}

/// Tests a late commit that guards only absent keys. When the delayed copy of the commit arrives, the block that the
/// commit creates has been deleted, so the guarded keys are absent again.
async fn absent_again(settle: impl AsyncFn(&World, &Ipam)) {
    for fault in FAULTS {
        let world = World::new().await;
        world.add_pool("v4", "10.0.0.0/30").await;
        let notes = Arc::default();
        let late = break_off(&world, &notes, fault).await;
        let ipam = allocator(&world.store, &notes);
        settle(&world, &ipam).await;
        assert_eq!(notes.count(), 0);
        for node in ["a", "b"] {
            world.ipam.release_all_affinities(&Owner::host(node), ReleaseIf::Any, soon()).await.unwrap();
        }
        let before = world.dump().await;
        late.deliver_held().await.unwrap();
        assert_eq!(world.dump().await, before, "{fault:?}");
        assert!(before.iter().all(|kv| keys::parse_block(&kv.key).is_none()));
    }
}

#[tokio::test(start_paused = true)]
async fn late_commit_leaves_nothing_when_new_block_is_gone() {
    absent_again(async |_, ipam| {
        ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn late_commit_leaves_nothing_when_foreign_block_is_gone() {
    absent_again(async |world, ipam| {
        let _ = world.ipam.claim_affinity(&Owner::host("b"), "10.0.0.0/30".parse().unwrap(), soon()).await.unwrap();
        ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap();
    })
    .await;
}

/// In this test, the assignment sends its commit again and succeeds while the first commit is still on its way to the
/// store.
#[tokio::test(start_paused = true)]
async fn late_commit_sent_twice_does_not_land_after_release() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    let notes: Arc<Notes> = Arc::default();
    // The first two transactions only read: the first reads the pools and other documents, the second reads blocks to
    // find a free one.
    let late = FaultyStore::script(Arc::clone(&world.store), [None, None, Some(Fault::Held)]);
    let ipam = allocator(&(Arc::new(late.clone()) as Arc<dyn Store>), &notes);
    assert_eq!(ipam.assign(&request(), soon()).await.unwrap().len(), 1);
    assert_eq!(notes.count(), 1, "it may land again");
    assert_eq!(ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap().len(), 1);
    assert_eq!(notes.count(), 0);
    world.ipam.release_all_affinities(&Owner::host("a"), ReleaseIf::Any, soon()).await.unwrap();
    let before = world.dump().await;
    assert_eq!(late.deliver_held().await.unwrap().len(), 1);
    assert_eq!(world.dump().await, before);
}

const FAULTS: [Fault; 3] = [Fault::Held, Fault::RequestLost, Fault::ReplyLost];

#[tokio::test(start_paused = true)]
async fn late_commit_after_release_leaves_nothing() {
    for fault in FAULTS {
        let world = world().await;
        let notes = Arc::default();
        let late = break_off(&world, &notes, fault).await;
        let ipam = allocator(&world.store, &notes);
        assert_eq!(ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap().len(), 1, "{fault:?}");
        assert_eq!(notes.count(), 0);
        let before = world.dump().await;
        late.deliver_held().await.unwrap();
        assert_eq!(world.dump().await, before, "{fault:?}");
        world.check().await;
    }
}

/// Shows that an address would be lost if pending commits were not recorded.
#[tokio::test(start_paused = true)]
async fn late_commit_without_notes_would_lose_address() {
    let world = world().await;
    let late = break_off(&world, &Arc::default(), Fault::Held).await;
    assert!(world.release("a", "c1").await.is_empty());
    late.deliver_held().await.unwrap();
    assert_eq!(held(&world.ipam, &attachment("a", "c1")).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn late_commit_after_other_assignment_is_same_address() {
    for fault in FAULTS {
        let world = world().await;
        let notes = Arc::default();
        let late = break_off(&world, &notes, fault).await;
        let ipam = allocator(&world.store, &notes);
        let assigned = ipam.assign(&request(), soon()).await.unwrap();
        late.deliver_held().await.unwrap();
        assert_eq!(held(&ipam, &attachment("a", "c1")).await, [assigned[0].ip], "{fault:?}");
        assert_eq!(notes.count(), 0);
        world.check().await;
    }
}

#[tokio::test(start_paused = true)]
async fn note_does_no_harm_when_its_guards_fail() {
    let world = world().await;
    let notes = Arc::default();
    let late = break_off(&world, &notes, Fault::Held).await;
    world.one("a", "another").await.unwrap();
    let ipam = allocator(&world.store, &notes);
    assert!(ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap().is_empty());
    late.deliver_held().await.unwrap();
    assert!(held(&ipam, &attachment("a", "c1")).await.is_empty());
    world.check().await;
}

#[tokio::test(start_paused = true)]
async fn note_stays_while_its_commit_could_come_again() {
    // Each test case lists which store faults hit the first commit and its retry, and how many pending commits stay
    // recorded. If the guards of a repeated commit fail, either the first commit or another writer may have changed the
    // guarded keys.
    let stays = [
        ([None, None], 0),
        ([Some(Fault::RequestLost), None], 0),
        ([Some(Fault::RequestLost), Some(Fault::NotSent)], 0),
        ([Some(Fault::ReplyLost), None], 1),
    ];
    for (faults, notes_left) in stays {
        let world = world().await;
        let notes: Arc<Notes> = Arc::default();
        let script = [None].into_iter().chain(faults);
        let faulty: Arc<dyn Store> = Arc::new(FaultyStore::script(Arc::clone(&world.store), script));
        let ipam = allocator(&faulty, &notes);
        ipam.assign(&request(), soon()).await.unwrap();
        assert_eq!((notes.count(), notes.recorded.load(SeqCst)), (notes_left, 1), "{faults:?}");
        assert_eq!(ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap().len(), 1);
        assert_eq!(notes.count(), 0);
        world.check().await;
    }
}

#[tokio::test(start_paused = true)]
async fn note_stays_when_outcome_is_unknown() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    // All store calls after the commit fail, so the commit's retry never reaches the store and does not show whether
    // the first commit happened.
    let commits = AtomicU32::new(0);
    let faulty = FaultyStore::new(Arc::clone(&world.store), move |operation| {
        let commit = if operation == Operation::Txn { commits.fetch_add(1, SeqCst) } else { 0 };
        [None, Some(Fault::ReplyLost)].get(commit as usize).copied().unwrap_or(Some(Fault::NotSent))
    });
    let faulty: Arc<dyn Store> = Arc::new(faulty);
    let deadline = Deadline::after(Duration::from_secs(1));
    let error = allocator(&faulty, &notes).assign(&request(), deadline).await.unwrap_err();
    let ipam_core::Error::Store(error) = error else { panic!("{error}") };
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(notes.count(), 1);
    let ipam = allocator(&world.store, &notes);
    assert_eq!(ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap().len(), 1);
    assert_eq!(notes.count(), 0);
    world.check().await;
}

#[tokio::test]
async fn note_that_cannot_be_written_stops_commit() {
    let world = world().await;
    let notes = Arc::new(Notes { is_full: true, ..Notes::default() });
    let before = world.dump().await;
    let error = allocator(&world.store, &notes).assign(&request(), soon()).await.unwrap_err();
    let ipam_core::Error::Store(error) = error else { panic!("{error}") };
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Io, Outcome::NotApplied));
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn note_is_not_written_for_repeated_answer() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    let ipam = allocator(&world.store, &notes);
    let first = ipam.assign(&request(), soon()).await.unwrap();
    assert_eq!(ipam.assign(&request(), soon()).await.unwrap(), first);
    assert_eq!(notes.recorded.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn note_is_removed_when_commit_was_never_sent() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    let begun = AtomicU32::new(0);
    let faulty = FaultyStore::new(Arc::clone(&world.store), move |operation| {
        // The first transaction only reads the documents for the assignment.
        (operation == Operation::Txn && begun.fetch_add(1, SeqCst) > 0).then_some(Fault::NotSent)
    });
    let faulty: Arc<dyn Store> = Arc::new(faulty);
    let deadline = Deadline::after(Duration::from_secs(1));
    let error = allocator(&faulty, &notes).assign(&request(), deadline).await.unwrap_err();
    let ipam_core::Error::Store(error) = error else { panic!("{error}") };
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied));
    assert_eq!((notes.recorded.load(SeqCst) > 0, notes.count()), (true, 0));
}

#[tokio::test(start_paused = true)]
async fn note_settlement_is_delayed_when_store_is_unreachable() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    break_off(&world, &notes, Fault::RequestLost).await;
    let sent = AtomicU32::new(0);
    let faulty =
        FaultyStore::new(Arc::clone(&world.store), move |_| (sent.fetch_add(1, SeqCst) < 3).then_some(Fault::NotSent));
    let faulty: Arc<dyn Store> = Arc::new(faulty);
    let released = allocator(&faulty, &notes).release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap();
    assert_eq!((released.len(), notes.count()), (1, 0), "the late commit was sent again, and released");
}

#[tokio::test]
async fn note_settlement_ends_at_its_deadline() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    break_off(&world, &notes, Fault::RequestLost).await;
    let faulty: Arc<dyn Store> = Arc::new(FaultyStore::new(Arc::clone(&world.store), |_| Some(Fault::NotSent)));
    let ipam = allocator(&faulty, &notes);
    let deadline = Deadline::after(Duration::from_millis(200));
    let done = tokio::time::timeout(Duration::from_secs(60), ipam.assign(&request(), deadline)).await.unwrap();
    assert!(matches!(done, Err(ipam_core::Error::Store(error)) if *error.kind() == ErrorKind::NotSent));
    assert_eq!(notes.count(), 1);
}
