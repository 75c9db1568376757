//! Tests the records of workloads that keep their addresses. Workload records that Margay wrote cause no findings.
//! After the repair of a damaged workload record, the workload gets its address again.

use std::net::IpAddr;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{Document, StickyRecord, keys};
use ipam_core::sticky::Sticky;
use ipam_operator::inspect::{Code, RepairResult};
use kv::{Range, StoreExt};

use super::damages::{inspect, mend_all};
use crate::Operated;
use crate::world::{World, attachment, ip, soon};

const WEB: &str = "shop/web";
const WAIT: u64 = 60;

/// Assigns an address to a container whose workload is `name`.
async fn sticky(world: &World, container: &str, name: &str) -> IpAddr {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
    request.sticky = Some(Sticky { name: name.to_owned(), wait: Some(Duration::from_secs(WAIT)) });
    world.assign(&request).await.unwrap()[0].ip
}

async fn recorded(world: &World, name: &str) -> Vec<IpAddr> {
    let key = keys::sticky(name);
    let Some(kv) = world.store.get(key.clone()).await.unwrap() else { return Vec::new() };
    StickyRecord::decode(&key, kv.value.as_bytes()).unwrap().addresses.iter().map(|one| one.address).collect()
}

async fn in_order(world: &World, after: &str) {
    let found = inspect(world).await;
    assert!(found.findings.is_empty(), "{after}: {:?}", found.findings);
}

#[tokio::test]
async fn workload_record_stays_in_order() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    let own = sticky(&world, "c1", WEB).await;
    in_order(&world, "an assignment").await;
    world.release("a", "c1").await;
    in_order(&world, "a release").await;
    let pinned = if own == ip("10.0.0.3") { ip("10.0.0.2") } else { ip("10.0.0.3") };
    world.operator().pin(pinned, "shop/printer", None, soon()).await.unwrap();
    in_order(&world, "a pin").await;
    world.pass(WAIT as i64 + 1);
    for number in 0..3 {
        world.one("a", &format!("o{number}")).await.unwrap();
    }
    assert!(recorded(&world, WEB).await.is_empty(), "another container has the address");
    in_order(&world, "the end of the wait").await;
    world.operator().unpin(pinned, soon()).await.unwrap();
    in_order(&world, "an unpin").await;
}

#[tokio::test]
async fn workload_gets_its_address_again_when_record_was_lost() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.operator().pin(ip("10.0.0.9"), WEB, Some("other"), soon()).await.unwrap();
    let own = sticky(&world, "c1", WEB).await;
    let before = recorded(&world, WEB).await;
    assert_eq!(before, [ip("10.0.0.9"), own]);
    world.release("a", "c1").await;
    world.store.delete(Range::Key(keys::sticky(WEB))).await.unwrap();

    let found = inspect(&world).await;
    let [lost] = &found.findings[..] else { panic!("{:?}", found.findings) };
    assert_eq!((lost.code, lost.subject.to_string()), (Code::KeptUnrecorded, "workload shop/web".to_owned()));
    assert!(lost.what.contains(&own.to_string()) && lost.what.contains("10.0.0.9"), "{}", lost.what);
    assert!(mend_all(&world).await.findings.is_empty());
    assert_eq!(recorded(&world, WEB).await, before, "the pinned one comes first");
    assert_eq!(sticky(&world, "c2", WEB).await, own);
    world.check().await;
}

#[tokio::test]
async fn workload_record_is_left_alone_when_in_order_again() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    let own = sticky(&world, "c1", WEB).await;
    world.release("a", "c1").await;
    world.store.delete(Range::Key(keys::sticky(WEB))).await.unwrap();
    let found = inspect(&world).await;
    // The address of the workload is unpinned and released after the inspection and before the repair.
    world.operator().unpin(own, soon()).await.unwrap();
    let before = world.dump().await;
    let mended = world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap();
    assert_eq!((mended, world.dump().await), (RepairResult::Changed, before));
}
