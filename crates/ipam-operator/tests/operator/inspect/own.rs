//! Tests that undamaged documents of the allocator or of Calico cause no findings, and that repairs and releases of
//! leftovers never free an address in use.

use std::path::Path;

use ipam_core::assign::{AssignRequest, Bridge, Gateway, PoolDefinition, RequestedAddresses};
use ipam_core::model::{IpamConfig, NewPool, ReleaseRequest};
use ipam_operator::inspect::{AddressReporting, Code, HandleRevision, Severity};
use serde_json::Value;

use super::damages::{Content, content, inspect, mend_all, world_of};
use crate::Operated;
use crate::world::{World, attachment, ip, soon};

#[tokio::test]
async fn inspection_finds_nothing_in_own_records() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/27").await;
    world.add_pool("six", "fd00::/124").await;
    // The containers use up all blocks of the pool, so nodes borrow addresses from each other's blocks.
    for number in 0..64 {
        let node = ["a", "b", "c"][number % 3];
        let mut request = AssignRequest::new(
            attachment(node, &format!("c{number}")),
            RequestedAddresses::any(1, usize::from(number < 9)),
        );
        request.v4_pools = vec!["main".into()];
        let _full = world.assign(&request).await;
    }
    let full = inspect(&world).await;
    assert!(full.findings.is_empty(), "{:?}", full.findings);
    assert_eq!(full.counts.held, 32 + 9);
    assert!(full.counts.borrowed > 0, "{:?}", full.counts);
    for number in (0..64).step_by(2) {
        world.release(["a", "b", "c"][number % 3], &format!("c{number}")).await;
        assert_eq!(inspect(&world).await.findings, [], "after the release of c{number}");
    }
    let mut defined = AssignRequest::new(attachment("a", "d0"), RequestedAddresses::any(1, 0));
    defined.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
    let ranges = vec![(ip("10.9.0.10"), ip("10.9.0.12"))];
    defined.define = vec![PoolDefinition {
        name: "net".into(),
        cidr: "10.9.0.0/24".parse().unwrap(),
        ranges,
        set: 0,
        free_of: None,
        gateway: None,
    }];
    world.assign(&defined).await.unwrap();
    world
        .ipam
        .create_pool(&NewPool::new("lab", "10.8.0.0/24".parse().unwrap()), Some(ip("10.8.0.1")), soon())
        .await
        .unwrap();
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    world.release("b", "c1").await;
    let all = inspect(&world).await;
    assert_eq!((all.findings, all.counts.cooling), (vec![], 2), "of both families");
}

/// The inspected datastore is complete, and was written by Calico itself.
#[tokio::test]
async fn inspection_finds_no_problem_in_calico_records() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/calico/cluster.json");
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let stored: Content = rows.iter().map(|row| (text(row, "key"), text(row, "value"))).collect();
    let world = world_of(&stored).await;
    let found = inspect(&world).await;
    let problems: Vec<_> = found.findings.iter().filter(|one| one.code.severity() == Severity::Problem).collect();
    assert!(problems.is_empty(), "{problems:#?}");
    assert!(found.counts.held > 200 && found.counts.blocks > 3, "{:?}", found.counts);
    let before = content(&world).await;
    mend_all(&world).await;
    assert_eq!(content(&world).await, before, "nothing is touched that is in order");
}

#[tokio::test]
async fn repair_leaves_what_has_changed() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let address = world.one("a", "c0").await.unwrap();
    let mut damaged = content(&world).await;
    let handle = "/calico/ipam/v2/handle/net.c0";
    let sound = damaged.insert(handle.into(), r#"{"block":{},"deleted":false}"#.into()).unwrap();
    let world = world_of(&damaged).await;
    let found = inspect(&world).await;
    assert_eq!(found.findings[0].code, Code::HandleCountsLess);
    // Another writer has repaired the handle already, so the repair does not write the handle again.
    kv::StoreExt::put(&world.store, handle, sound.as_str()).await.unwrap();
    let before = world.dump().await;
    let mended = world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap();
    assert_eq!(mended, ipam_operator::inspect::RepairResult::Changed);
    assert_eq!(world.dump().await, before);
    // An attempt to repair a finding that is not mendable fails.
    let finding = ipam_operator::inspect::Finding::new(
        Code::AddressTwice,
        ipam_operator::inspect::Subject::Address(address),
        "assigned twice",
    );
    assert!(world.operator().mend(&finding, found.revision, soon()).await.is_err());
}

#[tokio::test]
async fn reclaim_takes_only_what_is_as_reported() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let mut requests = Vec::new();
    for number in 0..70 {
        world.one("a", &format!("c{number}")).await.unwrap();
    }
    for one in world.operator().inspect(AddressReporting::Addresses, soon()).await.unwrap().allocations {
        let request = ReleaseRequest::new(one.ip).with_handle(one.handle.unwrap());
        requests.push(request.with_sequence_number(one.sequence_number));
    }
    assert_eq!(requests.len(), 70);
    // After the inspection has reported leftovers and before they are released, one of the addresses is released and
    // assigned again.
    let anew = requests[3].clone();
    let container = anew.handle.clone().unwrap().replace("net.", "");
    world.release("a", &container).await;
    let mut again = AssignRequest::new(attachment("a", &container), RequestedAddresses::these([anew.address]));
    again.v4_pools = vec!["main".into()];
    world.assign(&again).await.unwrap();
    let done = world.operator().reclaim(&requests, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.changed), (69, vec![anew.address]));
    world.check().await;
    assert_eq!(inspect(&world).await.findings, []);
}

/// calicoctl reports every address of a secondary network as unused, since secondary networks have no workload
/// endpoints.
#[tokio::test]
async fn reclaim_keeps_secondary_addresses_while_node_exists() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let mut bridged = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::any(1, 0));
    bridged.bridge = Some(Bridge::default());
    let live = world.assign(&bridged).await.unwrap()[0].ip;
    let leaked = world.one("a", "c2").await.unwrap();
    let requests = [live, leaked].map(ReleaseRequest::new);
    let done = world.operator().reclaim(&requests, soon()).await.unwrap();
    assert_eq!((done.released, done.changed), (vec![leaked], vec![live]));
    let node = ipam_core::model::keys::resource(ipam_core::model::keys::ResourceKind::Node, "a");
    kv::StoreExt::delete(&world.store, kv::Range::Key(node)).await.unwrap();
    let done = world.operator().reclaim(&requests, soon()).await.unwrap();
    assert_eq!((done.released, done.changed), (vec![live], vec![leaked]));
    world.check().await;
}

#[tokio::test]
async fn repair_removes_handle_only_when_empty_and_unchanged() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    world.one("a", "c0").await.unwrap();
    for id in ["x", "y"] {
        let key = format!("/calico/ipam/v2/handle/{id}");
        kv::StoreExt::put(&world.store, key.as_str(), r#"{"block":{"10.3.0.0/30":1},"deleted":false}"#).await.unwrap();
    }
    let leaked = inspect(&world).await.leaked_handles;
    assert_eq!(leaked.iter().map(|handle| handle.id.as_str()).collect::<Vec<_>>(), ["x", "y"]);
    let mut handles: Vec<_> =
        leaked.into_iter().map(|handle| HandleRevision { id: handle.id, revision: handle.revision }).collect();
    kv::StoreExt::put(&world.store, "/calico/ipam/v2/handle/y", r#"{"block":{"10.3.0.0/30":2}}"#).await.unwrap();
    handles.push(HandleRevision { id: "net.c0".into(), revision: kv::Revision::new(1) });
    assert_eq!(world.operator().reclaim_handles(&handles, soon()).await.unwrap(), ["x"]);
}

/// No running container may lose its address while random containers start and stop, and damage is made and repaired.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn repair_loses_no_address_while_containers_come_and_go() {
    const ROUNDS: usize = 40;
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/22").await;
    let mut tasks = Vec::new();
    for node in ["a", "b"] {
        let world = world.clone();
        tasks.push(tokio::spawn(async move {
            for number in 0..ROUNDS {
                world.one(node, &format!("{node}{number}")).await.unwrap();
                if number % 2 == 0 {
                    assert_eq!(world.release(node, &format!("{node}{number}")).await.len(), 1);
                }
            }
        }));
    }
    let mut mended = 0;
    for number in 0..ROUNDS {
        let stray = format!("/calico/ipam/v2/handle/stray{number}");
        kv::StoreExt::put(&world.store, stray.as_str(), r#"{"block":{"10.0.0.0/30":1}}"#).await.unwrap();
        let pending = format!("/calico/ipam/v2/host/c/ipv4/block/10.0.1.{}-30", number * 4);
        kv::StoreExt::put(&world.store, pending.as_str(), r#"{"state":"pending"}"#).await.unwrap();
        let found = inspect(&world).await;
        for finding in found.findings.iter().filter(|one| one.mendable) {
            let done = world.operator().mend(finding, found.revision, soon()).await.unwrap();
            mended += usize::from(done == ipam_operator::inspect::RepairResult::Done);
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let left = mend_all(&world).await;
    assert_eq!((left.findings, left.counts.held), (vec![], ROUNDS));
    assert!(mended > ROUNDS, "{mended}");
    world.check().await;
}

/// The page `docs/check-and-repair.md` must explain every finding code.
#[test]
fn finding_codes_are_all_in_book() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check-and-repair.md");
    let page = std::fs::read_to_string(path).unwrap();
    for code in Code::ALL {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{code}` | {}", code.meaning())));
        let row = row.unwrap_or_else(|| panic!("{code} is not told: {}", code.meaning()));
        assert!(row.contains(code.repair().unwrap_or("| - |")) && row.contains(code.advice()), "{row}");
    }
}
