//! Counts the round trips to the store that calls of the allocator need with and without hints. Tests that hints save
//! round trips to the store, and never change the result of a call.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::gc::ReadScope;
use ipam_core::hints::Hints;
use ipam_core::model::{IpamConfig, NewPool, Owner};
use ipam_core::{Ipam, Nodes};
use ipnet::IpNet;
use kv::wrap::{CountingStore, Fault, FaultyStore};
use kv::{Operation, StoreExt};

use crate::world::{World, attachment, ip, soon};

/// Hints for tests: either the hints that were last recorded, or (if `is_stuck`) fixed ones.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    blocks: Mutex<Vec<IpNet>>,
    reported: AtomicU32,
    is_stuck: bool,
    about_to_hold: Mutex<Vec<IpNet>>,
}

impl Memory {
    /// Creates hints that always name the given blocks.
    fn stuck_at(blocks: &[&str]) -> Arc<Self> {
        let blocks = Mutex::new(blocks.iter().map(|text| text.parse().unwrap()).collect());
        Arc::new(Self { blocks, is_stuck: true, ..Self::default() })
    }

    fn reported(&self) -> u32 {
        self.reported.load(SeqCst)
    }
}

impl Hints for Memory {
    fn recall(&self, _: &Attachment) -> Vec<IpNet> {
        self.blocks.lock().unwrap().clone()
    }

    fn remember(&self, _: &Attachment, blocks: &[IpNet]) {
        self.reported.fetch_add(1, SeqCst);
        if !self.is_stuck {
            *self.blocks.lock().unwrap() = blocks.to_vec();
        }
    }

    fn about_to_hold(&self, _: &str, blocks: &[IpNet]) {
        self.about_to_hold.lock().unwrap().extend(blocks);
    }
}

pub(crate) type Counted = CountingStore<Arc<dyn kv::Store>>;

/// Creates an allocator with the given hints on the store of a test `World`, and returns it with a wrapper that counts
/// its store calls.
pub(crate) fn counted(world: &World, hints: &Arc<Memory>) -> (Ipam, Counted) {
    let counting = CountingStore::new(Arc::clone(&world.store));
    let counted = World::on(Arc::new(counting.clone()), Nodes::Registered);
    (counted.ipam.with_hints(Arc::clone(hints) as Arc<dyn Hints>), counting)
}

/// A test world with three nodes, and with pools whose blocks have 64 addresses.
async fn world() -> World {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/16".parse().unwrap())).await;
    world.add(NewPool::new("v6", "fd00::/104".parse().unwrap())).await;
    world
}

fn any(container: &str, v4: usize, v6: usize) -> AssignRequest {
    AssignRequest::new(attachment("a", container), RequestedAddresses::any(v4, v6))
}

fn these(container: &str, ips: &[&str]) -> AssignRequest {
    let addresses: Vec<_> = ips.iter().map(|text| ip(text)).collect();
    AssignRequest::new(attachment("a", container), RequestedAddresses::these(addresses))
}

/// A borrowed block is recorded before the commit, since the caller cannot know whether an unanswered commit happened.
/// Before the commit, the host must record borrowed blocks of other nodes; it need not record the node's own block.
#[tokio::test]
async fn hint_of_borrowed_block_is_noted_before_commit() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let hints = Arc::new(Memory::default());
    let noted = || std::mem::take(&mut *hints.about_to_hold.lock().unwrap());
    let ipam = world.ipam.clone().with_hints(Arc::clone(&hints) as Arc<dyn Hints>);
    ipam.assign(&any("own", 4, 0), soon()).await.unwrap();
    assert_eq!(noted(), []);
    let of_b = world
        .assign(&AssignRequest::new(attachment("b", "b1"), RequestedAddresses::any(1, 0)))
        .await
        .unwrap()
        .remove(0);
    let before = world.dump().await;
    // After the hints have recorded the borrowed block, all requests to the store are lost.
    let seen = Arc::clone(&hints);
    let is_noted = move |_| (!seen.about_to_hold.lock().unwrap().is_empty()).then_some(Fault::RequestLost);
    let lost = FaultyStore::new(Arc::clone(&world.store), is_noted);
    let ipam = World::on(Arc::new(lost), Nodes::Registered).ipam.with_hints(Arc::clone(&hints) as Arc<dyn Hints>);
    let soon_over = kv::Deadline::after(Duration::from_secs(2));
    ipam.assign(&any("borrows", 1, 0), soon_over).await.unwrap_err();
    assert_eq!(world.dump().await, before);
    let all = noted();
    assert!(!all.is_empty() && all.iter().all(|cidr| *cidr == of_b.block), "{all:?}");
    // Recording the borrowed block does not change which blocks a scan of node `a` reads.
    assert_eq!(
        world.ipam.clone().with_hints(Arc::clone(&hints) as Arc<dyn Hints>).read_scope_of("a"),
        ReadScope::default()
    );
}

#[tokio::test]
async fn hint_makes_steady_call_two_round_trips() {
    let world = world().await;
    let (ipam, counting) = counted(&world, &Arc::default());
    let handles = ["old".to_owned()];
    ipam.assign(&any("c1", 1, 0), soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 3, "the first: what surrounds, a probe for a free block, the commit");
    let (c2, c3) = (attachment("a", "c2"), attachment("a", "c3"));
    let assigned = ipam.assign(&any("c2", 1, 0), soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 2, "steady");
    ipam.release_attachment_of(&c2, &handles, &[assigned[0].ip], None, None, soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 2, "DEL");
    ipam.release_attachment_of(&c2, &handles, &[assigned[0].ip], None, None, soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 1, "DEL again");

    ipam.assign(&any("c3", 1, 1), soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 3, "the first of both families");
    for (number, wanted) in [(4, (1, 1)), (5, (0, 1)), (6, (1, 0))] {
        let (container, (v4, v6)) = (format!("c{number}"), wanted);
        ipam.assign(&any(&container, v4, v6), soon()).await.unwrap();
        assert_eq!(counting.take().round_trips(), 2, "{wanted:?}");
    }
    ipam.release_attachment(&c3, &handles, soon()).await.unwrap();
    assert_eq!(counting.take().round_trips(), 2, "DEL of both families by one who is not told the addresses");
    world.check().await;
}

#[tokio::test]
async fn hint_does_not_matter_for_given_address() {
    let world = world().await;
    for (number, hints) in [Arc::default(), Memory::stuck_at(&["10.0.3.0/26", "fd00::/122"])].iter().enumerate() {
        let (ipam, counting) = counted(&world, hints);
        let given = [format!("10.0.{number}.7"), format!("10.0.{number}.9"), format!("fd00::{number}:7")];
        for (container, ips) in [("new", &given[..1]), ("known", &given[1..2]), ("v6", &given[2..])] {
            let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
            let container = format!("{container}-{number}");
            let assigned = ipam.assign(&these(&container, &ips), soon()).await.unwrap();
            assert_eq!(counting.take().round_trips(), 2, "{container}");
            let who = attachment("a", &container);
            ipam.release_attachment_of(&who, &[], &[assigned[0].ip], None, None, soon()).await.unwrap();
            assert_eq!(counting.take().round_trips(), 2, "DEL {container}");
        }
    }
    world.check().await;
}

#[tokio::test]
async fn hint_is_stored_only_when_changed() {
    let world = world().await;
    let hints = Arc::<Memory>::default();
    let (ipam, _) = counted(&world, &hints);
    for container in ["c1", "c2", "c3"] {
        ipam.assign(&any(container, 1, 0), soon()).await.unwrap();
    }
    assert_eq!(hints.reported(), 1);
    ipam.assign(&any("c4", 1, 1), soon()).await.unwrap();
    assert_eq!(hints.reported(), 2);
    ipam.assign(&these("c5", &["10.0.77.7"]), soon()).await.unwrap();
    assert_eq!(hints.blocks.lock().unwrap().first().unwrap().to_string(), "10.0.77.0/26");
    assert_eq!(hints.blocks.lock().unwrap().len(), 3);
}

/// A conflict with a concurrent request for the same block costs two more round trips, even if the block is new.
#[tokio::test(start_paused = true)]
async fn hint_conflict_costs_two_round_trips() {
    for (is_new, expected) in [(false, 4), (true, 5)] {
        let world = world().await;
        let hints = Arc::default();
        if !is_new {
            counted(&world, &hints).0.assign(&any("before", 1, 0), soon()).await.unwrap();
        }
        let (calls, commit) = (AtomicU32::new(0), if is_new { 2 } else { 1 });
        let late = FaultyStore::new(Arc::clone(&world.store), move |operation| {
            let is_commit = operation == Operation::Txn && calls.fetch_add(1, SeqCst) == commit;
            is_commit.then_some(Fault::Delay(Duration::from_secs(1)))
        });
        let counting = CountingStore::new(Arc::new(late) as Arc<dyn kv::Store>);
        let ipam = World::on(Arc::new(counting.clone()), Nodes::Registered).ipam.with_hints(hints);
        let request = any("late", 1, 0);
        let other = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            world.one("a", "early").await.unwrap()
        };
        let (assigned, early) = tokio::join!(ipam.assign(&request, soon()), other);
        assert_ne!(assigned.unwrap()[0].ip, early);
        assert_eq!(counting.take().round_trips(), expected, "new: {is_new}");
        world.check().await;
    }
}

#[tokio::test]
async fn hint_costs_one_round_trip_when_wrong() {
    let own = "10.0.0.0/26";
    // Each wrong hint is listed with the number of keys and ranges that the second request of the assignment reads. The
    // second request reads the block, its affinity, and the neighbouring block keys that the first request missed
    // because the hint was wrong.
    for (wrong, ranges) in [
        (&[] as &[&str], 3),
        (&["10.0.9.0/26"], 3),
        (&["192.168.0.0/26"], 3),
        (&["10.0.0.0/28"], 2),
        (&["10.0.0.0/8"], 3),
        (&["0.0.0.0/0", "::/0"], 3),
        (&["10.0.0.64/26", own], 3),
        (&["10.0.0.128/26", own], 3),
    ] {
        let world = World::new().await;
        world.add(NewPool::new("v4", "10.0.0.0/16".parse().unwrap())).await;
        let claim = async |node: &str, cidr: &str| {
            let _ = world.ipam.claim_affinity(&Owner::host(node), cidr.parse().unwrap(), soon()).await.unwrap();
        };
        claim("a", own).await;
        claim("b", "10.0.0.64/26").await;
        world.store.put("/calico/ipam/v2/assignment/ipv4/block/10.0.0.128-26", "no block").await.unwrap();
        let (ipam, counting) = counted(&world, &Memory::stuck_at(wrong));
        let assigned = ipam.assign(&any("c1", 1, 0), soon()).await.unwrap();
        assert_eq!(assigned[0].ip, ip("10.0.0.0"), "{wrong:?}");
        let counts = counting.take();
        assert_eq!((counts.txns, counts.ranges), (2, ranges), "{wrong:?}");
        let released = ipam.release_attachment(&attachment("a", "c1"), &[], soon()).await.unwrap();
        assert_eq!(released, [ip("10.0.0.0")], "{wrong:?}");
        let counts = counting.take();
        assert_eq!((counts.txns, counts.ranges), (2, 1), "{wrong:?}");
    }
}

/// Runs the same random calls in two test worlds, one with random hints and one without hints, and compares the
/// results. With and without hints, the same calls must succeed, and the blocks, handles and affinities must be
/// consistent.
#[tokio::test]
async fn hints_drawn_at_random_decide_nothing() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (plain, hinted) = (World::of_one_caller().await, World::of_one_caller().await);
        for world in [&plain, &hinted] {
            world.add_pool("v4", "10.0.0.0/28").await;
            world.configure(IpamConfig::default().with_strict_affinity(seed % 2 == 0)).await;
        }
        for step in 0..40 {
            let (node, container) = (["a", "b", "c"][random.usize(0..3)], format!("c{}", random.u8(0..8)));
            let blocks: Vec<String> =
                (0..random.usize(0..3)).map(|_| format!("10.0.0.{}/30", random.u8(0..6) * 4)).collect();
            let blocks: Vec<&str> = blocks.iter().map(String::as_str).collect();
            let (ipam, _) = counted(&hinted, &Memory::stuck_at(&blocks));
            let who = attachment(node, &container);
            if random.bool() {
                let request = AssignRequest::new(who, RequestedAddresses::any(1, 0));
                let (one, other) = (plain.assign(&request).await, ipam.assign(&request, soon()).await);
                assert_eq!(one.is_ok(), other.is_ok(), "seed {seed}, step {step}: {one:?}, {other:?}");
            } else {
                let said = [ip(&format!("10.0.0.{}", random.u8(0..20)))];
                let one = plain.ipam.release_attachment(&who, &[], soon()).await.unwrap();
                let other = ipam
                    .release_attachment_of(&who, &[], &said[..random.usize(0..2)], None, None, soon())
                    .await
                    .unwrap();
                assert_eq!(one.len(), other.len(), "seed {seed}, step {step}");
            }
        }
        hinted.check().await;
    }
}
