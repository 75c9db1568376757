//! Tests that quotas are never exceeded, never refuse an assignment below the limit, and cost nothing when no quota is
//! set.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use ipam_core::assign::{AssignRequest, HandleRequest, RequestedAddresses};
use ipam_core::attachment::NAMESPACE;
use ipam_core::model::{
    Block, Document, IpamConfig, Owner, QuotaCount, QuotaKind, QuotaSubject, Quotas, ReleaseRequest, keys,
};
use ipam_core::sticky::Sticky;
use ipam_core::vm::{PodRole, VmFate};
use ipam_core::{Error, Nodes, Result};
use kv::wrap::CountingStore;
use kv::{EventKind, Range, StoreExt, WatchRequest};
use tokio::sync::Barrier;

use crate::concurrent::faulty;
use crate::world::{World, attachment, soon};

const SHOP: (QuotaKind, &str) = (QuotaKind::Namespace, "shop");

async fn set(world: &World, limits: &[(QuotaKind, &str, u64)]) {
    let mut quotas = Quotas::default();
    for (kind, name, limit) in limits {
        quotas.set(&QuotaSubject::new(*kind, *name), Some(*limit));
    }
    world.put(keys::quotas(), &quotas).await;
}

async fn with_shop(limit: u64) -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/26").await;
    set(&world, &[(SHOP.0, SHOP.1, limit)]).await;
    world
}

fn pod(node: &str, container: &str, namespace: &str) -> AssignRequest {
    let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(1, 0));
    request.attributes.insert(NAMESPACE.to_owned(), namespace.to_owned());
    request
}

async fn shop(world: &World, container: &str) -> Result<()> {
    world.assign(&pod("a", container, "shop")).await.map(drop)
}

fn is_full(done: Result<()>) -> (u64, u64) {
    match done {
        Err(Error::Quota(reached)) => (reached.used, reached.limit),
        other => panic!("{other:?}"),
    }
}

async fn counter(world: &World, (kind, name): (QuotaKind, &str)) -> Option<QuotaCount> {
    let kv = world.store.get(keys::quota_use(kind, name)).await.unwrap()?;
    Some(serde_json::from_slice(kv.value.as_bytes()).unwrap())
}

/// Returns the quota counter of a subject, if the counter is valid for the stored quotas.
async fn used(world: &World, of: (QuotaKind, &str)) -> Option<u64> {
    let quotas = world.store.get(keys::quotas()).await.unwrap()?;
    counter(world, of).await.filter(|count| count.quotas == quotas.mod_revision.get()).map(|count| count.used)
}

fn held_by(blocks: impl IntoIterator<Item = Block>, (kind, name): (QuotaKind, &str)) -> u64 {
    let is_its =
        |entry: &ipam_core::model::Attribute| entry.released_at().is_none() && kind.name_in(entry) == Some(name);
    let count = |block: Block| block.allocated().filter(|(_, entry)| is_its(entry)).count() as u64;
    blocks.into_iter().map(count).sum()
}

async fn truth(world: &World, of: (QuotaKind, &str)) -> u64 {
    held_by(world.ipam.all_blocks(soon()).await.unwrap(), of)
}

#[tokio::test]
async fn quota_refuses_when_full_and_release_makes_room() {
    let world = with_shop(2).await;
    shop(&world, "c1").await.unwrap();
    shop(&world, "c2").await.unwrap();
    let error = shop(&world, "c3").await.unwrap_err();
    assert!(error.is_exhaustion());
    assert_eq!(
        error.to_string(),
        "the quota of namespace shop is used up: 2 of 2 addresses are in use; end containers there, or raise it with: \
         margay quota set --namespace shop N"
    );
    shop(&world, "c2").await.expect("what it has already is no new address");
    world.assign(&pod("a", "d1", "other")).await.expect("others have no limit");
    assert_eq!(used(&world, SHOP).await, Some(2));
    world.release("a", "c1").await;
    assert_eq!(used(&world, SHOP).await, Some(1));
    shop(&world, "c3").await.unwrap();
    assert_eq!((used(&world, SHOP).await, truth(&world, SHOP).await), (Some(2), 2));
    world.check().await;
}

#[tokio::test]
async fn quota_below_use_takes_nothing_away() {
    let world = with_shop(3).await;
    for container in ["c1", "c2", "c3"] {
        shop(&world, container).await.unwrap();
    }
    set(&world, &[(SHOP.0, SHOP.1, 1)]).await;
    assert_eq!(is_full(shop(&world, "c4").await), (3, 1));
    assert_eq!(truth(&world, SHOP).await, 3);
    set(&world, &[(SHOP.0, "*", 4)]).await;
    shop(&world, "c4").await.unwrap();
    assert_eq!(is_full(shop(&world, "c5").await), (4, 4));
}

#[tokio::test]
async fn quota_of_networks_and_nodes_ignores_namespace() {
    let world = with_shop(9).await;
    set(&world, &[(QuotaKind::Node, "a", 1), (QuotaKind::Network, "net", 2)]).await;
    world.one("a", "c1").await.unwrap();
    assert_eq!(is_full(world.one("a", "c2").await.map(drop)), (1, 1));
    world.one("b", "c2").await.unwrap();
    let error = world.one("c", "c3").await.unwrap_err();
    assert!(error.to_string().starts_with("the quota of network net is used up: 2 of 2"), "{error}");
}

#[tokio::test]
async fn quota_counts_both_families() {
    let world = with_shop(3).await;
    world.add_pool("v6", "fd00::/120").await;
    let both = |container: &str| {
        let mut request = pod("a", container, "shop");
        request.wanted = RequestedAddresses::any(1, 1);
        request
    };
    world.assign(&both("c1")).await.unwrap();
    assert_eq!(is_full(world.assign(&both("c2")).await.map(drop)), (2, 3));
    shop(&world, "c2").await.unwrap();
}

#[tokio::test]
async fn quota_gives_last_address_to_one_of_two() {
    for _ in 0..20 {
        let world = with_shop(3).await;
        shop(&world, "c1").await.unwrap();
        shop(&world, "c2").await.unwrap();
        let (left, right) = (pod("a", "l", "shop"), pod("b", "r", "shop"));
        let (left, right) = tokio::join!(world.assign(&left), world.assign(&right));
        assert_eq!(u8::from(left.is_ok()) + u8::from(right.is_ok()), 1);
        assert_eq!(truth(&world, SHOP).await, 3);
    }
}

#[tokio::test]
async fn quota_counts_uncounted_before_refusing() {
    let world = with_shop(2).await;
    shop(&world, "c1").await.unwrap();
    shop(&world, "c2").await.unwrap();
    // Another program releases an address without lowering the quota counter.
    let blocks = world.ipam.all_blocks(soon()).await.unwrap();
    let mut block = blocks.into_iter().find(|block| !block.is_empty()).unwrap();
    let (ip, _) = block.allocated().next().unwrap();
    let release = ReleaseRequest::new(ip);
    block.release_addresses(&[release], world.ipam.now(), 0).unwrap();
    world.put(keys::block(block.cidr()), &block).await;
    assert_eq!((used(&world, SHOP).await, truth(&world, SHOP).await), (Some(2), 1));
    shop(&world, "c3").await.unwrap();
    assert_eq!((used(&world, SHOP).await, truth(&world, SHOP).await), (Some(2), 2));
    // The quota counter is first damaged, then missing.
    world.store.put(keys::quota_use(SHOP.0, SHOP.1), "?").await.unwrap();
    assert_eq!(is_full(shop(&world, "c4").await), (2, 2));
    world.store.delete(Range::Key(keys::quota_use(SHOP.0, SHOP.1))).await.unwrap();
    assert_eq!(is_full(shop(&world, "c4").await), (2, 2));
}

#[tokio::test]
async fn quota_counts_anew_when_there_was_none() {
    let world = with_shop(3).await;
    shop(&world, "c1").await.unwrap();
    world.store.delete(Range::Key(keys::quotas())).await.unwrap();
    shop(&world, "c2").await.unwrap();
    shop(&world, "c3").await.unwrap();
    assert_eq!(counter(&world, SHOP).await.unwrap().used, 1);
    set(&world, &[(SHOP.0, SHOP.1, 3)]).await;
    assert_eq!(used(&world, SHOP).await, None);
    assert_eq!(is_full(shop(&world, "c4").await), (3, 3));
}

#[tokio::test]
async fn quota_ignores_addresses_in_cooldown() {
    let world = with_shop(1).await;
    world.configure(IpamConfig::default().with_cooldown_seconds(600)).await;
    shop(&world, "c1").await.unwrap();
    world.release("a", "c1").await;
    shop(&world, "c2").await.unwrap();
    assert_eq!(is_full(shop(&world, "c3").await), (1, 1));
}

#[tokio::test]
async fn quota_adds_up_assignments_in_one_commit() {
    let world = with_shop(3).await;
    let requests = ["c1", "c2", "c3", "c4"].map(|container| pod("a", container, "shop"));
    let refused = world.ipam.assign_together(&requests, soon()).await.map(drop);
    assert_eq!(is_full(refused), (0, 3));
    assert_eq!(truth(&world, SHOP).await, 0);
    world.ipam.assign_together(&requests[..3], soon()).await.unwrap();
    assert_eq!((used(&world, SHOP).await, truth(&world, SHOP).await), (Some(3), 3));
}

#[tokio::test]
async fn quota_counts_other_ways_to_get_and_lose_addresses() {
    let world = with_shop(4).await;
    let attributes: BTreeMap<String, String> = [(NAMESPACE.to_owned(), "shop".to_owned())].into();
    let owner = Owner::host("a");
    let request = HandleRequest::new("tunnel", owner, RequestedAddresses::any(3, 0)).with_attributes(attributes);
    world.ipam.assign_to_handle(&request, soon()).await.unwrap();
    assert_eq!(used(&world, SHOP).await, Some(3));
    assert_eq!(is_full(world.ipam.assign_to_handle(&request, soon()).await.map(drop)), (3, 4));
    shop(&world, "c1").await.unwrap();
    assert_eq!(is_full(shop(&world, "c2").await), (4, 4));
    world.ipam.release_by_handle("net.c1", soon()).await.unwrap();
    assert_eq!(used(&world, SHOP).await, Some(3));
    // The release of an address without an attachment does not lower the quota counter, which may not include the
    // address.
    world.ipam.release_by_handle("tunnel", soon()).await.unwrap();
    assert_eq!((used(&world, SHOP).await, truth(&world, SHOP).await), (Some(3), 0));
    for container in ["c1", "c2", "c3", "c4"] {
        shop(&world, container).await.unwrap();
    }
    assert_eq!(is_full(shop(&world, "c5").await), (4, 4));
}

#[tokio::test]
async fn quota_check_refuses_by_counter_and_writes_nothing() {
    let world = with_shop(9).await;
    set(&world, &[(QuotaKind::Network, "net", 1)]).await;
    world.one("a", "c1").await.unwrap();
    let before = world.dump().await;
    let next = AssignRequest::new(attachment("a", "next"), RequestedAddresses::any(1, 0));
    assert_eq!(is_full(world.ipam.would_assign(&next, soon()).await.map(drop)), (1, 1));
    // Without quota counters, `would_assign` allows every assignment, and does not read all blocks to count addresses.
    set(&world, &[(QuotaKind::Network, "net", 1), (SHOP.0, SHOP.1, 1)]).await;
    let counting = CountingStore::new(Arc::clone(&world.store));
    let counted = world.through(Arc::new(counting.clone()));
    counted.would_assign(&next, soon()).await.unwrap();
    let with = counting.take();
    world.store.delete(Range::Key(keys::quotas())).await.unwrap();
    counted.would_assign(&next, soon()).await.unwrap();
    let without = counting.take();
    assert_eq!((with.txns, with.ranges), (without.txns, without.ranges));
    assert_eq!(before.len() - 1, world.dump().await.len());
}

#[tokio::test]
async fn quota_when_damaged_stops_assignments_and_no_release() {
    let world = with_shop(9).await;
    shop(&world, "c1").await.unwrap();
    world.store.put(keys::quotas(), r#"{"namespaces":{"shop":"9"}}"#).await.unwrap();
    let error = shop(&world, "c2").await.unwrap_err();
    assert!(error.to_string().starts_with("malformed document at /margay/v1/quotas"), "{error}");
    assert_eq!(world.release("a", "c1").await.len(), 1);
}

#[tokio::test]
async fn quota_costs_no_request_in_steady_state() {
    let mut counts = Vec::new();
    for with_quotas in [false, true] {
        let world = World::new().await;
        world.add_pool("v4", "10.0.0.0/16").await;
        if with_quotas {
            set(&world, &[(SHOP.0, SHOP.1, 50), (QuotaKind::Network, "*", 50), (QuotaKind::Node, "a", 50)]).await;
        }
        let counting = CountingStore::new(Arc::clone(&world.store));
        let counted = World::on(Arc::new(counting.clone()), Nodes::Registered);
        counted.assign(&pod("a", "c1", "shop")).await.unwrap();
        counted.assign(&pod("a", "c2", "shop")).await.unwrap();
        let first = counting.take();
        counted.assign(&pod("a", "c3", "shop")).await.unwrap();
        let add = counting.take();
        let c3 = attachment("a", "c3");
        counted.ipam.release_attachment_of(&c3, &[], &[], None, Some("shop"), soon()).await.unwrap();
        let del = counting.take();
        if with_quotas {
            assert_eq!(used(&world, SHOP).await, Some(2));
            assert_eq!(used(&world, (QuotaKind::Network, "net")).await, Some(2));
            assert_eq!(used(&world, (QuotaKind::Node, "a")).await, Some(2));
        }
        counts.push([(add.txns, add.ranges), (del.txns, del.ranges), (first.txns, 0)]);
    }
    assert_eq!(counts[0], counts[1]);
}

#[tokio::test]
async fn quota_gets_room_from_leftovers_of_earlier_boot() {
    let world = with_shop(9).await;
    set(&world, &[(QuotaKind::Node, "a", 2)]).await;
    world.one("a", "c1").await.unwrap();
    world.one("a", "c2").await.unwrap();
    world.pass(1000);
    let mut next = pod("a", "next", "shop");
    next.attachment.boot = Some("boot0002".into());
    match world.assign(&next).await.unwrap_err() {
        Error::Quota(reached) => assert!(reached.over_leftovers, "only a look at the machine can tell"),
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn quota_counts_leftovers_in_blocks_without_room() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/26").await;
    set(&world, &[(QuotaKind::Node, "a", 5)]).await;
    for number in 0..5 {
        world.one("a", &format!("c{number}")).await.unwrap();
    }
    world.release("a", "c4").await;
    let next = async |container: &str| {
        let mut next = pod("a", container, "shop");
        next.attachment.boot = Some("boot0002".into());
        world.assign(&next).await
    };
    // In this test, one block has free addresses and no leftover addresses, and the full block has four leftover
    // addresses.
    next("n0").await.unwrap();
    match next("n1").await.unwrap_err() {
        Error::Quota(reached) => assert!(reached.over_leftovers),
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn quota_ignores_sticky_addresses_that_wait() {
    let world = with_shop(9).await;
    set(&world, &[(QuotaKind::Network, "net", 2)]).await;
    for name in ["w0", "w1", "w2", "w3"] {
        let mut request = pod("a", name, "shop");
        request.sticky = Some(Sticky { name: name.into(), wait: None });
        world.assign(&request).await.unwrap();
        world.release("a", name).await;
    }
    shop(&world, "c1").await.unwrap();
    shop(&world, "c2").await.unwrap();
    assert_eq!(is_full(shop(&world, "c3").await), (2, 2));
    world.check().await;
}

#[tokio::test]
async fn quota_needs_room_when_machine_starts_again() {
    let world = with_shop(1).await;
    let start = async |name: &str| {
        let request = AssignRequest::new(attachment("a", name), RequestedAddresses::any(1, 0));
        let vm = crate::vm::pod(name, PodRole::Source, VmFate::Stays);
        world.ipam.assign_to_vm(&request, &vm, soon()).await.map(drop)
    };
    start("v1").await.unwrap();
    start("v1").await.expect("a pod that has an address is within the quota");
    let vm = crate::vm::pod("v1", PodRole::Source, VmFate::Stays);
    world.ipam.release_vm_pod(&vm, &attachment("a", "v1"), &[], &[], soon()).await.unwrap();
    shop(&world, "c1").await.unwrap();
    assert_eq!(is_full(start("v2").await), (1, 1));
    world.release("a", "c1").await;
    start("v2").await.unwrap();
    assert_eq!(truth(&world, SHOP).await, 1);
}

/// Callers on three nodes assign and release addresses in one namespace while every tenth store transaction fails in
/// some way.
#[tokio::test(flavor = "multi_thread")]
async fn quota_is_never_exceeded_under_churn_with_faults() {
    const LIMIT: u64 = 5;
    let quiet = with_shop(LIMIT).await;
    let start = quiet.store.list(Range::All).await.unwrap().revision;
    let world = faulty(&quiet);
    // In the first round, every caller requests an address before any caller releases one, so that some callers are
    // refused.
    let asked = Arc::new(Barrier::new(9));
    let callers = (0..9).map(|caller| {
        let (world, asked) = (world.clone(), Arc::clone(&asked));
        tokio::spawn(async move {
            let (node, mut refused) = (["a", "b", "c"][caller % 3], 0);
            for round in 0..12 {
                let container = format!("c{caller}-{round}");
                match world.assign(&pod(node, &container, "shop")).await {
                    Ok(_) => {}
                    Err(Error::Quota(_)) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
                if round == 0 {
                    asked.wait().await;
                }
                tokio::task::yield_now().await;
                world.pass(10);
                world.release(node, &container).await;
            }
            refused
        })
    });
    let mut refused = 0;
    for caller in callers.collect::<Vec<_>>() {
        refused += caller.await.unwrap();
    }
    assert!(refused > 0, "nothing was refused, so nothing was tried");
    assert_eq!(truth(&quiet, SHOP).await, 0);
    let end = quiet.store.list(Range::All).await.unwrap().revision;
    let mut changes = quiet.store.watch(WatchRequest::new(Range::All, start.next())).await.unwrap();
    let (mut blocks, mut counted, mut revision, mut most) = (BTreeMap::new(), 0, start, 0);
    while revision < end {
        let batch = changes.next().await.unwrap().unwrap();
        revision = batch.revision;
        for event in batch.events {
            if event.kv.key == keys::quota_use(SHOP.0, SHOP.1) {
                counted = serde_json::from_slice::<QuotaCount>(event.kv.value.as_bytes()).unwrap().used;
            } else if keys::parse_block(&event.kv.key).is_some() {
                match event.kind {
                    EventKind::Put => {
                        let block = Block::decode(&event.kv.key, event.kv.value.as_bytes()).unwrap();
                        blocks.insert(event.kv.key.clone(), block);
                    }
                    EventKind::Delete => drop(blocks.remove(&event.kv.key)),
                }
            }
        }
        let held = held_by(blocks.values().cloned(), SHOP);
        most = most.max(held);
        assert!(held <= LIMIT && held <= counted, "revision {revision}: {held} held, {counted} counted");
    }
    assert_eq!(most, LIMIT);
    // After the injected store faults, the quota counter may be too high, but addresses up to the limit can still be
    // assigned.
    for number in 0..LIMIT {
        shop(&quiet, &format!("last{number}")).await.unwrap();
    }
    assert_eq!(is_full(shop(&quiet, "more").await), (LIMIT, LIMIT));
    quiet.check().await;
}
