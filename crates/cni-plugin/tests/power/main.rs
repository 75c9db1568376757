//! Power cuts under the plugin: real processes on a disk that forgets what was not synced.
//!
//! A round mounts a disk ([`power::Disk`]), lets one to four callers run ADD and DEL there, and cuts the power: after
//! some operation of the disk, or when a caller has its answer. In every other round the callers have a daemon,
//! `margay serve`. Some calls are killed before that. The image is copied out: there the next ADD must work, `margay
//! ipam check` must find nothing, every acknowledged ADD must be there and no acknowledged DEL may be back. The next
//! round begins with what was left, so that cuts meet stores that recover from one.
//!
//! An answer is acknowledged if the caller saw the end of the process before the cut. The lock of the disk orders the
//! two.
//!
//! `MARGAY_POWER_SEED` and `MARGAY_POWER_ROUNDS` choose other cuts and more of them; `make torture MODE=power` sets
//! them. The program is the one that cargo built for the tests; `MARGAY_RELEASE_PLUGIN` names another one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]

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
/// A disk that lies must be found out within so many cuts.
const LIES: u64 = 10;
/// A test: its name and what it does on a store of this engine.
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

/// The cuts that it takes to find out that a disk lies. `None`: too many.
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

/// The rounds can fail: syncs do nothing.
fn lies(engine: Engine) {
    let syncs = Syncs::Ignored;
    let old = World::with_full_log(engine, syncs);
    assert!(cuts_until_found(engine, syncs, || old.clone(), None).is_some(), "an old store");
    assert!(cuts_until_found(engine, syncs, || World::empty(engine, syncs), None).is_some(), "a young store");
}

/// The rounds can fail: files are synced, and the folders that name them are not.
fn unsynced_folders(engine: Engine) {
    let syncs = Syncs::IgnoredForFolders;
    let found = cuts_until_found(engine, syncs, || World::empty(engine, syncs), Some(Folders::Strict));
    assert!(found.is_some());
}
