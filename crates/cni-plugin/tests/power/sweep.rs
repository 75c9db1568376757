//! Kills a plugin call at each of its disk operations in turn, lets the next plugin call succeed, and then cuts the
//! power.
//!
//! The killed process leaves unsynced changes, which the next process sees although they are not durable. The next
//! process that opens the store must sync the killed process's unsynced changes before it relies on them.

use std::thread;
use std::time::Duration;

use ::power::{Cut, Disk, Folders, Syncs};
use serde_json::Value;

use crate::cuts::Tally;
use crate::lab::{Engine, embedded_conf};
use crate::process::Call;
use crate::world::{World, network};

/// Pause between two checks whether the plugin call has reached the disk operation at which it is killed.
const PAUSE: Duration = Duration::from_micros(500);
/// Upper bound for the number of disk operations of a plugin call.
const MOST: u64 = 2_000;
/// Number of ADDs on redb after which at least one commit has moved the journal to redb's file.
const COMMITS: u64 = 40;

/// Maximum number of disk operations at which the ADD is killed. If an ADD has more disk operations than the maximum
/// number of kills (as on sled), the kills are spread evenly over the operations.
const KILLS: u64 = 60;

/// Chooses how much unsynced data survives the power cut after an ADD is killed at a disk operation: almost none, or a
/// part.
fn cut(operation: u64) -> Cut {
    let folders = if operation % 4 == 3 { Folders::Prefix } else { Folders::Strict };
    Cut { seed: operation, folders }
}

/// Kills the ADD that creates a store, at each disk operation in turn.
pub(crate) fn while_it_is_made(engine: Engine) {
    let world = World::empty(engine, Syncs::Kept);
    let operations = (0..MOST).find(|operation| !is_killed_at(&world, *operation)).unwrap();
    println!("{engine:?}: killed at {operations} operations, which make a store and commit");
}

/// Kills an ADD on an existing store, at each disk operation in turn. On redb, the test kills the ADD that finds the
/// journal full, because that ADD does the most disk operations.
pub(crate) fn in_a_commit(engine: Engine) {
    let mut world = World::empty(engine, Syncs::Kept);
    let mut before = (0, world.clone());
    for _ in 0..COMMITS {
        let was = world.clone();
        let operations = add(&mut world);
        if world.ledger.acknowledged() > 1 && operations > before.0 {
            before = (operations, was);
        }
    }
    let world = before.1;
    let step = before.0.div_ceil(KILLS);
    let kills = (0..before.0 + step).step_by(usize::try_from(step).unwrap());
    let kills = kills.filter(|operation| is_killed_at(&world, *operation)).count();
    println!("{engine:?}: killed {kills} times in an ADD of {} operations", before.0);
    assert!(kills > 5, "it was over before it could be killed");
}

/// Runs an ADD without a kill, and returns how many disk operations the ADD has.
fn add(world: &mut World) -> u64 {
    let (disk, container) = (Disk::new(world.image.clone(), Syncs::Kept), world.ledger.begin_add());
    on(&disk, world.engine, |conf| {
        let reported = Call::new("ADD", &container, conf).ok().addresses().into_iter().collect();
        world.ledger.end(&container, reported).unwrap();
    });
    disk.cut();
    world.image = disk.after_cut(cut(0));
    disk.operations()
}

/// Kills an ADD after the given number of disk operations, runs another ADD to its end, cuts the power and checks the
/// store. Returns false if the first ADD ended before the kill.
fn is_killed_at(world: &World, operation: u64) -> bool {
    let (mut world, disk) = (world.clone(), Disk::new(world.image.clone(), Syncs::Kept));
    let killed = on(&disk, world.engine, |conf| {
        let call = Call::new("ADD", &world.ledger.begin_add(), conf);
        disk.cut_after(operation);
        let mut child = call.start(call.command());
        while !disk.is_cut() && child.try_wait().unwrap().is_none() {
            thread::sleep(PAUSE);
        }
        let killed = disk.is_cut();
        child.kill().unwrap();
        child.wait().unwrap();
        disk.undo_cut();
        let container = world.ledger.begin_add();
        let reported = Call::new("ADD", &container, conf).ok().addresses().into_iter().collect();
        world.ledger.end(&container, reported).unwrap();
        killed
    });
    disk.cut();
    world.image = disk.after_cut(cut(operation));
    if let Err(what) = world.scan(&mut Tally::new()) {
        panic!("{:?}, killed after {operation} operations: {what}\nwhat was left: {}", world.engine, world.keep());
    }
    killed
}

/// Mounts the disk and runs `work` with the configuration of a network whose store is on the mounted disk.
fn on<T>(disk: &Disk, engine: Engine, work: impl FnOnce(&Value) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    let _mounted = disk.mount(folder.path()).unwrap();
    work(&embedded_conf(engine, &folder.path().join("store"), "bridge", network()))
}
