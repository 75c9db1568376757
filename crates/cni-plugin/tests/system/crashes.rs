//! Tests in which plugin calls are killed (SIGKILL) at random moments, on each engine. Other tests damage a store or
//! its queue on purpose, to check that the tests with kills would notice the damage.

use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;

use crate::crash::{SEED, World, rounds};
use crate::lab::Engine;
use crate::random::Random;
use crate::victim::head;

const ROUNDS: u64 = 40;

#[test]
fn kills_leave_all_or_nothing_on_sled() {
    rounds(Engine::SLED, ROUNDS);
}

#[test]
fn kills_leave_all_or_nothing_on_redb() {
    rounds(Engine::REDB, ROUNDS);
}

/// Tests the kill tests themselves: they must notice an acknowledged attachment that lost some or all addresses, or
/// whose addresses another container holds.
#[test]
fn kills_check_notices_lost_address() {
    let mut world = World::new(Engine::REDB);
    world.add();
    world.add();
    world.check_all().unwrap();
    let (container, addresses) = world.held.first_key_value().map(|(name, held)| (name.clone(), held.clone())).unwrap();
    let half = addresses.first().copied().unwrap();
    world.held.remove(&container);
    world.held.insert("another".into(), addresses.clone());
    assert!(world.check_all().unwrap_err().contains("acknowledged is"), "told to one, recorded for another");
    world.held.remove("another");
    let other = [half].into();
    let said = world.check(&[(container.clone(), Some(other))].into()).unwrap_err();
    assert!(said.contains("with a part of it"), "{said}");
    world.held.insert(container.clone(), addresses);
    world.call("DEL", &container).ok();
    assert!(world.check_all().unwrap_err().contains("acknowledged is"), "told, and not recorded");
}

/// Tests the kill tests themselves: they must fail if a call gets the lock although a stopped process still holds it
/// (after the queue file was removed).
#[test]
fn kills_check_notices_caller_that_passes_holder() {
    let (mut world, life) = World::with_full_log(Engine::REDB);
    let (_, holder, _) = world.holder(&life, &mut Random::new(SEED, 0)).unwrap();
    let before = head(&world.lab.store);
    let mut waiters = [("c".to_owned(), world.start("ADD", "c"))];
    world.check_waiters_outside(&mut waiters, &before).unwrap();
    std::fs::remove_file(world.lab.store.join("queue")).unwrap();
    let mut passed = [("d".to_owned(), world.start("ADD", "d"))];
    let until = Instant::now() + patient(Duration::from_secs(20));
    while world.check_waiters_outside(&mut passed, &before).is_ok() {
        assert!(Instant::now() < until, "the check does not notice that d passes the holder");
        thread::sleep(Duration::from_millis(5));
    }
    drop(holder);
}
