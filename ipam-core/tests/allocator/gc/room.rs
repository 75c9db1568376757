//! Tests assignments in a full pool, which free leftover addresses of earlier boots.

use ipam_core::Error;
use ipam_core::assign::AssignedAddress;
use ipam_core::model::IpamConfig;

use super::*;

#[tokio::test]
async fn room_comes_from_leftovers_in_same_commit() {
    let world = one_machine().await;
    let mut old = Vec::new();
    for number in 0..8 {
        old.push(give(&world, &format!("old{number}"), "boot0001", number).await);
    }
    let machine = Machine::with(&old[..2]);
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(machine.clone());
    let before = revision(&world).await;
    let new = request("new", THIS_BOOT, 100);
    with_liveness.ipam.would_assign(&new, soon()).await.unwrap();
    let refused = world.ipam.would_assign(&new, soon()).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted { .. }), "{refused}");
    assert_eq!((revision(&world).await, machine.asked.load(SeqCst)), (before, 0), "a question changes nothing");
    let given = give(&with_liveness, "new", THIS_BOOT, 100).await;
    assert_eq!(revision(&world).await, before.next(), "one commit");
    assert_eq!(machine.asked.load(SeqCst), 1);
    assert!(old[2..].contains(&given));
    let left: BTreeSet<IpAddr> = held(&world).await.into_keys().collect();
    assert_eq!(left, [old[0], old[1], given].into(), "a live address was freed");
    world.check().await;
    // While the pool has free addresses, an assignment does not query the liveness source.
    give(&with_liveness, "another", THIS_BOOT, 100).await;
    assert_eq!(machine.asked.load(SeqCst), 1);
}

#[tokio::test]
async fn room_fails_and_writes_nothing_without_leftovers_or_scan() {
    let world = one_machine().await;
    let mut given = Vec::new();
    for number in 0..8 {
        given.push(give(&world, &format!("c{number}"), THIS_BOOT, 0).await);
    }
    let machine = Machine::with(&[]);
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(machine.clone());
    let before = revision(&world).await;
    let refused = with_liveness.assign(&request("new", THIS_BOOT, 50)).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted { .. }), "{refused}");
    assert_eq!(machine.asked.load(SeqCst), 0, "no address is a leftover, so no scan runs");

    // After a reboot, every address of a full pool may be a leftover of a container that was not restarted. No address
    // is freed if the scan is incomplete or if all addresses are live.
    for machine in [Machine::blind(), Machine::with(&given)] {
        with_liveness.ipam = world.ipam.clone().with_liveness(machine.clone());
        let refused = with_liveness.assign(&request("new", "boot0003", 50)).await.unwrap_err();
        assert!(matches!(refused, Error::Exhausted { .. }), "{refused}");
        assert_eq!(machine.asked.load(SeqCst), 1);
    }
    let mut without_boot = request("new", THIS_BOOT, 50);
    without_boot.attachment.boot = None;
    assert!(with_liveness.assign(&without_boot).await.is_err());
    assert_eq!(revision(&world).await, before);
    world.check().await;
}

#[tokio::test]
async fn room_takes_whole_attachments_and_oldest_first() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/27".parse().unwrap()).with_block_size(27)).await;
    world.add_pool("v6", "fd00::/120").await;
    // The loop assigns the addresses with ever earlier dates: the first address gets the latest date.
    for number in (0..32).rev() {
        let mut both = request(&format!("c{number}"), "boot0001", number);
        both.wanted = RequestedAddresses::any(1, 1);
        world.assign(&both).await.unwrap();
    }
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&[]));
    let before = revision(&world).await;
    let mut both = request("new", THIS_BOOT, 100);
    both.wanted = RequestedAddresses::any(1, 1);
    let assigned: Vec<AssignedAddress> = with_liveness.assign(&both).await.unwrap();
    assert_eq!((assigned.len(), revision(&world).await), (2, before.next()));
    let left = held(&world).await;
    let containers: BTreeSet<&str> = left.values().map(String::as_str).collect();
    let expected: BTreeSet<String> = (16..32).map(|number| format!("c{number}")).chain(["new".to_owned()]).collect();
    assert_eq!(containers, expected.iter().map(String::as_str).collect());
    assert_eq!(left.len(), 34, "both families of each");
    world.check().await;
}

/// If an attachment's address in one family is live, its address in the other family is not freed either.
#[tokio::test]
async fn room_keeps_attachment_live_in_other_family() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/30").await;
    world.add_pool("v6", "fd00::/120").await;
    let mut live = Vec::new();
    for number in 0..4 {
        let mut both = request(&format!("c{number}"), "boot0001", number);
        both.wanted = RequestedAddresses::any(1, 1);
        live.push(world.assign(&both).await.unwrap()[1].ip);
    }
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&live));
    assert!(with_liveness.assign(&request("new", THIS_BOOT, 100)).await.is_err());
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&live[1..]));
    give(&with_liveness, "new", THIS_BOOT, 100).await;
    assert_eq!(held(&world).await.len(), 7);
    world.check().await;
}

/// The caller's own address from an earlier boot is not freed as a leftover.
#[tokio::test]
async fn room_never_comes_from_caller_itself() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/30").await;
    let own = give(&world, "own", "boot0001", -10).await;
    let others = [give(&world, "b", "boot0001", 0).await, give(&world, "c", "boot0001", 1).await];
    give(&world, "d", "boot0001", 2).await;
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&[]));
    let mut two = request("own", THIS_BOOT, 100);
    two.wanted = RequestedAddresses::any(2, 0);
    let assigned = with_liveness.assign(&two).await.unwrap();
    assert_eq!(assigned[0].ip, own);
    assert!(others.contains(&assigned[1].ip), "{assigned:?}");
    assert_eq!(held(&world).await.len(), 2);
    world.check().await;
}

#[tokio::test]
async fn room_comes_later_when_leftovers_cool_down() {
    let world = one_machine().await;
    for number in 0..8 {
        give(&world, &format!("old{number}"), "boot0001", number).await;
    }
    let key = keys::config();
    let config = IpamConfig::decode(&key, br#"{"auto_allocate_blocks":true,"ipCooldownSeconds":60}"#).unwrap();
    world.configure(config).await;
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&[]));
    assert!(with_liveness.assign(&request("new", THIS_BOOT, 100)).await.is_err());
    world.check().await;
    world.pass(100);
    give(&with_liveness, "new", THIS_BOOT, 200).await;
    world.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn room_gives_several_at_once_one_address_each() {
    let world = one_machine().await;
    for number in 0..8 {
        give(&world, &format!("old{number}"), "boot0001", number).await;
    }
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&[]));
    let tasks: Vec<_> = (0..8)
        .map(|number| {
            let world = with_liveness.clone();
            tokio::spawn(async move { give(&world, &format!("new{number}"), THIS_BOOT, 100).await })
        })
        .collect();
    let mut given = BTreeSet::new();
    for task in tasks {
        assert!(given.insert(task.await.unwrap()), "an address was given twice");
    }
    assert_eq!(held(&world).await.into_keys().collect::<BTreeSet<_>>(), given);
    world.check().await;
}

/// A request that names a leftover address does not get the address while other addresses are free.
#[tokio::test]
async fn room_gives_no_leftover_address_to_other_that_wants_it() {
    let world = one_machine().await;
    let old = give(&world, "old", "boot0001", 0).await;
    let mut with_liveness = world.clone();
    with_liveness.ipam = world.ipam.clone().with_liveness(Machine::with(&[]));
    let mut wanting = request("new", THIS_BOOT, 100);
    wanting.wanted = RequestedAddresses::these([old]);
    assert!(matches!(with_liveness.assign(&wanting).await, Err(Error::AlreadyAssigned(_))));
    // After a restart, the container that held the leftover address gets the same address again.
    let mut again = request("old", THIS_BOOT, 100);
    again.wanted = RequestedAddresses::these([old]);
    assert_eq!(with_liveness.assign(&again).await.unwrap()[0].ip, old);
    let allocations = world.ipam.holdings("a", soon()).await.unwrap().allocations;
    assert_eq!(allocations[0].boot.as_deref(), Some(THIS_BOOT));
    world.check().await;
}
