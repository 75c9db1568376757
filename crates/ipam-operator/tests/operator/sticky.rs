//! Tests that a workload keeps a pinned address for ever, in the networks for which the address is pinned.

use std::net::IpAddr;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{IpamConfig, ReleaseRequest};
use ipam_core::sticky::{Sticky, WaitEnd};
use ipam_operator::KeptAddress;

use crate::Operated;
use crate::world::{World, attachment, ip, soon};

const WEB: &str = "shop/web";

/// Assigns an address to a container of a workload, from the pool that has the network's name.
async fn assign(world: &World, network: &str, interface: &str, container: &str) -> IpAddr {
    let mut at = attachment("a", container);
    (at.network, at.interface) = (network.into(), interface.into());
    let mut request = AssignRequest::new(at, RequestedAddresses::any(1, 0));
    request.v4_pools = vec![network.into()];
    request.sticky = Some(Sticky { name: WEB.into(), wait: Some(Duration::from_secs(60)) });
    world.assign(&request).await.unwrap()[0].ip
}

async fn release(world: &World, network: &str, interface: &str, container: &str) {
    let mut at = attachment("a", container);
    (at.network, at.interface) = (network.into(), interface.into());
    world.ipam.release_attachment(&at, &[], soon()).await.unwrap();
}

async fn two_networks() -> World {
    let world = World::new().await;
    world.add_pool("net", "10.0.0.0/28").await;
    world.add_pool("other", "10.1.0.0/28").await;
    world
}

async fn pin(world: &World, address: &str, network: Option<&str>) -> ipam_core::Result<KeptAddress> {
    world.operator().pin(ip(address), WEB, network, soon()).await
}

async fn kept(world: &World) -> Vec<(String, bool, Option<WaitEnd>)> {
    let kept = world.operator().kept_addresses(soon()).await.unwrap();
    kept.into_iter().map(|one| (one.address.to_string(), one.is_pinned, one.until)).collect()
}

#[tokio::test]
async fn pin_outlives_every_use() {
    let world = two_networks().await;
    pin(&world, "10.0.0.9", None).await.unwrap();
    for container in ["c1", "c2", "c3"] {
        assert_eq!(assign(&world, "net", "eth0", container).await, ip("10.0.0.9"));
        assert_eq!(kept(&world).await, [("10.0.0.9".to_owned(), true, None)]);
        release(&world, "net", "eth0", container).await;
        assert_eq!(kept(&world).await, [("10.0.0.9".to_owned(), true, Some(WaitEnd::Forever))]);
        world.pass(100_000);
    }
}

#[tokio::test]
async fn pin_in_one_network_leaves_others_sticky() {
    for pinned in [None, Some("other")] {
        let world = two_networks().await;
        pin(&world, "10.1.0.9", pinned).await.unwrap();
        let first = assign(&world, "net", "eth0", "c1").await;
        assert_eq!(assign(&world, "other", "net1", "c1").await, ip("10.1.0.9"));
        for container in ["c1", "c2"] {
            release(&world, "net", "eth0", container).await;
            release(&world, "other", "net1", container).await;
        }
        // A second container takes the longest-free address, so that the sticky workload cannot get its first address
        // back by chance.
        world.one("a", "o1").await.unwrap();
        assert_eq!(assign(&world, "net", "eth0", "c2").await, first);
        assert_eq!(assign(&world, "other", "net1", "c2").await, ip("10.1.0.9"));
    }
}

#[tokio::test]
async fn pin_of_address_in_use_is_where_it_is_used() {
    let world = two_networks().await;
    let used = assign(&world, "net", "eth1", "c1").await;
    let refused = pin(&world, &used.to_string(), Some("other")).await.unwrap_err().to_string();
    assert_eq!(
        refused,
        format!("{used} is in use in network net; pin it without --network, or once its container has ended")
    );
    assert_eq!(pin(&world, &used.to_string(), None).await.unwrap().network.as_deref(), Some("net"));
    assert_ne!(assign(&world, "net", "eth0", "c1").await, used, "it is the other interface's");
    release(&world, "net", "eth1", "c1").await;
    assert_eq!(assign(&world, "net", "eth1", "c2").await, used);
}

#[tokio::test]
async fn pin_keeps_no_block_from_its_node() {
    let world = World::new().await;
    world.add_pool("net", "10.0.0.0/28").await;
    let strict = IpamConfig::default().with_strict_affinity(true);
    world.configure(strict).await;
    pin(&world, "10.0.0.9", None).await.unwrap();
    for number in 0..15 {
        world.one("a", &format!("c{number}")).await.unwrap();
    }
    assert_eq!(assign(&world, "net", "eth0", "web").await, ip("10.0.0.9"));
}

#[tokio::test]
async fn pin_wait_stays_when_unused_addresses_are_reclaimed() {
    let world = two_networks().await;
    pin(&world, "10.0.0.9", None).await.unwrap();
    let used = assign(&world, "net", "eth0", "c1").await;
    assert_eq!(used, ip("10.0.0.9"));
    let reclaimed = world.operator().reclaim(&[ReleaseRequest::new(used)], soon()).await.unwrap();
    assert_eq!(reclaimed.released, [used]);
    let waits = [("10.0.0.9".to_owned(), true, Some(WaitEnd::Forever))];
    assert_eq!(kept(&world).await, waits);
    let again = world.operator().reclaim(&[ReleaseRequest::new(used)], soon()).await.unwrap();
    assert_eq!((again.released, again.changed), (vec![], vec![used]));
    assert_eq!(kept(&world).await, waits);
}
