//! Tests addresses of handles without a container, and blocks of owners that are not nodes.

use std::collections::BTreeMap;

use ipam_core::Error;
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::{Document, Handle, IpamConfig, NewPool, Owner, PoolUse, keys};
use ipam_core::net::Family;
use ipnet::IpNet;
use kv::StoreExt;

use crate::world::{World, attachment, held, ip, soon};

/// A test world with a pool for workloads and a pool for services, both with blocks of four addresses.
async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let services = NewPool::new("services", "10.1.0.0/29".parse().unwrap());
    world.add(services.with_block_size(30).with_allowed_uses([PoolUse::LoadBalancer])).await;
    world
}

fn request(handle: &str, owner: Owner, wanted: usize) -> HandleRequest {
    HandleRequest::new(handle, owner, RequestedAddresses::any(wanted, 0))
}

async fn give(world: &World, request: &HandleRequest) -> ipam_core::Result<Vec<std::net::IpAddr>> {
    let assigned = world.ipam.assign_to_handle(request, soon()).await?;
    Ok(assigned.into_iter().map(|one| one.ip).collect())
}

#[tokio::test]
async fn handle_calls_give_further_addresses_with_own_attributes() {
    let world = world().await;
    let attributes: BTreeMap<String, String> = [("node".to_owned(), "a".to_owned())].into();
    let request = request("vxlan-tunnel-addr-a", Owner::host("a"), 1).with_attributes(attributes.clone());
    let (first, second) = (give(&world, &request).await.unwrap()[0], give(&world, &request).await.unwrap()[0]);
    assert_ne!(first, second);
    let entry = world.ipam.attributes_of(first, soon()).await.unwrap();
    assert_eq!((entry.handle(), entry.attributes()), (Some("vxlan-tunnel-addr-a"), &attributes));
    let mut both = [first, second];
    both.sort_unstable();
    assert_eq!(world.ipam.addresses_of_handle("vxlan-tunnel-addr-a", soon()).await.unwrap(), both);
    world.check().await;
    assert_eq!(world.ipam.release_by_handle("vxlan-tunnel-addr-a", soon()).await.unwrap(), both);
    world.check().await;
}

#[tokio::test]
async fn handle_of_virtual_owner_uses_load_balancer_pools() {
    let world = world().await;
    let given = give(&world, &request("service", Owner::load_balancer(), 1)).await.unwrap()[0];
    assert!("10.1.0.0/29".parse::<IpNet>().unwrap().contains(&given), "{given}");
    let kvs = world.dump().await;
    let affinities: Vec<_> = kvs.iter().filter_map(|kv| keys::parse_affinity(&kv.key)).collect();
    assert_eq!(affinities.len(), 1);
    assert_eq!(affinities[0].0, Owner::Virtual("load-balancer".into()));
    let block = world.block(&affinities[0].1.to_string()).await.unwrap();
    assert_eq!(block.owner().unwrap().to_string(), "virtual:load-balancer");
    world.check().await;
    // A handle can request a specific address in any block of its owner.
    let wanted = RequestedAddresses::these([ip("10.1.0.7")]);
    let this = HandleRequest::new("service", Owner::load_balancer(), wanted);
    assert_eq!(give(&world, &this).await.unwrap(), [ip("10.1.0.7")]);
    assert!(matches!(give(&world, &this).await, Err(Error::AlreadyAssigned(_))));
    world.check().await;
    // Workloads must not use the load balancer's pool, and the load balancer must not use the workloads' pool.
    let wrong = HandleRequest::new("service", Owner::load_balancer(), RequestedAddresses::these([ip("10.0.0.1")]));
    let error = give(&world, &wrong).await.unwrap_err().to_string();
    assert!(error.contains("not allowed for use \"LoadBalancer\""), "{error}");
    world.ipam.release_by_handle("service", soon()).await.unwrap();
    let released = world.ipam.release_all_affinities(&Owner::load_balancer(), ReleaseIf::Empty, soon()).await.unwrap();
    assert_eq!(released.released.len(), 2);
    world.check().await;
}

#[tokio::test]
async fn handle_of_virtual_owner_claims_and_releases_like_node() {
    let world = world().await;
    let (balancer, node) = (Owner::load_balancer(), Owner::host("load-balancer"));
    world.add_node("load-balancer", &[]).await;
    let cidr: IpNet = "10.1.0.0/29".parse().unwrap();
    assert_eq!(world.ipam.claim_affinity(&balancer, cidr, soon()).await.unwrap().claimed.len(), 2);
    // A node named `load-balancer` is a different owner than the load balancer.
    assert_eq!(world.ipam.claim_affinity(&node, cidr, soon()).await.unwrap().failed.len(), 2);
    let released = world.ipam.release_affinity(&node, cidr, ReleaseIf::Any, soon()).await.unwrap();
    assert_eq!((released.released.len(), released.in_use.len()), (0, 0));
    world.check().await;
    assert_eq!(world.ipam.release_affinity(&balancer, cidr, ReleaseIf::Any, soon()).await.unwrap().released.len(), 2);
    world.check().await;
    for invalid in [Owner::from("virtual:"), Owner::from("someone")] {
        let error = world.ipam.claim_affinity(&invalid, cidr, soon()).await.unwrap_err();
        assert!(matches!(&error, Error::Invalid(what) if what.contains("cannot own blocks")), "{error}");
        assert!(world.ipam.release_all_affinities(&invalid, ReleaseIf::Any, soon()).await.is_err());
        assert!(give(&world, &request("h", invalid, 1)).await.is_err());
    }
    let unknown = give(&world, &request("h", Owner::host("nosuch"), 1)).await.unwrap_err();
    assert!(matches!(unknown, Error::UnknownNode(_)), "{unknown}");
}

#[tokio::test]
async fn handle_of_virtual_owner_obeys_affinity_and_block_limit() {
    let world = world().await;
    world.configure(IpamConfig::default().with_strict_affinity(true).with_max_blocks_per_host(1)).await;
    assert_eq!(give(&world, &request("service", Owner::load_balancer(), 4)).await.unwrap().len(), 4);
    assert!(matches!(give(&world, &request("service", Owner::load_balancer(), 1)).await, Err(Error::BlockLimit)));
    world.check().await;
}

#[tokio::test]
async fn handle_gets_no_more_of_family_than_allowed() {
    let world = world().await;
    world.add_pool("v6", "fd00::/120").await;
    let both = |v4, v6| {
        HandleRequest::new("net.vmi.shop.cart", Owner::host("a"), RequestedAddresses::any(v4, v6))
            .with_most_per_family(1)
    };
    assert_eq!(give(&world, &both(1, 0)).await.unwrap().len(), 1);
    let before = world.dump().await;
    let error = give(&world, &both(1, 1)).await.unwrap_err();
    assert!(matches!(error, Error::HandleLimit { family: Family::V4, most: 1, held: 1, requested: 1, .. }), "{error}");
    let given = HandleRequest::new("net.vmi.shop.cart", Owner::host("a"), RequestedAddresses::these([ip("10.0.0.9")]));
    assert!(matches!(give(&world, &given.with_most_per_family(1)).await, Err(Error::HandleLimit { .. })));
    assert_eq!(world.dump().await, before);
    assert_eq!(give(&world, &both(0, 1)).await.unwrap().len(), 1, "the other family has a limit of its own");
    assert!(matches!(give(&world, &both(0, 1)).await, Err(Error::HandleLimit { family: Family::V6, .. })));
    world.check().await;
}

/// Calico first raises a handle's count of addresses and then writes the block. If Calico is interrupted between
/// writing the handle and writing the block, the handle's count stays too high.
#[tokio::test]
async fn handle_that_counts_too_much_refuses_nothing() {
    let world = world().await;
    world.one("a", "c1").await.unwrap();
    let (cidr, key) = (held_block(&world).await, keys::handle("h"));
    let mut handle = Handle::new();
    handle.increment(cidr, 1);
    handle.increment("10.0.0.252/30".parse().unwrap(), 1);
    world.put(key.clone(), &handle).await;
    let number = world.block(&cidr.to_string()).await.unwrap().sequence_number();
    let given = give(&world, &request("h", Owner::host("a"), 1).with_most_per_family(1)).await.unwrap();
    assert_eq!(world.ipam.addresses_of_handle("h", soon()).await.unwrap(), given);
    // Another writer may have raised the handle's count and be about to write the block with the new address. The
    // assignment has written the block meanwhile, so the commit of the writer that raised the count fails, and its
    // retry lowers the count.
    assert!(world.block(&cidr.to_string()).await.unwrap().sequence_number() > number);
    let stored = world.store.get(key.clone()).await.unwrap().unwrap();
    let counted: Vec<_> = Handle::decode(&key, stored.value.as_bytes()).unwrap().blocks().collect();
    assert_eq!(counted, [(cidr, 2)], "the handle counts other blocks or addresses");
}

async fn held_block(world: &World) -> IpNet {
    let of = held(&world.ipam, &attachment("a", "c1")).await[0];
    let pool = &world.ipam.inventory(soon()).await.unwrap().pools;
    pool.iter().find_map(|pool| ipam_core::pools::block_of(pool, of)).unwrap()
}

#[tokio::test]
async fn handle_is_refused_before_reading_when_malformed() {
    let world = world().await;
    for handle in ["", "a/b", "a\rb"] {
        let error = give(&world, &request(handle, Owner::host("a"), 1)).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{handle:?}: {error}");
    }
}

#[tokio::test]
async fn handle_request_keeps_to_named_pools_and_limit() {
    let world = world().await;
    world.add_pool("other", "10.2.0.0/28").await;
    let named = request("h", Owner::host("a"), 4).with_pools(Family::V4, ["other"]).with_max_blocks(1);
    let given = give(&world, &named).await.unwrap();
    assert!(given.iter().all(|ip| "10.2.0.0/28".parse::<IpNet>().unwrap().contains(ip)), "{given:?}");
    assert!(matches!(give(&world, &named).await, Err(Error::BlockLimit)));
    assert!(matches!(
        give(&world, &request("h", Owner::host("a"), 1).with_pools(Family::V4, ["services"])).await,
        Err(Error::Pool(_))
    ));
    world.check().await;
}

#[tokio::test]
async fn handle_of_address_is_told_or_calico_error() {
    let world = world().await;
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    let given = world.one("a", "c1").await.unwrap();
    let attributes = world.ipam.attributes_of(given, soon()).await.unwrap();
    assert_eq!((attributes.handle(), attributes.get("node")), (Some("net.c1"), Some("a")));
    assert_eq!(world.ipam.addresses_of_handle("net.c1", soon()).await.unwrap(), [given]);
    world.release("a", "c1").await;
    let error = world.ipam.attributes_of(given, soon()).await.unwrap_err().to_string();
    assert_eq!(error, format!("address {given} is in cooldown"));
    world.pass(61);
    for ip in [given, ip("192.168.1.1")] {
        let error = world.ipam.attributes_of(ip, soon()).await.unwrap_err().to_string();
        assert_eq!(error, format!("resource does not exist: {ip} with error: IP is unassigned"));
    }
    assert!(matches!(world.ipam.addresses_of_handle("net.c1", soon()).await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn handle_addresses_are_what_blocks_hold() {
    let world = world().await;
    let given = world.one("a", "c1").await.unwrap();
    let key = keys::handle("net.c1");
    let mut handle = Handle::decode(&key, world.value(&key).await.as_bytes()).unwrap();
    handle.increment("10.0.0.252/30".parse().unwrap(), 3);
    world.put(key, &handle).await;
    assert_eq!(world.ipam.addresses_of_handle("net.c1", soon()).await.unwrap(), [given]);
}

#[tokio::test(flavor = "multi_thread")]
async fn handle_gives_only_address_to_one_of_many() {
    let world = crate::concurrent::faulty(&world().await);
    let tasks = (0..8).map(|number: usize| {
        let world = world.clone();
        tokio::spawn(async move {
            let node = ["a", "b", "c"][number % 3];
            let request = request("net.vmi.shop.cart", Owner::host(node), 1).with_most_per_family(1);
            // In this test, some replies of the store are lost. Each write gets its own attribute, because after a lost
            // reply, two equal writes of one node could not be told apart.
            let own = [("caller".to_owned(), number.to_string())].into();
            give(&world, &request.with_attributes(own)).await
        })
    });
    let mut given = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        match task.await.unwrap() {
            Ok(addresses) => given.extend(addresses),
            Err(error) => assert!(matches!(error, Error::HandleLimit { .. }), "{error}"),
        }
    }
    assert_eq!(given.len(), 1);
    assert_eq!(world.ipam.addresses_of_handle("net.vmi.shop.cart", soon()).await.unwrap(), given);
    world.check().await;
}
