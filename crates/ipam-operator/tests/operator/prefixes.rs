//! Tests the operations of [`Operator`](ipam_operator::Operator) on pools of prefixes.

use std::collections::BTreeMap;

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{Attribute, Block, Document, NewPool, Owner, Pool, keys};
use ipam_operator::events::of_listed;
use ipam_operator::history::HistoryOf;
use ipam_operator::inspect::{AddressReporting, Code, Finding};
use ipnet::IpNet;
use kv::{Range, StoreExt};

use crate::Operated;
use crate::world::{World, attachment, soon};

async fn world() -> World {
    let world = World::new().await;
    world.add(NewPool::new("p", "2001:db8::/48".parse().unwrap()).with_prefix_length(64)).await;
    world
}

async fn assign(world: &World, container: &str) -> IpNet {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(0, 1));
    request.v6_pools = vec!["p".to_owned()];
    let assigned = world.assign(&request).await.unwrap();
    IpNet::new(assigned[0].ip, 64).unwrap()
}

#[tokio::test]
async fn node_keeps_its_prefix() {
    let world = world().await;
    let operator = world.operator();
    let first = operator.assign_node_prefix("p", "a", soon()).await.unwrap();
    assert!(first.is_new && first.prefix.prefix_len() == 64);
    let again = operator.assign_node_prefix("p", "a", soon()).await.unwrap();
    assert_eq!((again.prefix, again.is_new), (first.prefix, false));
    let other = operator.assign_node_prefix("p", "b", soon()).await.unwrap();
    assert!(other.is_new && other.prefix != first.prefix);
    world.check().await;
    let error = operator.assign_node_prefix("p", "unknown", soon()).await.unwrap_err();
    assert!(matches!(error, Error::UnknownNode(_)), "{error}");
    assert!(operator.assign_node_prefix("q", "a", soon()).await.unwrap_err().to_string().contains("pool q"));
    world.add_pool("v6", "fd00::/120").await;
    let error = operator.assign_node_prefix("v6", "a", soon()).await.unwrap_err();
    assert!(error.to_string().contains("pool v6 has addresses and no prefixes"), "{error}");
    operator.ipam().release_by_handle(&first.handle, soon()).await.unwrap();
    assert!(operator.assign_node_prefix("p", "a", soon()).await.unwrap().is_new);
}

#[tokio::test]
async fn prefix_names_with_dots_are_kept_apart() {
    let world = world().await;
    world.add(NewPool::new("a.b", "2001:db9::/48".parse().unwrap()).with_prefix_length(64)).await;
    world.add(NewPool::new("a", "2001:dba::/48".parse().unwrap()).with_prefix_length(80)).await;
    for node in ["c", "b.c"] {
        world.add_node(node, &[]).await;
    }
    let operator = world.operator();
    let one = operator.assign_node_prefix("a.b", "c", soon()).await.unwrap();
    let other = operator.assign_node_prefix("a", "b.c", soon()).await.unwrap();
    assert!(one.is_new && other.is_new && one.handle != other.handle);
    assert_eq!((one.prefix.prefix_len(), other.prefix.prefix_len()), (64, 80));
}

/// In this test, a pool of prefixes has lost its prefix length annotation.
#[tokio::test]
async fn prefix_held_keeps_its_addresses_from_pins() {
    let world = World::new().await;
    world.add(NewPool::new("pods", "2001:db8::/48".parse().unwrap()).with_prefix_length(64)).await;
    let mut request = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(0, 1));
    request.v6_pools = vec!["pods".into()];
    let held = world.assign(&request).await.unwrap()[0].ip;
    let plain = NewPool::new("pods", "2001:db8::/48".parse().unwrap());
    let plain = Pool::new(&plain, "u", world.ipam.now()).unwrap();
    world.put(keys::resource(keys::ResourceKind::IpPool, "pods"), &plain).await;
    let inside = format!("{held}5").parse().unwrap();
    let refused = world.operator().pin(inside, "shop/web", None, soon()).await.unwrap_err().to_string();
    assert!(refused.contains("pool pods has addresses now"), "{refused}");
}

#[tokio::test]
async fn prefix_pin_is_known_by_any_address_inside() {
    let world = world().await;
    let operator = world.operator();
    let [first, second] = ["2001:db8:0:7::1", "2001:db8:0:7:8::9"].map(|text| text.parse().unwrap());
    let pinned = operator.pin(first, "shop/router", None, soon()).await.unwrap();
    assert_eq!(pinned.address, "2001:db8:0:7::".parse::<std::net::IpAddr>().unwrap());
    assert_eq!(operator.unpin(second, soon()).await.unwrap().address, pinned.address);
    assert!(operator.kept_addresses(soon()).await.unwrap().is_empty());
    assert!(world.store.get(keys::sticky("shop/router")).await.unwrap().is_none());
}

#[tokio::test]
async fn prefix_of_node_is_in_no_calico_block_of_node() {
    let world = world().await;
    world.store.put(keys::cluster_information(), "{}").await.unwrap();
    let given = world.operator().assign_node_prefix("p", "a", soon()).await.unwrap();
    let kvs = world.dump().await;
    let block = kvs.iter().find(|kv| keys::parse_block(&kv.key).is_some_and(|cidr| cidr.contains(&given.prefix)));
    let block = Block::decode(&block.unwrap().key, block.unwrap().value.as_bytes()).unwrap();
    assert_eq!(block.owner(), Some(Owner::secondary("a")));
}

#[tokio::test]
async fn prefix_history_is_known_by_any_address_inside() {
    let world = world().await;
    let given = assign(&world, "c1").await;
    let IpNet::V6(net) = given else { panic!("{given}") };
    let inside = HistoryOf::from(net.broadcast().to_string().as_str());
    let whole = HistoryOf::from(given.to_string().as_str());
    let other = HistoryOf::from("2001:db9::1");
    let ranges = inside.ranges();
    let mut found = 0;
    for kv in world.store.list(Range::All).await.unwrap().kvs {
        for block_event in of_listed(&kv.key, kv.value.as_bytes()).unwrap_or_default() {
            if block_event.unit() == Some(given) {
                found += 1;
                assert!(inside.concerns(&block_event) && whole.concerns(&block_event) && !other.concerns(&block_event));
                assert!(!ranges[0].contains(kv.key.as_bytes()) && ranges[1].contains(kv.key.as_bytes()));
            }
        }
    }
    assert_eq!(found, 1);
}

/// Another program has created a block inside an existing block. The inspection reports each prefix that is assigned in
/// two overlapping blocks, without visiting each address of these prefixes.
#[tokio::test]
async fn prefix_check_finds_what_two_blocks_assigned() {
    let world = world().await;
    let given = assign(&world, "c1").await;
    assert!(inspect(&world).await.is_empty());
    let inner: IpNet = IpNet::new(given.addr(), 62).unwrap().trunc();
    let mut block = Block::of_length(inner, 64, None, world.ipam.now(), None).unwrap();
    let holder = Attribute::new(Some("foreign"), BTreeMap::new());
    block.assign_specific(given.addr(), &holder).unwrap();
    world.put(keys::block(inner), &block).await;
    let found = inspect(&world).await;
    let twice = found.iter().filter(|one| one.code == Code::AddressTwice).map(|one| one.subject.to_string());
    assert_eq!(twice.collect::<Vec<_>>(), [format!("address {}", given.addr())]);
}

async fn inspect(world: &World) -> Vec<Finding> {
    world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap().findings
}
