//! Tests that the owner attributes of an address can be changed while the address stays assigned.

use std::collections::BTreeMap;

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{ExpectedOwner, IpamConfig, OwnerChange, OwnerUpdate};
use kv::StoreExt;

use crate::world::{World, attachment, ip, soon};

fn pod(name: &str) -> BTreeMap<String, String> {
    [("namespace", "shop"), ("pod", name)].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn alternate(name: &str) -> OwnerUpdate {
    OwnerUpdate { active: None, alternate: Some(OwnerChange::to(pod(name))) }
}

/// A test world with two addresses of handle `net.c1` that share one entry of a block.
async fn world() -> (World, [std::net::IpAddr; 2]) {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let mut request = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(2, 0));
    request.attributes = pod("source");
    let assigned = world.assign(&request).await.unwrap();
    (world, [assigned[0].ip, assigned[1].ip])
}

#[tokio::test]
async fn owner_migration_holds_address_and_writes_one_block() {
    let (world, [first, second]) = world().await;
    let set = async |update: &OwnerUpdate| world.ipam.set_owner_attributes(first, "net.c1", update, soon()).await;
    let before = world.store.list(kv::Range::All).await.unwrap().revision;
    set(&alternate("target")).await.unwrap();
    set(&alternate("target")).await.unwrap();
    assert_eq!(
        world.store.list(kv::Range::All).await.unwrap().revision,
        before.next(),
        "a repeated call writes nothing"
    );
    let of = |name: &str| ExpectedOwner::Pod { namespace: "shop".into(), name: name.into() };
    let swap = OwnerUpdate {
        active: Some(OwnerChange::to(pod("target")).if_owned_by(of("source"))),
        alternate: Some(OwnerChange::clear().if_owned_by(of("target"))),
    };
    set(&swap).await.unwrap();
    let refused = set(&swap).await.unwrap_err();
    assert!(matches!(refused, Error::Owner(_)), "{refused}");
    let entry = world.ipam.attributes_of(first, soon()).await.unwrap();
    assert_eq!((entry.attributes(), entry.alternate_attributes().len()), (&pod("target"), 0));
    assert_eq!(world.ipam.attributes_of(second, soon()).await.unwrap().get("pod"), Some("source"));
    world.check().await;
    assert_eq!(world.ipam.release_by_handle("net.c1", soon()).await.unwrap(), [first, second]);
}

#[tokio::test]
async fn owner_change_skips_free_cooling_and_foreign_addresses() {
    let (world, [first, _]) = world().await;
    let set = async |ip, handle| {
        let refused = world.ipam.set_owner_attributes(ip, handle, &alternate("target"), soon()).await;
        refused.unwrap_err().to_string()
    };
    for free in [ip("10.0.0.15"), ip("10.0.0.12"), ip("192.168.0.1")] {
        let unassigned = format!("resource does not exist: {free} with error: IP is unassigned");
        assert_eq!(set(free, "net.c1").await, unassigned);
    }
    assert_eq!(set(first, "net.c2").await, format!("IP {first} is not assigned to handle net.c2"));
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    world.release("a", "c1").await;
    let before = world.dump().await;
    assert_eq!(set(first, "net.c1").await, format!("IP {first} is not assigned to handle net.c1"));
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn owner_change_succeeds_for_one_of_many() {
    let (world, [first, _]) = world().await;
    let tasks = (0..8).map(|number| {
        let world = world.clone();
        tokio::spawn(async move {
            let change = OwnerChange::to(pod(&format!("p{number}"))).if_owned_by(ExpectedOwner::None);
            let update = OwnerUpdate { active: None, alternate: Some(change) };
            world.ipam.set_owner_attributes(first, "net.c1", &update, soon()).await
        })
    });
    let mut won = 0;
    for task in tasks.collect::<Vec<_>>() {
        match task.await.unwrap() {
            Ok(()) => won += 1,
            Err(error) => assert!(matches!(error, Error::Owner(_)), "{error}"),
        }
    }
    assert_eq!(won, 1);
    world.check().await;
}
