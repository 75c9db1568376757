//! Power cuts during calls of the plugin: real processes on a disk that loses everything not synced.
//!
//! A round mounts a disk ([`power::Disk`]), lets one to four callers run ADD and DEL on it, and cuts the power, either
//! after a certain disk operation or when a caller has its answer. In every second round the callers have a daemon,
//! `margay serve`. Some calls are killed before the cut. The disk's image is copied: on the copy the next ADD must
//! work, `margay ipam check` must find nothing, the address of every acknowledged ADD must be held, and no address of
//! an acknowledged DEL may be. The next round starts with the copy, so cuts also hit stores that are recovering.
//!
//! An answer is acknowledged if the caller saw the process end before the cut. The disk's lock orders the two.
//!
//! `MARGAY_POWER_SEED` and `MARGAY_POWER_ROUNDS` choose other cuts and their number; `make torture MODE=power` sets
//! them. The tests run the program that cargo has built; `MARGAY_RELEASE_PLUGIN` names another program.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "prints seeds and measurements of tests")]

mod api;
mod sweep;

use std::process::ExitCode;

use ::power::{Folders, Syncs};
use testkit::lab::{self, ENGINES, Engine};
use testkit::power_cuts::world::{self, Plan, World};
use testkit::power_cuts::{self as cuts, SEED, Tally, served};
use testkit::process;
use testkit::random::{self, Random};

const ROUNDS: u64 = 60;
/// Maximum number of cuts until a lying disk must be detected.
const LIES: u64 = 10;
/// A test: its name, and its function for a store of an engine.
type Test = (&'static str, fn(Engine));

const TESTS: [Test; 6] = [
    ("power_cuts_lose_nothing", |engine| cuts::rounds(engine, ROUNDS)),
    ("power_cuts_lose_nothing_by_api", api::rounds),
    ("power_cut_after_kill_while_store_is_made", sweep::while_it_is_made),
    ("power_cut_after_kill_in_commit", sweep::in_a_commit),
    ("lying_disk_is_found_out", lies),
    ("unsynced_folder_is_found_out", unsynced_folders),
];

fn main() -> ExitCode {
    let test = |(name, test): Test, engine: Engine| -> ::power::Test {
        (format!("{name}_on_{}", engine.name()), Box::new(move || test(engine)))
    };
    ::power::main(TESTS.into_iter().flat_map(|named| ENGINES.map(|engine| test(named, engine))).collect())
}

/// Returns the number of cuts until a lying disk is detected; `None` if it is not.
fn cuts_until_found(engine: Engine, syncs: Syncs, worlds: impl Fn() -> World, folders: Option<Folders>) -> Option<u64> {
    let (mut world, mut tally) = (worlds(), Tally::new());
    for round in 0..LIES {
        let mut random = Random::new(SEED, round);
        let mut plan = Plan::draw(&mut random, &world);
        plan.folders = folders.unwrap_or(plan.folders);
        if let Err(what) = world.round(&plan, &mut random, &mut tally) {
            println!("{engine:?}, {syncs:?}: found out by cut {}: {what}", round + 1);
            return Some(round + 1);
        }
        if round % 2 == 1 {
            world = worlds();
        }
    }
    None
}

/// Tests that the rounds detect a disk that ignores syncs.
fn lies(engine: Engine) {
    let syncs = Syncs::Ignored;
    let old = World::with_full_log(engine, syncs);
    assert!(cuts_until_found(engine, syncs, || old.clone(), None).is_some(), "an old store");
    assert!(cuts_until_found(engine, syncs, || World::empty(engine, syncs), None).is_some(), "a young store");
}

/// Tests that the rounds detect a disk that syncs files, but not the folders that name them.
fn unsynced_folders(engine: Engine) {
    let syncs = Syncs::IgnoredForFolders;
    let found = cuts_until_found(engine, syncs, || World::empty(engine, syncs), Some(Folders::Strict));
    assert!(found.is_some());
}
