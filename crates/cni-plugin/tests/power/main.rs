//! Tests of power cuts during plugin calls: real processes on a disk that loses all unsynced data at a power cut.
//!
//! A test round mounts a disk ([`power::Disk`]) and lets one to four callers run ADD and DEL on that disk. The power is
//! cut either after a certain disk operation, or when a caller has its answer. In every second round the callers use a
//! Margay daemon (`margay serve`). Some plugin calls are killed before the power cut. After the power cut, the disk's
//! image is copied. On this copy of the disk's image, the next ADD must work and `margay ipam check` must report no
//! problem. After the power cut, the address of every acknowledged ADD must still be assigned, and the address of every
//! acknowledged DEL must be free. The next test round continues on the copy of the disk's image, so power cuts also
//! happen while a store recovers from an earlier power cut.
//!
//! An ADD or DEL is acknowledged if the caller saw the plugin's process end before the power cut. The test disk's mutex
//! orders the end of the plugin's process and the power cut.
//!
//! `MARGAY_POWER_SEED` sets the random seed and `MARGAY_POWER_ROUNDS` the number of rounds; `make torture MODE=power`
//! sets both variables. The tests run the plugin binary that cargo has built, or the binary that
//! `MARGAY_RELEASE_PLUGIN` names.
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
/// Maximum number of power cuts after which a test must have detected a disk that ignores syncs.
const LIES: u64 = 10;
/// The name of a test, and the test's function, which takes the engine of the store.
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

/// Returns after how many power cuts the test's rounds detect a disk that ignores syncs, or `None` if they never detect
/// such a disk.
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

/// Tests that the rounds with power cuts detect a disk that ignores syncs.
fn lies(engine: Engine) {
    let syncs = Syncs::Ignored;
    let old = World::with_full_log(engine, syncs);
    assert!(cuts_until_found(engine, syncs, || old.clone(), None).is_some(), "an old store");
    assert!(cuts_until_found(engine, syncs, || World::empty(engine, syncs), None).is_some(), "a young store");
}

/// Tests that the rounds with power cuts detect a disk that syncs files but not folders.
fn unsynced_folders(engine: Engine) {
    let syncs = Syncs::IgnoredForFolders;
    let found = cuts_until_found(engine, syncs, || World::empty(engine, syncs), Some(Folders::Strict));
    assert!(found.is_some());
}
