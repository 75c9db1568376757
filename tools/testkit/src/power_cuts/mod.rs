//! Cuts the power of a simulated disk while the plugin runs, in rounds: [`callers`] run ADDs and DELs on the disk until
//! its power is cut. After the power cut, [`world`] compares the remaining disk image with the [`ledger`].

pub mod callers;
pub mod ledger;
pub mod served;
pub mod world;

use std::collections::BTreeMap;

use power::Syncs;

use crate::lab::Engine;
use crate::random::{Random, setting};
use world::{Plan, World};

pub const SEED: u64 = 20_261_123;
/// The number of rounds in a cycle of the test. The last two rounds of a cycle start with a new, empty disk.
const KINDS: u64 = 5;
/// Number of rounds between two progress messages of a long run.
const PROGRESS: u64 = 250;

/// The number of events of each kind, by the kind's name.
pub type Tally = BTreeMap<String, u64>;

pub fn count(tally: &mut Tally, what: impl Into<String>) {
    *tally.entry(what.into()).or_default() += 1;
}

/// Cuts the power once per round: in some rounds on a store with a full history, in others on a new store. Runs
/// `MARGAY_POWER_ROUNDS` rounds, or `usual` rounds if this variable is not set. If at least `usual` rounds are run,
/// every kind of event must happen at least once.
pub fn rounds(engine: Engine, usual: u64) {
    let (seed, rounds) = (setting("MARGAY_POWER_SEED", SEED), setting("MARGAY_POWER_ROUNDS", usual));
    println!("{engine:?}: MARGAY_POWER_SEED={seed} MARGAY_POWER_ROUNDS={rounds}");
    let (mut old, mut young) = (World::with_full_log(engine, Syncs::Kept), World::empty(engine, Syncs::Kept));
    let mut tally = Tally::new();
    for round in 0..rounds {
        if round > 0 && round % PROGRESS == 0 {
            println!("{engine:?}: {round} cuts so far");
        }
        let mut random = Random::new(seed, round);
        if round % KINDS == 3 {
            young = World::empty(engine, Syncs::Kept);
        }
        let world = if round % KINDS < 3 { &mut old } else { &mut young };
        let plan = Plan::draw(&mut random, world);
        if let Err(what) = world.round(&plan, &mut random, &mut tally) {
            panic!("{engine:?}, seed {seed}, round {round}, {plan:?}: {what}\nwhat was left: {}", world.keep());
        }
    }
    println!("{engine:?}: {rounds} cuts");
    for (what, count) in &tally {
        println!("{count:>8}  {what}");
    }
    // A run with fewer rounds than the parameter `usual` may miss some kinds of events.
    if rounds >= usual {
        let rows = &format!("not synced: /store/{}", engine.file);
        for what in [rows, "calls acknowledged", "calls answered by the daemon", "cut while there was work"] {
            assert!(tally.get(what).is_some_and(|count| *count > 0), "no {what} in {rounds} rounds");
        }
    }
}
