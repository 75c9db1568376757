//! Tests the census: a report on how every address of the pools is used.

use ipam_core::census::{AddressUse, BlockCensus};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{IpamConfig, NewPool, Owner};
use kv::{Range, StoreExt};

use crate::world::{World, soon};

fn signs(block: &BlockCensus) -> String {
    let sign = |found: &AddressUse| match found {
        AddressUse::Free => '.',
        AddressUse::Reserved => 'r',
        AddressUse::InCooldown => '~',
        AddressUse::Used => '#',
        AddressUse::Borrowed => 'b',
    };
    block.uses.iter().map(sign).collect()
}

#[tokio::test]
async fn census_tells_every_address_once() {
    let world = World::new().await;
    world.add(NewPool::new("p", "10.0.0.0/29".parse().unwrap()).with_block_size(30)).await;
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    world.reserve(&["10.0.0.3/32", "10.0.0.7/32"]).await;
    // Nodes `a` and `b` own one block each; node `c` borrows an address.
    let first = world.one("a", "a1").await.unwrap();
    world.one("b", "b1").await.unwrap();
    world.one("a", "a2").await.unwrap();
    world.one("c", "c1").await.unwrap();
    world.release("a", "a1").await;

    let census = world.ipam.census(soon()).await.unwrap();
    let [pool] = census.pools.as_slice() else { panic!("{census:?}") };
    assert_eq!((pool.blocks.len(), census.orphaned.len()), (2, 0));
    let drawn: Vec<(Option<Owner>, String)> =
        pool.blocks.iter().map(|block| (block.owner.clone(), signs(block))).collect();
    let of = |name| drawn.iter().find(|(owner, _)| *owner == Some(Owner::host(name))).unwrap().1.clone();
    let both = of("a") + &of("b");
    let count = |sign| both.chars().filter(|found| *found == sign).count();
    assert_eq!((count('#'), count('b'), count('~'), count('r'), both.len()), (2, 1, 1, 2, 8), "{drawn:?}");
    let in_cooldown = pool.blocks.iter().find(|block| block.cidr.contains(&first)).unwrap();
    assert!(signs(in_cooldown).contains('~'));
    // As in the utilization report, addresses in cooldown count as used.
    assert_eq!(pool.usage, world.ipam.utilization(soon()).await.unwrap().pools[0].usage);
    assert_eq!((census.nodes["a"].used, census.nodes["c"].used, census.nodes["c"].blocks), (1, 1, 0));
    assert_eq!(census.nodes["b"].boots["boot0001"], 1);
    assert_eq!((census.registered.len(), census.of_gone_nodes()), (3, 0));

    // The cooldown of the addresses is over, and node `c` and the pool are deleted.
    world.pass(61);
    world.store.delete(Range::key(keys::resource(ResourceKind::Node, "c"))).await.unwrap();
    let census = world.ipam.census(soon()).await.unwrap();
    assert_eq!(census.of_gone_nodes(), 1);
    assert!(!census.pools[0].blocks.iter().any(|block| signs(block).contains('~')));
    world.store.delete(Range::key(keys::resource(ResourceKind::IpPool, "p"))).await.unwrap();
    let census = world.ipam.census(soon()).await.unwrap();
    assert_eq!((census.pools.len(), census.orphaned.len()), (0, 2));
    assert!(census.orphaned[0].cidr < census.orphaned[1].cidr);
}

#[tokio::test]
async fn census_ends_at_its_deadline() {
    let world = World::new().await;
    world.add_pool("p", "10.0.0.0/26").await;
    let over = || kv::Deadline::after(std::time::Duration::ZERO);
    let ended = [world.ipam.utilization(over()).await.err(), world.ipam.census(over()).await.err()];
    for error in ended {
        assert!(
            matches!(&error, Some(ipam_core::Error::Store(error)) if *error.kind() == kv::ErrorKind::Timeout),
            "{error:?}"
        );
    }
}
