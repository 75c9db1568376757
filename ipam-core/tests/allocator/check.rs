//! Tests the comparison of an attachment's expected addresses with the store, for the CNI verb CHECK.

use std::net::IpAddr;

use ipam_core::Standing;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys;
use kv::StoreExt;

use crate::world::{World, attachment, ip, soon};

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world
}

async fn standing(world: &World, who: &Attachment, old: &[String], ip: IpAddr) -> Standing {
    let comparison = world.ipam.compare(who, old, &[ip], soon()).await.unwrap();
    assert_eq!(comparison.standings.len(), 1);
    comparison.standings[0].1.clone()
}

#[tokio::test]
async fn check_tells_standing_of_each_address() {
    let world = world().await;
    let c1 = attachment("a", "c1");
    let own = world.one("a", "c1").await.unwrap();
    let others = world.one("a", "c2").await.unwrap();
    let mut eth1 = AssignRequest::new(c1.clone(), RequestedAddresses::any(1, 0));
    eth1.attachment.interface = "eth1".into();
    let second = world.assign(&eth1).await.unwrap()[0].ip;
    let before = world.dump().await;
    let rows = [
        (own, Standing::Own),
        (others, Standing::Another("net.c2".into())),
        // The address `second` belongs to an interface of the container other than the checked one.
        (second, Standing::Another("net.c1".into())),
        // Of the two free addresses, one lies in a stored block, the other in a block that is not stored.
        (ip("10.0.0.251"), Standing::Free),
        (ip("10.0.0.4"), Standing::Free),
        (ip("192.0.2.1"), Standing::Unknown),
        (ip("fd00::1"), Standing::Unknown),
    ];
    let asked: Vec<IpAddr> = rows.iter().map(|(ip, _)| *ip).collect();
    let comparison = world.ipam.compare(&c1, &[], &asked, soon()).await.unwrap();
    assert_eq!(comparison.standings, rows);
    assert_eq!(comparison.held, [own]);
    assert_eq!(world.dump().await, before, "nothing is changed");

    world.release("a", "c1").await;
    assert_eq!(standing(&world, &c1, &[], own).await, Standing::Free);
}

#[tokio::test]
async fn check_accepts_what_calico_recorded() {
    let world = world().await;
    let c1 = attachment("a", "c1");
    let own = world.one("a", "c1").await.unwrap();
    let rewrite = async |handle: &str| {
        for kv in world.dump().await.into_iter().filter(|kv| keys::parse_block(&kv.key).is_some()) {
            let mut block: serde_json::Value = serde_json::from_slice(kv.value.as_bytes()).unwrap();
            for entry in block["attributes"].as_array_mut().unwrap() {
                entry["handle_id"] = handle.into();
                entry["secondary"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("margay"));
            }
            world.store.put(kv.key, block.to_string()).await.unwrap();
        }
    };
    rewrite("net.c1").await;
    assert_eq!(standing(&world, &c1, &[], own).await, Standing::Unmarked);
    assert_eq!(standing(&world, &attachment("b", "c1"), &[], own).await, Standing::Another("net.c1".into()));
    rewrite("prod.web").await;
    let old = ["prod.web".to_owned()];
    assert_eq!(standing(&world, &c1, &old, own).await, Standing::Unmarked);
    assert_eq!(standing(&world, &c1, &[], own).await, Standing::Another("prod.web".into()));
}

#[tokio::test]
async fn check_accepts_address_when_its_pool_is_gone() {
    let world = world().await;
    let own = world.one("a", "c1").await.unwrap();
    let pool = keys::resource(keys::ResourceKind::IpPool, "v4");
    let stored = world.store.get(pool.clone()).await.unwrap().unwrap();
    let deleted = world.store.delete_if(pool, stored.mod_revision).await.unwrap();
    assert!(deleted.done().is_some(), "{deleted:?}");
    assert_eq!(standing(&world, &attachment("a", "c1"), &[], own).await, Standing::Own);
    assert_eq!(standing(&world, &attachment("a", "c2"), &[], own).await, Standing::Unknown);
}
