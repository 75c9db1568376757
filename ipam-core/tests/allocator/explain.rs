//! Tests that `explain` predicts the result of the next assignment.

use ipam_core::Error;
use ipam_core::assign::{AddressSource, Explanation, PredictedOutcome};
use ipam_core::model::{AssignmentMode, IpamConfig, Labels, NewPool, Owner, PoolUse};
use ipam_core::net::{Count, Family};
use ipam_core::pools::{Obstacle, PoolError};

use crate::world::{World, soon};

async fn explain(world: &World, node: &str, pools: &[&str]) -> Explanation {
    let pools: Vec<String> = pools.iter().map(|pool| (*pool).to_owned()).collect();
    let before = world.dump().await;
    let explained = world.ipam.explain(node, None, &pools, None, soon()).await.unwrap();
    assert_eq!(world.dump().await, before, "nothing is written");
    explained
}

fn source(explained: &Explanation) -> AddressSource {
    match &explained.outcome {
        PredictedOutcome::Given { source, .. } => source.clone(),
        other => panic!("{other:?}"),
    }
}

fn refusal(explained: Explanation) -> Error {
    match explained.outcome {
        PredictedOutcome::Refused(error) => error,
        other => panic!("{other:?}"),
    }
}

/// Asserts that the next assignment gets the predicted address, and returns the kind of block that contains the
/// address.
async fn next(world: &World, node: &str, container: &str) -> AddressSource {
    let explained = explain(world, node, &[]).await;
    let PredictedOutcome::Given { address, .. } = explained.outcome else { panic!("{explained:?}") };
    assert_eq!(world.one(node, container).await.unwrap(), address);
    source(&explained)
}

#[tokio::test]
async fn explain_tells_block_that_assignment_then_takes() {
    let world = World::new().await;
    // The pool has two blocks of four addresses.
    world.add_pool("v4", "10.0.0.0/29").await;
    assert_eq!(next(&world, "a", "a0").await, AddressSource::New);
    for number in 1..4 {
        assert_eq!(next(&world, "a", &format!("a{number}")).await, AddressSource::Own);
    }
    assert_eq!(next(&world, "b", "b0").await, AddressSource::New);
    assert_eq!(next(&world, "a", "a4").await, AddressSource::Borrowed(Some(Owner::host("b"))));
    let explained = explain(&world, "a", &[]).await;
    let stock = explained.pools[0].stock;
    assert_eq!((stock.usage.in_use, stock.usage.available), (Count::new(6), Count::new(2)));
    assert_eq!((stock.blocks, stock.own_blocks, stock.own_free, stock.in_cooldown), (2, 1, 0, 0));
    assert_eq!(explained.block_limit, Some(20));
    // An empty block of another node can be taken over once its claim is old enough.
    world.release("b", "b0").await;
    world.release("a", "a4").await;
    world.pass(61);
    assert_eq!(next(&world, "a", "a5").await, AddressSource::TakenOver(Some(Owner::host("b"))));
    for number in 6..9 {
        assert_eq!(next(&world, "a", &format!("a{number}")).await, AddressSource::Own);
    }
    assert!(matches!(refusal(explain(&world, "a", &[]).await), Error::Exhausted { .. }));
}

#[tokio::test]
async fn explain_says_why_each_pool_is_not_chosen() {
    let world = World::new().await;
    world.add_node("racked", &[("rack", "a")]).await;
    let pool =
        |name: &str, third: u8| NewPool::new(name, format!("10.0.{third}.0/29").parse().unwrap()).with_block_size(30);
    world.add(pool("manual", 0).with_assignment_mode(AssignmentMode::Manual)).await;
    world.add(pool("racks-b", 1).with_node_selector("rack == 'b'")).await;
    world.add(pool("shops", 2).with_namespace_selector("shop == 'yes'")).await;
    world.add(pool("tunnels", 3).with_allowed_uses([PoolUse::Tunnel])).await;
    world.add_pool("v6", "fd00::/125").await;

    let obstacles = |explained: &Explanation| {
        explained
            .pools
            .iter()
            .map(|one| (one.pool.name().to_owned(), one.obstacle.clone().unwrap()))
            .collect::<Vec<_>>()
    };
    let because = |name: &str, obstacle| (name.to_owned(), Some(obstacle));
    let explained = explain(&world, "racked", &[]).await;
    let expected = [
        because("manual", Obstacle::Manual),
        because("racks-b", Obstacle::Node),
        because("shops", Obstacle::Namespace),
        because("tunnels", Obstacle::Use),
    ];
    assert_eq!(obstacles(&explained), expected);
    assert_eq!(explained.labels.get("rack").map(String::as_str), Some("a"));
    assert!(matches!(refusal(explained), Error::NamespaceWanted));

    let namespace = |text: &str| -> Labels { [("shop".to_owned(), text.to_owned())].into_iter().collect() };
    let shop = world.ipam.explain("racked", None, &[], Some(&namespace("yes")), soon()).await.unwrap();
    assert_eq!(obstacles(&shop)[2], ("shops".to_owned(), None));
    assert_eq!(source(&shop), AddressSource::New);
    let other = world.ipam.explain("racked", None, &[], Some(&namespace("no")), soon()).await.unwrap();
    let error = refusal(other);
    assert!(matches!(error, Error::Pool(PoolError::NoneForUse(_))), "{error:?}");

    // A pool that is requested by name is used regardless of the pool's selectors.
    let named = explain(&world, "racked", &["racks-b"]).await;
    assert_eq!(obstacles(&named)[0], because("manual", Obstacle::NotRequested));
    assert_eq!(obstacles(&named)[1], ("racks-b".to_owned(), None));
    assert_eq!(source(&named), AddressSource::New);
    let v6 = explain(&world, "racked", &["v6"]).await;
    assert_eq!((v6.family, v6.pools.len(), source(&v6)), (Family::V6, 1, AddressSource::New));
    let missing = refusal(explain(&world, "racked", &["none"]).await);
    assert!(matches!(missing, Error::Pool(PoolError::UnknownName(_))), "{missing:?}");
}

#[tokio::test]
async fn explain_names_settings_and_nodes_in_way() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let settings = |limit| IpamConfig::default().with_max_blocks_per_host(limit);
    world.configure(settings(1)).await;
    for number in 0..4 {
        next(&world, "a", &format!("a{number}")).await;
    }
    let explained = explain(&world, "a", &[]).await;
    assert_eq!((explained.block_limit, explained.pools[0].stock.own_blocks), (Some(1), 1));
    next(&world, "b", "b0").await;
    world.configure(settings(1).with_strict_affinity(true)).await;
    assert!(matches!(refusal(explain(&world, "a", &[]).await), Error::BlockLimit));
    world.configure(IpamConfig::default().with_auto_allocate_blocks(false).with_strict_affinity(true)).await;
    let explained = explain(&world, "a", &[]).await;
    assert!(explained.strict_affinity && !explained.claims_blocks);
    assert!(matches!(refusal(explained), Error::NoNewBlocks));
    assert!(matches!(refusal(explain(&world, "unknown", &[]).await), Error::UnknownNode(_)));
}

#[tokio::test]
async fn explain_counts_secondary_blocks_as_own_of_node() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let block = |third: u8| format!("10.0.0.{third}/30").parse().unwrap();
    for (cidr, owner) in
        [(block(0), Owner::host("a")), (block(4), Owner::secondary("a")), (block(8), Owner::load_balancer())]
    {
        world.ipam.claim_affinity(&owner, cidr, soon()).await.unwrap();
    }
    let stock = explain(&world, "a", &[]).await.pools[0].stock;
    assert_eq!((stock.blocks, stock.own_blocks, stock.own_free), (3, 2, 8));
    let stock = explain(&world, "b", &[]).await.pools[0].stock;
    assert_eq!((stock.blocks, stock.own_blocks, stock.own_free), (3, 0, 0));
}
