//! Tests that garbage collection frees the addresses of containers that are gone, and keeps all other addresses.

mod endpoints;
mod room;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use ipam_core::Nodes;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::NETNS;
use ipam_core::gc::{Allocation, Evidence, FreeResult, LivenessSource, batches, find_stale};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, NewPool};
use ipam_core::timestamps::go_string;
use kv::wrap::CountingStore;
use kv::{Range, StoreExt};
use time::OffsetDateTime;

use crate::world::{World, attachment, soon};

const THIS_BOOT: &str = "boot0002";
/// The time at which the clock of a [`World`] starts.
const START: i64 = 1_800_000_000;

/// A liveness source with the live addresses that a test sets; `None` stands for an incomplete scan.
struct Machine {
    live: Mutex<Option<BTreeSet<IpAddr>>>,
    asked: AtomicUsize,
}

impl Machine {
    fn with(live: &[IpAddr]) -> Arc<Self> {
        Arc::new(Self { live: Mutex::new(Some(live.iter().copied().collect())), asked: AtomicUsize::new(0) })
    }

    fn blind() -> Arc<Self> {
        Arc::new(Self { live: Mutex::new(None), asked: AtomicUsize::new(0) })
    }
}

#[async_trait]
impl LivenessSource for Machine {
    async fn evidence(&self) -> Option<Evidence> {
        self.asked.fetch_add(1, SeqCst);
        self.live.lock().unwrap().clone().map(evidence)
    }
}

fn evidence(live: BTreeSet<IpAddr>) -> Evidence {
    let (boot, up) = (THIS_BOOT.into(), Duration::from_secs(100));
    Evidence { boot, up, live, namespaces: Some(["4:7".to_owned()].into()), within: None }
}

/// A test world with the store of a single machine, and with a pool of two blocks of four addresses.
async fn one_machine() -> World {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/29").await;
    world
}

/// Creates a request like the CNI plugin's in boot `boot`, dated `at` seconds after [`START`].
fn request(container: &str, boot: &str, at: i64) -> AssignRequest {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
    request.attachment.boot = Some(boot.into());
    let at = OffsetDateTime::from_unix_timestamp(START + at).unwrap();
    request.attributes.insert("timestamp".into(), go_string(at));
    request
}

async fn give(world: &World, container: &str, boot: &str, at: i64) -> IpAddr {
    world.assign(&request(container, boot, at)).await.unwrap()[0].ip
}

async fn revision(world: &World) -> kv::Revision {
    world.store.list(Range::All).await.unwrap().revision
}

async fn held(world: &World) -> BTreeMap<IpAddr, String> {
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    holdings.allocations.into_iter().map(|one| (one.address, one.container)).collect()
}

async fn free(world: &World, allocations: &[Allocation]) -> FreeResult {
    let mut all = FreeResult::default();
    for batch in batches(allocations) {
        let freed = world.ipam.free(&batch, soon()).await.unwrap();
        all.released.extend(freed.released);
        all.changed.extend(freed.changed);
        all.endpoints.extend(freed.endpoints);
    }
    all
}

#[tokio::test]
async fn gc_frees_only_leftovers_of_earlier_boot() {
    let world = one_machine().await;
    let left = give(&world, "left", "boot0001", 0).await;
    let alive = give(&world, "alive", "boot0001", 0).await;
    let current = give(&world, "current", THIS_BOOT, 50).await;
    let mut unknown = request("unknown", THIS_BOOT, 50);
    unknown.attachment.boot = None;
    let unknown = world.assign(&unknown).await.unwrap()[0].ip;
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let judged = world.ipam.judge(&holdings, &evidence([alive].into()));
    let addresses = |list: &[Allocation]| list.iter().map(|one| one.address).collect::<BTreeSet<_>>();
    assert_eq!(addresses(&judged.earlier), [left].into());
    assert_eq!(addresses(&judged.idle), [current, unknown].into());
    assert_eq!(addresses(&judged.live), [alive].into());
    assert!(judged.elsewhere.is_empty());
    assert_eq!(free(&world, &judged.earlier).await.released, [left]);
    assert_eq!(held(&world).await.into_keys().collect::<BTreeSet<_>>(), [alive, current, unknown].into());
    world.check().await;
}

#[tokio::test]
async fn gc_frees_batch_in_two_requests() {
    for is_gone in [false, true] {
        let world = World::new().await;
        world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
        for number in 0..40 {
            give(&world, &format!("c{number}"), "boot0001", 0).await;
        }
        let held = world.ipam.holdings("a", soon()).await.unwrap();
        let batch = batches(&held.allocations).concat();
        let counting = CountingStore::new(Arc::clone(&world.store));
        let ipam = world.through(Arc::new(counting.clone()));
        let freed = if is_gone {
            world.store.delete(Range::Key(keys::resource(ResourceKind::Node, "a"))).await.unwrap();
            ipam.free_of_gone("a", &batch, soon()).await.unwrap()
        } else {
            ipam.free(&batch, soon()).await.unwrap()
        };
        assert_eq!((freed.released.len(), counting.take().round_trips()), (40, 2));
        world.check().await;
    }
}

#[tokio::test]
async fn gc_proves_attachment_gone_only_by_missing_namespace() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    let mut given = BTreeMap::new();
    for (container, boot, netns) in [
        ("there", THIS_BOOT, "4:7"),
        ("gone", THIS_BOOT, "4:8"),
        ("gone-in-container", THIS_BOOT, "4:8/9"),
        ("there-in-container", THIS_BOOT, "4:7/9"),
        ("damaged", THIS_BOOT, "4:x"),
        ("reused-since-earlier", "boot0001", "4:7"),
        ("earlier-in-container", "boot0001", "4:8/1"),
    ] {
        let mut request = request(container, boot, 0);
        request.attributes.insert(NETNS.into(), netns.into());
        given.insert(world.assign(&request).await.unwrap()[0].ip, container);
    }
    given.insert(give(&world, "unrecorded", THIS_BOOT, 0).await, "unrecorded");
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let names = |list: &[Allocation]| {
        let mut names: Vec<&str> = list.iter().map(|one| given[&one.address]).collect();
        names.sort_unstable();
        names.join(" ")
    };
    let lists = |evidence: &Evidence| {
        let judged = world.ipam.judge(&holdings, evidence);
        [judged.live, judged.gone, judged.earlier, judged.idle, judged.outside].map(|list| names(&list))
    };
    let on_the_machine = evidence(BTreeSet::new());
    assert_eq!(
        lists(&on_the_machine),
        [
            "there there-in-container",
            "gone gone-in-container",
            "earlier-in-container reused-since-earlier",
            "damaged unrecorded",
            ""
        ]
    );
    // A network namespace without a known name could be the namespace of any recorded address.
    let shielded = Evidence { namespaces: None, ..on_the_machine.clone() };
    let [live, gone, earlier, ..] = lists(&shielded);
    assert_eq!((&*live, &*gone, &*earlier), ("", "", "earlier-in-container reused-since-earlier"));
    let in_container = |own: &str| Evidence { within: Some(own.into()), ..on_the_machine.clone() };
    let outside = "damaged gone reused-since-earlier unrecorded";
    let live = "there there-in-container";
    assert_eq!(lists(&in_container("9")), [live, "gone-in-container", "earlier-in-container", "", outside]);
    assert_eq!(lists(&in_container("1")), [live, "", "earlier-in-container", "gone-in-container", outside]);
}

/// In this test, a runtime immediately restarts a container in another network namespace.
#[tokio::test]
async fn gc_records_other_namespace_when_container_asks_again() {
    let world = one_machine().await;
    let ask = async |netns: Option<&str>, at: i64| {
        let mut request = request("c1", THIS_BOOT, at);
        request.attributes.extend(netns.map(|netns| (NETNS.to_owned(), netns.to_owned())));
        world.assign(&request).await.unwrap();
        let holdings = world.ipam.holdings("a", soon()).await.unwrap();
        assert_eq!(holdings.allocations.len(), 1);
        holdings.allocations[0].netns.clone()
    };
    for (at, netns) in (0..).zip([Some("4:7"), Some("4:8"), None, Some("4:9")]) {
        assert_eq!(ask(netns, at).await.as_deref(), netns);
    }
    let before = revision(&world).await;
    ask(Some("4:9"), 5).await;
    assert_eq!(revision(&world).await, before, "a repeated call writes nothing");
    assert_eq!(ask(None, 100).await, None);
    world.check().await;
}

#[tokio::test]
async fn gc_keeps_address_when_container_asks_after_scan() {
    let world = one_machine().await;
    let first = give(&world, "c1", "boot0001", 0).await;
    let seen = world.ipam.holdings("a", soon()).await.unwrap().allocations;
    // After a reboot the container gets the same address, and the new boot is recorded.
    assert_eq!(give(&world, "c1", THIS_BOOT, 100).await, first);
    let freed = free(&world, &seen).await;
    assert_eq!((freed.released, freed.changed), (vec![], vec![first]));
    // Within one boot, a repeated request updates the recorded time, unless the repetition is immediate.
    let seen = world.ipam.holdings("a", soon()).await.unwrap().allocations;
    assert_eq!(give(&world, "c1", THIS_BOOT, 200).await, first);
    assert!(free(&world, &seen).await.released.is_empty());
    let renewed = world.ipam.holdings("a", soon()).await.unwrap().allocations;
    assert_ne!(renewed[0].sequence_number, seen[0].sequence_number);
    assert_eq!(renewed[0].assigned_at().unwrap().unix_timestamp(), START + 200);
    // A container's request that is repeated within five seconds writes nothing.
    let before = revision(&world).await;
    assert_eq!(give(&world, "c1", THIS_BOOT, 205).await, first);
    assert_eq!(revision(&world).await, before);
    // The address of container `c1` is released and then assigned again.
    world.release("a", "c1").await;
    give(&world, "c1", THIS_BOOT, 200).await;
    assert!(free(&world, &renewed).await.released.is_empty());
    world.check().await;
}

#[tokio::test]
async fn gc_keeps_whole_attachment_while_one_address_is_live() {
    let world = one_machine().await;
    world.add_pool("v6", "fd00::/125").await;
    let mut both = request("c1", "boot0001", 0);
    both.wanted = RequestedAddresses::any(1, 1);
    let assigned = world.assign(&both).await.unwrap();
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let judged = world.ipam.judge(&holdings, &evidence([assigned[1].ip].into()));
    assert_eq!((judged.live.len(), judged.earlier.len()), (2, 0));
    let judged = world.ipam.judge(&holdings, &evidence(BTreeSet::new()));
    assert_eq!(free(&world, &judged.earlier).await.released.len(), 2);
    assert!(held(&world).await.is_empty());
    world.check().await;
}

#[tokio::test]
async fn gc_counts_borrowed_for_borrower_and_spares_other_nodes() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let other = world.one("b", "b1").await.unwrap();
    for number in 0..5 {
        give(&world, &format!("c{number}"), "boot0001", -500).await;
    }
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    assert_eq!(holdings.allocations.len(), 5);
    let blocks: BTreeSet<_> = holdings.allocations.iter().map(|one| one.block).collect();
    assert_eq!(blocks.len(), 2, "one is borrowed");
    let judged = world.ipam.judge(&holdings, &evidence(BTreeSet::new()));
    assert_eq!(free(&world, &judged.earlier).await.released.len(), 5);
    let held = world.ipam.holdings("b", soon()).await.unwrap().allocations;
    assert_eq!(held.iter().map(|one| one.address).collect::<Vec<_>>(), [other]);
    world.check().await;
}

/// In a cluster, two machines can have the same name by mistake.
#[tokio::test]
async fn gc_takes_other_boot_for_other_machine_in_cluster() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let old = give(&world, "old", "boot0001", -500).await;
    let new = give(&world, "new", "boot0003", -50).await;
    let mut undated = request("undated", "boot0003", 0);
    undated.attributes.clear();
    let undated = world.assign(&undated).await.unwrap()[0].ip;
    let mine = give(&world, "mine", THIS_BOOT, -20).await;
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let judged = world.ipam.judge(&holdings, &evidence(BTreeSet::new()));
    let addresses = |list: &[Allocation]| list.iter().map(|one| one.address).collect::<BTreeSet<_>>();
    assert_eq!(addresses(&judged.earlier), [old].into());
    assert_eq!(addresses(&judged.elsewhere), [new, undated].into());
    assert_eq!(addresses(&judged.idle), [mine].into());
}

/// This test uses all documents that Calico itself wrote, including documents about tunnels and Windows blocks.
#[tokio::test]
async fn gc_never_considers_what_calico_recorded() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    let documents = include_str!("../../../fixtures/calico/documents.jsonl");
    let mut nodes = BTreeSet::new();
    let (mut tunnels, mut windows) = (0, 0);
    for line in documents.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let (key, value) = (kv::Key::from(row["key"].as_str().unwrap()), row["value"].as_str().unwrap());
        if keys::parse_block(&key).is_none() {
            continue;
        }
        let Ok(block) = Block::decode(&key, value.as_bytes()) else { continue };
        for (_, entry) in block.allocated() {
            nodes.extend(entry.get("node").map(str::to_owned));
            tunnels += usize::from(entry.get("type").is_some_and(|kind| kind.ends_with("TunnelAddress")));
            windows += usize::from(entry.handle_id() == Some("windows-reserved-ipam-handle"));
        }
        if let Some(ipam_core::model::Owner::Host(name)) = block.owner() {
            nodes.insert(name);
        }
        world.store.put(key, value).await.unwrap();
    }
    assert!(tunnels > 0 && windows > 0 && nodes.len() > 3, "{tunnels} {windows} {nodes:?}");
    let (mut unmarked, mut special) = (0, 0);
    for node in nodes {
        let holdings = world.ipam.holdings(&node, soon()).await.unwrap();
        assert!(holdings.allocations.is_empty(), "{node}: {holdings:?}");
        unmarked += holdings.unmarked;
        special += holdings.special;
    }
    assert!(unmarked > 0 && special > 0, "{unmarked} {special}");
}

/// An address with Calico's attribute `type` is never a workload's address, even if another program adds Margay's
/// attributes to the address.
#[tokio::test]
async fn gc_keeps_tunnel_and_windows_addresses() {
    let world = one_machine().await;
    give(&world, "c1", "boot0001", 0).await;
    let rewrite = async |change: &dyn Fn(&mut serde_json::Value)| {
        let kvs = world.dump().await;
        let kv = kvs.iter().find(|kv| keys::parse_block(&kv.key).is_some()).unwrap();
        let mut block: serde_json::Value = serde_json::from_slice(kv.value.as_bytes()).unwrap();
        change(&mut block["attributes"][0]);
        world.store.put(kv.key.clone(), block.to_string()).await.unwrap();
        let holdings = world.ipam.holdings("a", soon()).await.unwrap();
        world.store.put(kv.key.clone(), kv.value.clone()).await.unwrap();
        (holdings.allocations.len(), holdings.special, holdings.unmarked)
    };
    assert_eq!(rewrite(&|_| ()).await, (1, 0, 0));
    assert_eq!(rewrite(&|entry| entry["secondary"]["type"] = "vxlanTunnelAddress".into()).await, (0, 1, 0));
    assert_eq!(rewrite(&|entry| entry["handle_id"] = "Windows-Reserved-IPAM-Handle".into()).await, (0, 1, 0));
    assert_eq!(rewrite(&|entry| entry["alternateOwnerAttrs"] = serde_json::json!({"pod": "b"})).await, (0, 1, 0));
    assert_eq!(rewrite(&|entry| entry["handle_id"] = "ipip-tunnel-addr-a".into()).await, (0, 0, 1));
    assert_eq!(rewrite(&|entry| entry["handle_id"] = "net.".into()).await, (0, 0, 1));
    let without = |name: &'static str| {
        move |entry: &mut serde_json::Value| drop(entry["secondary"].as_object_mut().unwrap().remove(name))
    };
    assert_eq!(rewrite(&without("margay")).await, (0, 0, 1));
    // Earlier versions of Margay stored each of Margay's own address attributes under a separate name.
    let written_out = [("margay.io/net", "net"), ("margay.io/ifname", "eth0"), ("margay.io/boot", "boot0001")];
    for missing in ["", "margay.io/net", "margay.io/ifname"] {
        let write_out = |entry: &mut serde_json::Value| {
            let attributes = entry["secondary"].as_object_mut().unwrap();
            attributes.retain(|name, _| !name.starts_with("margay"));
            let kept = written_out.iter().filter(|(name, _)| *name != missing);
            attributes.extend(kept.map(|(name, value)| ((*name).to_owned(), (*value).into())));
        };
        assert_eq!(
            rewrite(&write_out).await,
            if missing == "margay.io/ifname" { (0, 0, 1) } else { (1, 0, 0) },
            "{missing}"
        );
    }
    assert_eq!(rewrite(&without("node")).await, (0, 0, 1));
    assert_eq!(rewrite(&|entry| entry["secondary"]["node"] = "b".into()).await, (0, 0, 0));
}

#[tokio::test]
async fn gc_list_decides_by_attachment_and_spares_young() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    let in_list = give(&world, "in-list", THIS_BOOT, 0).await;
    let gone = give(&world, "gone", THIS_BOOT, 0).await;
    let mut second = request("in-list", THIS_BOOT, 0);
    second.attachment.interface = "eth1".into();
    let second = world.assign(&second).await.unwrap()[0].ip;
    // If handle `net.a.b.gone` were split at its first dot, the handle would belong to container `a.b.gone` in network
    // `net`.
    let mut dotted = request("b.gone", THIS_BOOT, 0);
    dotted.attachment.network = "net.a".into();
    world.assign(&dotted).await.unwrap();
    let (young, ahead) = (give(&world, "young", THIS_BOOT, 950).await, give(&world, "ahead", THIS_BOOT, 1001).await);
    let mut undated = request("undated", THIS_BOOT, 0);
    undated.attributes.insert("timestamp".into(), "yesterday".into());
    world.assign(&undated).await.unwrap();
    let now = OffsetDateTime::from_unix_timestamp(START + 1000).unwrap();
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let pairs = |list: &[(&str, &str)]| list.iter().map(|(c, i)| ((*c).to_owned(), (*i).to_owned())).collect();
    let verdict = find_stale(&holdings, "net", &pairs(&[("in-list", "eth0"), ("a.b.gone", "eth0")]), now);
    assert_eq!(verdict.gone.iter().map(|one| one.address).collect::<BTreeSet<_>>(), [gone, second].into());
    assert_eq!((verdict.valid, verdict.young, verdict.undated), (1, 1, 2), "{young} {ahead}");
    let none = find_stale(&holdings, "net", &BTreeSet::new(), now);
    assert_eq!(none.gone.len(), 3, "an empty list means that there is nothing");
    assert!(none.gone.iter().any(|one| one.address == in_list));
    assert!(find_stale(&holdings, "other", &BTreeSet::new(), now).gone.is_empty());
}

#[tokio::test]
async fn gc_frees_large_block_in_bounded_commits() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/22".parse().unwrap()).with_block_size(22)).await;
    for number in 0..200 {
        give(&world, &format!("c{number}"), "boot0001", 0).await;
    }
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let before = revision(&world).await;
    let judged = world.ipam.judge(&holdings, &evidence(BTreeSet::new()));
    assert_eq!(free(&world, &judged.earlier).await.released.len(), 200);
    assert_eq!(revision(&world).await, before.next().next().next().next());
    world.check().await;
}
