//! Assignments to several attachments in one commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use async_trait::async_trait;
use ipam_core::assign::{AssignRequest, Assigned, Bridge, Gateway, Wanted};
use ipam_core::intents::StillAsked;
use ipam_core::model::{IpamConfig, NewPool};
use ipam_core::{Error, Ipam, Nodes, Result};
use kv::{
    Deadline, ErrorKind, Kv, RangeRequest, RangeResponse, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream,
};
use serde_json::Value;

use crate::hints::counted;
use crate::intents::Notes;
use crate::world::{World, attachment, ip, soon};

fn always() -> StillAsked {
    Arc::new(|| true)
}

/// Assigns to all of them, of whom the first commits.
async fn assign_together(
    ipam: &Ipam,
    requests: &[AssignRequest],
    still_asked: &StillAsked,
    deadline: Deadline,
) -> Result<Vec<Vec<Assigned>>> {
    ipam.assign_together(&requests[0], || requests[1..].to_vec(), still_asked, deadline).await
}

fn request(container: &str, wanted: Wanted) -> AssignRequest {
    AssignRequest::new(attachment("a", container), wanted)
}

/// One IPv4 address for each.
fn requests(containers: &[&str]) -> Vec<AssignRequest> {
    containers.iter().map(|container| request(container, Wanted::any(1, 0))).collect()
}

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/120").await;
    world
}

async fn revision(world: &World) -> i64 {
    world.store.range(RangeRequest::new(kv::Range::All).with_limit(1)).await.unwrap().revision.get()
}

/// What is stored but for how often a block was written, and by which of the writes an address was given.
fn documents(kvs: &[Kv]) -> Vec<(String, Value)> {
    let document = |kv: &Kv| {
        let mut value: Value = serde_json::from_slice(kv.value.as_bytes()).unwrap();
        if let Some(fields) = value.as_object_mut() {
            fields.remove("sequenceNumber");
            fields.remove("sequenceNumberForAllocation");
        }
        (kv.key.to_string(), value)
    };
    kvs.iter().map(document).collect()
}

/// Serves them one after the other and, in another world, together: with the same answers, the same documents, and as many
/// commits as there were requests there, and one here.
async fn the_same(requests: &[AssignRequest], prepare: impl AsyncFn(&World)) -> Vec<Vec<Assigned>> {
    let [alone, together] = [world().await, world().await];
    let mut answers = Vec::new();
    for one in [&alone, &together] {
        prepare(one).await;
    }
    let before = revision(&alone).await;
    for request in requests {
        answers.push(alone.assign(request).await.unwrap());
    }
    assert_eq!(revision(&together).await, before);
    assert_eq!(assign_together(&together.ipam, requests, &always(), soon()).await.unwrap(), answers);
    assert_eq!(revision(&together).await, before + 1);
    assert_eq!(documents(&alone.dump().await), documents(&together.dump().await));
    together.check().await;
    answers
}

#[tokio::test]
async fn what_is_given_together_is_what_each_gets_alone() {
    // Far more than a block of four has; of one and of both families.
    let wanted = [Wanted::any(1, 0), Wanted::any(1, 1), Wanted::any(0, 1), Wanted::any(2, 3)];
    let names: Vec<String> = (0..32).map(|number| format!("c{number:02}")).collect();
    let mut requests: Vec<_> =
        names.iter().zip(wanted.iter().cycle()).map(|(name, wanted)| request(name, wanted.clone())).collect();
    for request in &mut requests {
        request.attributes = [("pod", &request.attachment.container)].map(|(k, v)| (k.to_owned(), v.clone())).into();
    }
    let answers = the_same(&requests, async |_| ()).await;
    assert_eq!(answers.iter().map(Vec::len).sum::<usize>(), 8 * (1 + 2 + 1 + 5));
    // Where there is a block with room already, it is the first one.
    let answers = the_same(&requests[..5], async |world| {
        world.one("a", "before").await.unwrap();
    })
    .await;
    assert_eq!(answers[0][0].block, answers[1][0].block);
}

#[tokio::test]
async fn interfaces_of_a_container_share_a_handle() {
    let mut requests = requests(&["c1", "c1", "c2"]);
    requests[1].attachment.interface = "eth1".to_owned();
    let answers = the_same(&requests, async |_| ()).await;
    assert_ne!(answers[0], answers[1]);
}

#[tokio::test]
async fn a_bridged_network_is_prepared_once() {
    let mut requests = requests(&["c1", "c2", "c3", "c4", "c5"]);
    for request in &mut requests {
        request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::Recorded });
    }
    let answers = the_same(&requests, async |_| ()).await;
    assert!(answers.iter().all(|answer| answer[0].gateway == Some(ip("10.0.0.1"))), "{answers:?}");
}

#[tokio::test]
async fn who_has_an_address_gets_that_again() {
    let before = async |world: &World| {
        world.one("a", "c2").await.unwrap();
    };
    let answers = the_same(&requests(&["c1", "c2", "c3"]), before).await;
    assert_ne!(answers[0], answers[1]);
    // If all have theirs, nothing is written.
    let world = world().await;
    let requests = requests(&["c1", "c2"]);
    let first = assign_together(&world.ipam, &requests, &always(), soon()).await.unwrap();
    let before = revision(&world).await;
    assert_eq!(assign_together(&world.ipam, &requests, &always(), soon()).await.unwrap(), first);
    assert_eq!(revision(&world).await, before);
}

#[tokio::test]
async fn a_block_is_written_once_and_its_number_counts_one() {
    let world = world().await;
    let first = world.assign(&requests(&["c1"])[0]).await.unwrap()[0].block.to_string();
    let before = world.block(&first).await.unwrap();
    assign_together(&world.ipam, &requests(&["c2", "c3", "c4"]), &always(), soon()).await.unwrap();
    let block = world.block(&first).await.unwrap();
    assert_eq!(block.sequence_number(), before.sequence_number() + 1);
    assert!(block.is_full());
}

#[tokio::test]
async fn nobody_gets_anything_if_one_cannot() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.one("a", "before").await.unwrap();
    let before = world.dump().await;
    let all = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
    let error = assign_together(&world.ipam, &requests(&all), &always(), soon()).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted { .. }), "{error}");
    let mut limited = requests(&all[..5]);
    limited.iter_mut().for_each(|request| request.max_blocks = 1);
    let error = assign_together(&world.ipam, &limited, &always(), soon()).await.unwrap_err();
    assert!(matches!(error, Error::BlockLimit), "{error}");
    let mut unknown = requests(&all[..3]);
    unknown[2].v4_pools = vec!["no-such-pool".to_owned()];
    assign_together(&world.ipam, &unknown, &always(), soon()).await.unwrap_err();
    assert_eq!(world.dump().await, before);
    assert_eq!(assign_together(&world.ipam, &requests(&all[..7]), &always(), soon()).await.unwrap().len(), 7);
    world.check().await;
}

#[tokio::test]
async fn one_node_and_each_once() {
    let world = world().await;
    let before = world.dump().await;
    let mut others = requests(&["c1", "c2"]);
    others[1].attachment.node = "b".to_owned();
    for wrong in [others, requests(&["c1", "c2", "c1"])] {
        let error = assign_together(&world.ipam, &wrong, &always(), soon()).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
    assert_eq!(world.dump().await, before);
}

/// A store before the first commit of which something else happens.
#[derive(Debug)]
struct Meddled {
    world: World,
    node: &'static str,
    container: &'static str,
    commits: AtomicU32,
}

#[async_trait]
impl Store for Meddled {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.world.store.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        if !txn.is_read_only() && self.commits.fetch_add(1, SeqCst) == 0 {
            self.world.one(self.node, self.container).await.unwrap();
        }
        self.world.store.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.world.store.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.world.store.compact(revision).await
    }
}

/// Assigns to three together while `container` on `node` gets an address: all answers, and what that one has.
async fn meddled(node: &'static str, container: &'static str) -> (World, Vec<Vec<Assigned>>) {
    let world = world().await;
    world.one("a", "before").await.unwrap();
    let meddled = Meddled { world: world.clone(), node, container, commits: AtomicU32::new(0) };
    let ipam = world.through(Arc::new(meddled));
    let answers = assign_together(&ipam, &requests(&["c1", "c2", "c3"]), &always(), soon()).await.unwrap();
    world.check().await;
    (world, answers)
}

/// Each of them, who asked for one address, holds the one that it was told and no other.
async fn each_has_its_answer(world: &World, containers: &[&str], answers: &[Vec<Assigned>]) {
    assert_eq!(containers.len(), answers.len());
    for (container, answer) in containers.iter().zip(answers) {
        let held = crate::world::held(&world.ipam, &attachment("a", container)).await;
        assert_eq!(held, [answer[0].ip], "{container}");
    }
}

#[tokio::test]
async fn who_was_first_is_not_served_again() {
    // One of them by itself, as one that has waited too long.
    let (world, answers) = meddled("a", "c2").await;
    each_has_its_answer(&world, &["c1", "c2", "c3"], &answers).await;
}

#[tokio::test]
async fn another_writer_in_between_costs_an_attempt() {
    let (world, answers) = meddled("a", "other").await;
    let other = crate::world::held(&world.ipam, &attachment("a", "other")).await;
    assert!(answers.iter().all(|answer| answer[0].ip != other[0]), "{answers:?}");
}

fn noting(world: &World, notes: &Arc<Notes>) -> Ipam {
    Ipam::new(Arc::clone(&world.store), Nodes::Registered).with_intents(Arc::clone(notes) as _)
}

fn conflict(result: Result<Vec<Vec<Assigned>>>) {
    let Err(Error::Store(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.kind(), &ErrorKind::Conflict { attempts: 0 });
    assert_eq!(error.outcome(), kv::Outcome::NotApplied);
}

#[tokio::test]
async fn nothing_is_sent_once_somebody_asks_no_more() {
    let world = world().await;
    let notes: Arc<Notes> = Arc::default();
    let ipam = noting(&world, &notes);
    let before = world.dump().await;
    conflict(assign_together(&ipam, &requests(&["c1", "c2"]), &(Arc::new(|| false) as StillAsked), soon()).await);
    assert_eq!(world.dump().await, before);
    assert_eq!(notes.count(), 0);
}

#[tokio::test]
async fn it_is_asked_when_the_note_can_be_found_and_again_for_each_attempt() {
    let world = world().await;
    world.one("a", "before").await.unwrap();
    let notes: Arc<Notes> = Arc::default();
    let store = Meddled { world: world.clone(), node: "a", container: "other", commits: AtomicU32::new(0) };
    let ipam = Ipam::new(Arc::new(store), Nodes::Registered).with_intents(Arc::clone(&notes) as _);
    let (asked, seen) = (Arc::new(AtomicU32::new(0)), Arc::clone(&notes));
    let asking = Arc::clone(&asked);
    // It is there the first time. The second time, after somebody else got in between, it is not.
    let still_asked: StillAsked = Arc::new(move || {
        assert_eq!(seen.count(), 2, "a note for each");
        asking.fetch_add(1, SeqCst) == 0
    });
    conflict(assign_together(&ipam, &requests(&["c1", "c2"]), &still_asked, soon()).await);
    assert_eq!((asked.load(SeqCst), notes.count()), (2, 0));
    for container in ["c1", "c2"] {
        assert!(crate::world::held(&world.ipam, &attachment("a", container)).await.is_empty());
    }
}

#[tokio::test]
async fn each_finds_the_note_of_all() {
    // Both the release of one that finds the note and the other's own assignment settle what was sent for both.
    for first in ["c1", "c2"] {
        let world = world().await;
        world.one("a", "before").await.unwrap();
        let notes: Arc<Notes> = Arc::default();
        let lost = Arc::new(AtomicBool::new(false));
        let is_lost = Arc::clone(&lost);
        let store = kv::wrap::Faulty::new(Arc::clone(&world.store), move |operation| {
            (operation == kv::Operation::Txn && is_lost.load(SeqCst)).then_some(kv::wrap::Fault::Held)
        });
        let late = store.clone();
        let ipam = Ipam::new(Arc::new(store), Nodes::Registered).with_intents(Arc::clone(&notes) as _);
        // From the commit on.
        let still_asked: StillAsked = Arc::new(move || {
            lost.store(true, SeqCst);
            true
        });
        let deadline = Deadline::after(std::time::Duration::from_millis(200));
        assign_together(&ipam, &requests(&["c1", "c2"]), &still_asked, deadline).await.unwrap_err();
        assert_eq!(notes.count(), 2);
        let ipam = noting(&world, &notes);
        let release = async |container: &str| {
            ipam.release_attachment(&attachment("a", container), &[], soon()).await.unwrap().len()
        };
        let second = if first == "c1" { "c2" } else { "c1" };
        assert_eq!(release(first).await, 1);
        let own = ipam.assign(&requests(&[second])[0], soon()).await.unwrap();
        assert_eq!(crate::world::held(&ipam, &attachment("a", second)).await, [own[0].ip]);
        assert_eq!((release(second).await, notes.count()), (1, 0));
        let before = world.dump().await;
        assert!(!late.deliver_held().await.unwrap().is_empty());
        assert_eq!(world.dump().await, before);
    }
}

#[tokio::test]
async fn many_blocks_fit_in_a_commit_or_nothing_happens() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap()).with_block_size(32)).await;
    world.configure(IpamConfig::default().with_max_blocks_per_host(200)).await;
    let names: Vec<String> = (0..92).map(|number| format!("c{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // A block, an affinity and a handle for each.
    assert_eq!(assign_together(&world.ipam, &requests(&names[..32]), &always(), soon()).await.unwrap().len(), 32);
    let before = world.dump().await;
    assign_together(&world.ipam, &requests(&names[32..]), &always(), soon()).await.unwrap_err();
    assert_eq!(world.dump().await, before);
    world.check().await;
}

#[tokio::test]
async fn who_asks_while_the_first_reads_joins_without_a_round_trip() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    world.one("a", "before").await.unwrap();
    world.one("a", "c3").await.unwrap();
    let (ipam, counting) = counted(&world, &Arc::default());
    ipam.assign(&requests(&["c0"])[0], soon()).await.unwrap();
    // The handle of c3 is there, though it was taken not to be: that costs another attempt.
    for (others, commits) in [(vec!["c2"], 1), (vec![], 1), (vec!["c3", "c4"], 3)] {
        counting.take();
        let own = request(&format!("first of {}", others.len()), Wanted::any(1, 0));
        let asked = AtomicU32::new(0);
        let join = || {
            asked.fetch_add(1, SeqCst);
            assert_eq!(counting.take().round_trips(), 1, "after what surrounds was read");
            requests(&others)
        };
        let answers = ipam.assign_together(&own, join, &always(), soon()).await.unwrap();
        assert_eq!((counting.take().round_trips(), asked.load(SeqCst)), (commits, 1), "{others:?}");
        each_has_its_answer(&world, &others, &answers[1..]).await;
    }
    world.check().await;
}

#[tokio::test]
async fn what_was_begun_for_one_who_joins_is_settled_first() {
    let world = world().await;
    world.one("a", "before").await.unwrap();
    let notes: Arc<Notes> = Arc::default();
    // It reads; what it commits is on its way, and its process is gone.
    let asked = AtomicU32::new(0);
    let store = kv::wrap::Faulty::new(Arc::clone(&world.store), move |operation| {
        let is_held = operation == kv::Operation::Txn && asked.fetch_add(1, SeqCst) > 0;
        is_held.then_some(kv::wrap::Fault::Held)
    });
    let late = store.clone();
    let begun = Ipam::new(Arc::new(store), Nodes::Registered).with_intents(Arc::clone(&notes) as _);
    let deadline = Deadline::after(std::time::Duration::from_millis(200));
    begun.assign(&requests(&["c2"])[0], deadline).await.unwrap_err();
    assert_eq!(notes.count(), 1);
    let ipam = noting(&world, &notes);
    let answers = assign_together(&ipam, &requests(&["c1", "c2"]), &always(), soon()).await.unwrap();
    assert_eq!(notes.count(), 0);
    let before = world.dump().await;
    assert!(!late.deliver_held().await.unwrap().is_empty());
    assert_eq!(world.dump().await, before);
    each_has_its_answer(&world, &["c1", "c2"], &answers).await;
    world.check().await;
}
