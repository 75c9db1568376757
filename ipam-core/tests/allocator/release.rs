//! Tests releases of addresses.

use std::net::IpAddr;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::keys;
use ipam_core::model::{Affinity, AffinityState, Attribute, Block, Document, Handle, NewPool, Owner, ReleaseRequest};
use ipam_core::{Error, Holding, Standing};
use kv::StoreExt;
use time::OffsetDateTime;

use crate::world::{World, attachment, held, ip, soon};

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/112").await;
    world
}

#[tokio::test]
async fn release_is_one_commit_and_nothing_when_repeated() {
    let world = world().await;
    let request = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 1));
    let assigned = world.assign(&request).await.unwrap();
    let before = world.store.list(kv::Range::All).await.unwrap().revision;
    let released = world.release("a", "c1").await;
    assert_eq!(released, assigned.iter().map(|one| one.ip).collect::<Vec<_>>());
    let after = world.store.list(kv::Range::All).await.unwrap();
    assert_eq!(after.revision, before.next());
    assert!(after.kvs.iter().all(|kv| keys::parse_handle(&kv.key).is_none()));
    assert_eq!(world.release("a", "c1").await, Vec::<IpAddr>::new());
    assert_eq!(world.store.list(kv::Range::All).await.unwrap().revision, after.revision);
    world.check().await;
}

#[tokio::test]
async fn release_of_interface_keeps_other_interface() {
    let world = world().await;
    let first = world.one("a", "c1").await.unwrap();
    let mut other = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 0));
    other.attachment.interface = "eth1".into();
    let second = world.assign(&other).await.unwrap()[0].ip;
    assert_eq!(world.release("a", "c1").await, [first]);
    assert_eq!(held(&world.ipam, &other.attachment).await, [second]);
    world.check().await;
    // Containers with equal ids on two nodes are two attachments.
    assert!(world.release("b", "c1").await.is_empty());
    assert_eq!(world.ipam.release_attachment(&other.attachment, &[], soon()).await.unwrap(), [second]);
    world.check().await;
}

/// Removes Margay's own attributes from all allocations, as if Calico had made the allocations.
async fn as_calicos(world: &World) {
    for kv in world.dump().await {
        if keys::parse_block(&kv.key).is_some() {
            let mut block: serde_json::Value = serde_json::from_slice(kv.value.as_bytes()).unwrap();
            for entry in block["attributes"].as_array_mut().unwrap() {
                entry["secondary"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("margay"));
            }
            world.store.put(kv.key, block.to_string()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn release_by_handle_and_node_takes_what_calico_made() {
    let world = world().await;
    let address = world.one("a", "c1").await.unwrap();
    as_calicos(&world).await;
    assert!(world.release("b", "c1").await.is_empty());
    assert_eq!(world.release("a", "c1").await, [address]);
    world.check().await;
}

/// A container id in the form that container runtimes create.
const UNIQUE: &str = "7b01ac197d53e947c33f89529a7ebf04cc3e24c601edf53e1dc872a1c8baa960";

#[tokio::test]
async fn release_on_renamed_node_takes_container_of_old_name() {
    let world = world().await;
    for is_calicos in [false, true] {
        let address = world.one("a", UNIQUE).await.unwrap();
        let mut other = AssignRequest::new(attachment("a", UNIQUE), RequestedAddresses::any(1, 0));
        other.attachment.interface = "eth1".into();
        let second = world.assign(&other).await.unwrap()[0].ip;
        if is_calicos {
            as_calicos(&world).await;
        }
        let before = world.store.list(kv::Range::All).await.unwrap().revision;
        // Calico's allocations do not record the container's interface.
        let expected = if is_calicos { vec![address, second] } else { vec![address] };
        assert_eq!(world.release("b", UNIQUE).await, expected);
        assert_eq!(world.store.list(kv::Range::All).await.unwrap().revision, before.next(), "one commit");
        assert!(world.release("b", UNIQUE).await.is_empty());
        other.attachment.node = "b".into();
        let rest = world.ipam.release_attachment(&other.attachment, &[], soon()).await.unwrap();
        assert_eq!(rest, if is_calicos { vec![] } else { vec![second] });
        world.check().await;
    }
}

#[tokio::test]
async fn release_under_both_names_of_node_is_one_commit() {
    let world = world().await;
    let mut all = vec![world.one("a", UNIQUE).await.unwrap(), world.one("b", UNIQUE).await.unwrap()];
    all.sort_unstable();
    let before = world.store.list(kv::Range::All).await.unwrap().revision;
    assert_eq!(world.release("b", UNIQUE).await, all);
    assert_eq!(world.store.list(kv::Range::All).await.unwrap().revision, before.next());
    world.check().await;
}

#[tokio::test]
async fn release_of_chosen_id_needs_other_node_to_be_gone() {
    let world = world().await;
    let almost = format!("{}g", &UNIQUE[1..]);
    for container in ["c1", almost.as_str(), &UNIQUE[1..]] {
        world.add_node("a", &[]).await;
        let address = world.one("a", container).await.unwrap();
        assert!(world.release("b", container).await.is_empty(), "{container}: a is a live node");
        world.store.delete(kv::Range::Key(keys::resource(keys::ResourceKind::Node, "a"))).await.unwrap();
        assert_eq!(world.release("b", container).await, [address], "{container}: a is not registered any more");
        world.check().await;
    }
}

#[tokio::test]
async fn release_by_handle_without_container_is_of_own_node() {
    let world = world().await;
    // The old container's handle contains a pod's name, and every container of the pod reuses this handle.
    let mut old = AssignRequest::new(attachment("a", "x"), RequestedAddresses::any(1, 0));
    old.attachment.network = "shop".into();
    let address = world.assign(&old).await.unwrap()[0].ip;
    as_calicos(&world).await;
    let release = async |node| {
        world.ipam.release_attachment(&attachment(node, UNIQUE), &["shop.x".into()], soon()).await.unwrap()
    };
    assert!(release("b").await.is_empty());
    assert_eq!(release("a").await, [address]);
    world.check().await;
}

#[tokio::test]
async fn release_takes_old_handles_too() {
    let world = world().await;
    let mut old = AssignRequest::new(attachment("a", "x"), RequestedAddresses::any(1, 0));
    old.attachment.network = "shop".into();
    let address = world.assign(&old).await.unwrap()[0].ip;
    as_calicos(&world).await;
    let released = world.ipam.release_attachment(&attachment("a", "c1"), &["shop.x".into()], soon()).await.unwrap();
    assert_eq!(released, [address]);
    world.check().await;
}

#[tokio::test]
async fn release_repairs_handle_that_counts_too_much() {
    let world = world().await;
    world.one("a", "c1").await.unwrap();
    let key = keys::handle("net.c1");
    let stored = world.store.get(key.clone()).await.unwrap().unwrap();
    let mut handle = Handle::decode(&key, stored.value.as_bytes()).unwrap();
    handle.increment("10.0.0.128/30".parse().unwrap(), 3);
    let (first, _) = handle.blocks().next().unwrap();
    handle.increment(first, 5);
    world.put(key, &handle).await;
    assert_eq!(world.release("a", "c1").await.len(), 1);
    world.check().await;
}

#[tokio::test]
async fn release_leaves_handle_count_ahead_of_block_to_writer() {
    let world = world().await;
    world.one("a", "other").await.unwrap();
    let cidr = world.dump().await.iter().find_map(|kv| keys::parse_block(&kv.key)).unwrap();
    let block = keys::block(cidr);
    let ahead = async || {
        let mut handle = Handle::new();
        handle.increment(cidr, 1);
        world.put(keys::handle("net.c1"), &handle).await;
    };
    let counted = async || {
        let key = keys::handle("net.c1");
        let stored = world.store.get(key.clone()).await.unwrap()?;
        Some(Handle::decode(&key, stored.value.as_bytes()).unwrap().count(cidr))
    };
    // No address of the handle is held, so the release removes the handle's count. The release also rewrites the block,
    // so that a concurrent writer that read the block earlier fails to commit and reads it again.
    ahead().await;
    let before = world.store.get(block.clone()).await.unwrap().unwrap();
    world.release("a", "c1").await;
    assert_eq!(counted().await, None);
    let after = world.store.get(block.clone()).await.unwrap().unwrap();
    assert!(after.mod_revision > before.mod_revision);
    // The handle still holds an address, so its stored count, which is too high, is not corrected until the last
    // address is released.
    ahead().await;
    world.one("a", "c1").await.unwrap();
    assert_eq!(counted().await, Some(2));
    world.release("a", "c1").await;
    assert_eq!(counted().await, None);
}

#[tokio::test]
async fn release_by_handle_on_any_node() {
    let world = world().await;
    world.one("a", "c1").await.unwrap();
    world.one("b", "c1").await.unwrap();
    assert_eq!(world.ipam.release_by_handle("net.c1", soon()).await.unwrap().len(), 2);
    assert!(matches!(world.ipam.release_by_handle("net.c1", soon()).await, Err(Error::NotFound { .. })));
    world.check().await;
}

#[tokio::test]
async fn release_by_container_in_every_network() {
    let world = world().await;
    world.one("a", "c1").await.unwrap();
    world.one("a", "c2").await.unwrap();
    let mut other = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 0));
    // If handle `net.c2.c1` were split at its first dot, the handle would belong to container `c2.c1` in network `net`.
    other.attachment.network = "net.c2".into();
    world.assign(&other).await.unwrap();
    assert_eq!(world.ipam.release_by_container("c1", soon()).await.unwrap().len(), 2);
    assert_eq!(held(&world.ipam, &attachment("a", "c2")).await.len(), 1);
    world.check().await;
}

#[tokio::test]
async fn release_checks_all_addresses_before_any() {
    let world = world().await;
    let (first, second) = (world.one("a", "c1").await.unwrap(), world.one("a", "c2").await.unwrap());
    let wrong = [ReleaseRequest::new(first), ReleaseRequest::new(second).with_handle("net.c1")];
    assert!(matches!(world.ipam.release_ips(&wrong, soon()).await, Err(Error::ReleaseConflict(_))));
    let stale = [ReleaseRequest::new(first).with_sequence_number(1)];
    assert!(matches!(world.ipam.release_ips(&stale, soon()).await, Err(Error::ReleaseConflict(_))));
    assert!(matches!(world.ipam.holding(first, soon()).await.unwrap(), Holding::Held(_)));
    let right = [
        ReleaseRequest::new(first).with_handle("net.c1"),
        ReleaseRequest::new(second),
        ReleaseRequest::new(ip("10.0.0.250")),
        ReleaseRequest::new(ip("192.168.0.1")),
    ];
    let done = world.ipam.release_ips(&right, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.unallocated.len()), (2, 2));
    assert_eq!(world.ipam.holding(first, soon()).await.unwrap(), Holding::Free);
    world.check().await;
}

#[tokio::test]
async fn release_conflict_text_matches_calico() {
    let world = world().await;
    let given = world.one("a", "c1").await.unwrap();
    let wrong = [ReleaseRequest::new(given).with_handle("net.c2")];
    let error = world.ipam.release_ips(&wrong, soon()).await.unwrap_err().to_string();
    assert_eq!(error, format!("update conflict: {given}: bad handle: requested net.c2, expected net.c1"));
}

/// In this test each address has its own handle, and one commit can guard at most 120 keys.
#[tokio::test]
async fn release_of_many_addresses_takes_several_commits() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap()).with_block_size(25)).await;
    let mut requests = Vec::new();
    for number in 0..150 {
        let ip = world.one("a", &format!("c{number}")).await.unwrap();
        requests.extend([ReleaseRequest::new(ip).with_handle(format!("net.c{number}")), ReleaseRequest::new(ip)]);
    }
    let before = world.store.list(kv::Range::All).await.unwrap().revision.get();
    let done = world.ipam.release_ips(&requests, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.unallocated.len()), (150, 0));
    let after = world.store.list(kv::Range::All).await.unwrap();
    assert!((3..=8).contains(&(after.revision.get() - before)), "{} commits", after.revision.get() - before);
    assert!(after.kvs.iter().all(|kv| keys::parse_handle(&kv.key).is_none()));
    world.check().await;
}

#[tokio::test]
async fn release_of_handle_in_many_blocks_is_whole() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/25").await;
    // The container requests only half of the pool's addresses, because a node has at most twenty blocks.
    let assigned =
        world.assign(&AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(64, 0))).await.unwrap();
    assert_eq!(assigned.len(), 64);
    world.one("a", "c2").await.unwrap();
    let before = world.store.list(kv::Range::All).await.unwrap().revision.get();
    let released = world.ipam.release_by_handle("net.c1", soon()).await.unwrap();
    assert_eq!(released.len(), 64);
    assert!(released.is_sorted());
    assert_eq!(world.store.list(kv::Range::All).await.unwrap().revision.get(), before + 4, "four blocks each");
    assert!(matches!(world.ipam.release_by_handle("net.c1", soon()).await, Err(Error::NotFound { .. })));
    assert_eq!(held(&world.ipam, &attachment("a", "c2")).await.len(), 1);
    world.check().await;
}

/// A test world in which a container holds the seventh address of a block of eight, in a pool whose block size is now
/// four. Node `b` also owns a block with the CIDR `also`, unless `also` is empty.
async fn of_another_size(also: &str) -> (World, IpAddr) {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let (cidr, given) = ("10.0.0.8/29".parse().unwrap(), ip("10.0.0.14"));
    let mut block = Block::new(cidr, Some(&Owner::host("a")), OffsetDateTime::UNIX_EPOCH, None).unwrap();
    let of_node = [("node".to_owned(), "a".to_owned())].into();
    block.assign_specific(given, &Attribute::new(Some("net.c1"), of_node)).unwrap();
    block.bump();
    world.put(keys::block(cidr), &block).await;
    let mut handle = Handle::new();
    handle.increment(cidr, 1);
    world.put(keys::handle("net.c1"), &handle).await;
    world.put(keys::affinity(&Owner::host("a"), cidr).unwrap(), &Affinity::new(AffinityState::Confirmed)).await;
    if !also.is_empty() {
        let cidr = also.parse().unwrap();
        let block = Block::new(cidr, Some(&Owner::host("b")), OffsetDateTime::UNIX_EPOCH, None).unwrap();
        world.put(keys::block(cidr), &block).await;
        world.put(keys::affinity(&Owner::host("b"), cidr).unwrap(), &Affinity::new(AffinityState::Confirmed)).await;
    }
    (world, given)
}

#[tokio::test]
async fn release_finds_address_in_block_of_other_size() {
    for also in ["", "10.0.0.12/30"] {
        let (world, given) = of_another_size(also).await;
        let entry = world.ipam.attributes_of(given, soon()).await.unwrap();
        assert_eq!(entry.handle(), Some("net.c1"), "shown, with {also:?}");
        let compare = async |container| {
            world.ipam.compare(&attachment("a", container), &[], &[given], soon()).await.unwrap().standings[0].1.clone()
        };
        assert_eq!(compare("c1").await, Standing::Unmarked, "checked, with {also:?}");
        assert_eq!(compare("c2").await, Standing::Another("net.c1".into()), "checked, with {also:?}");
        let free = ip("10.0.0.13");
        let requests = [ReleaseRequest::new(given).with_handle("net.c1"), ReleaseRequest::new(free)];
        let done = world.ipam.release_ips(&requests, soon()).await.unwrap();
        assert_eq!((done.released, done.unallocated), (vec![given], vec![free]), "released, with {also:?}");
        world.check().await;
    }
}

#[tokio::test]
async fn release_removes_odd_handle_with_last_address() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    world.one("a", "c1").await.unwrap();
    let key = keys::handle("net.c1");
    let stored = String::from_utf8(world.value(&key).await.as_bytes().to_vec()).unwrap();
    world.store.put(key.clone(), stored.replacen("{\"block\":{", "{\"block\":{\"nonsense\":2,", 1)).await.unwrap();
    assert_eq!(world.release("a", "c1").await.len(), 1);
    assert!(world.store.get(key).await.unwrap().is_none());
}

/// As in Calico, a node keeps its empty blocks only in pools that select the node.
#[tokio::test]
async fn release_removes_block_when_pool_deselects_node() {
    let world = World::new().await;
    world.add_node("a", &[("zone", "b")]).await;
    world.add(NewPool::new("zone-b", "10.1.0.0/24".parse().unwrap()).with_node_selector("zone == 'b'")).await;
    for (labels, stays) in [(&[("zone", "b")][..], true), (&[], false)] {
        let address = world.one("a", "c1").await.unwrap();
        assert!(address.to_string().starts_with("10.1.0."));
        world.add_node("a", labels).await;
        assert_eq!(world.release("a", "c1").await, [address]);
        let blocks = world.dump().await.into_iter().filter(|kv| keys::parse_block(&kv.key).is_some()).count();
        let affinities = world.dump().await.into_iter().filter(|kv| keys::parse_affinity(&kv.key).is_some()).count();
        assert_eq!((blocks, affinities), (usize::from(stays), usize::from(stays)));
    }
}
