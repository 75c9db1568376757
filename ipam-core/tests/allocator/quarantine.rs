//! Tests the quarantine of addresses that a device on the wire uses: one commit releases and reserves the address.

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::quarantine::{QUARANTINE, Quarantine, quarantine_of};
use kv::{Range, StoreExt};

use crate::concurrent::{every_revision_is_consistent, faulty};
use crate::world::{World, attachment, held, soon};

const REASON: &str = "02:00:00:00:00:01 answered on eth1";

async fn quarantine(world: &World) -> Quarantine {
    quarantine_of(&world.ipam.inventory(soon()).await.unwrap().reservations)
}

async fn revision(world: &World) -> kv::Revision {
    world.store.list(Range::All).await.unwrap().revision
}

#[tokio::test]
async fn quarantine_releases_and_reserves_at_once() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.add_pool("v6", "fd00::/125").await;
    let mine = attachment("a", "c1");
    let both = AssignRequest::new(mine.clone(), RequestedAddresses::any(1, 1));
    let first = world.assign(&both).await.unwrap();
    let before = revision(&world).await;
    let found = [(first[0].ip, REASON.to_owned())];
    assert_eq!(world.ipam.quarantine(&mine, &found, soon()).await.unwrap(), [first[0].ip]);
    assert_eq!(revision(&world).await, before.next(), "one commit");
    world.check().await;
    assert_eq!(held(&world.ipam, &mine).await, [first[1].ip]);
    let noted = quarantine(&world).await;
    assert_eq!(noted.keys().collect::<Vec<_>>(), [&first[0].ip]);
    assert_eq!((noted[&first[0].ip].reason.as_str(), noted[&first[0].ip].node.as_str()), (REASON, "a"));

    // Quarantining an address twice changes nothing. Quarantining an address that a different attachment holds changes
    // nothing.
    assert!(world.ipam.quarantine(&mine, &found, soon()).await.unwrap().is_empty());
    assert!(
        world
            .ipam
            .quarantine(&attachment("a", "c2"), &[(first[1].ip, REASON.into())], soon())
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(revision(&world).await, before.next());

    let again = world.assign(&both).await.unwrap();
    assert_ne!(again[0].ip, first[0].ip);
    assert_eq!(again[1].ip, first[1].ip);
    for number in 0..6 {
        world.one("b", &format!("d{number}")).await.unwrap();
    }
    world.one("b", "one-too-many").await.unwrap_err();
    let explained = world.ipam.explain("a", None, &[], None, soon()).await.unwrap();
    assert_eq!(explained.pools[0].stock.quarantined, 1);
    assert_eq!(world.ipam.census(soon()).await.unwrap().quarantined, noted);
    world.check().await;
}

#[tokio::test]
async fn quarantine_lets_full_pool_serve_again_after_day() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    let mine = attachment("a", "c1");
    for _ in 0..4 {
        let ip = world.one("a", "c1").await.unwrap();
        world.ipam.quarantine(&mine, &[(ip, REASON.into())], soon()).await.unwrap();
    }
    assert!(world.one("a", "c1").await.unwrap_err().is_exhaustion());
    world.pass(24 * 3600 + 1);
    world.one("a", "c1").await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn quarantine_drops_old_entries_with_next_one() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let mine = attachment("a", "c1");
    let mut addresses = Vec::new();
    for hours in [0, 23, 2] {
        world.pass(hours * 3600);
        let ip = world.one("a", "c1").await.unwrap();
        world.ipam.quarantine(&mine, &[(ip, REASON.into())], soon()).await.unwrap();
        addresses.push(ip);
    }
    addresses.remove(0);
    addresses.sort_unstable();
    assert_eq!(quarantine(&world).await.into_keys().collect::<Vec<_>>(), addresses);
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantine_loses_nothing_with_many_at_once() {
    let quiet = World::new().await;
    quiet.add_pool("v4", "10.0.0.0/25").await;
    let start = quiet.store.list(Range::All).await.unwrap();
    let world = faulty(&quiet);
    let tasks = (0..12).map(|caller| {
        let world = world.clone();
        tokio::spawn(async move {
            let (node, container) = (["a", "b", "c"][caller % 3], format!("c{caller}"));
            let mut gone = Vec::new();
            for _ in 0..4 {
                let ip = world.one(node, &container).await.unwrap();
                let found = [(ip, REASON.to_owned())];
                assert_eq!(world.ipam.quarantine(&attachment(node, &container), &found, soon()).await.unwrap(), [ip]);
                gone.push(ip);
            }
            gone
        })
    });
    let mut gone = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        gone.extend(task.await.unwrap());
    }
    gone.sort_unstable();
    assert_eq!((gone.len(), quarantine(&quiet).await.into_keys().collect::<Vec<_>>()), (48, gone));
    let end = every_revision_is_consistent(&quiet, start).await;
    assert!(end.iter().any(|kv| kv.key.to_string().ends_with(QUARANTINE)));
}
