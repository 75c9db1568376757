//! Power cuts under the plugin and the daemon, on a plugged store.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]
#![allow(dead_code, reason = "the modules are the plugin's own tests' as well, which use more of them")]

#[path = "../../../../crates/cni-plugin/tests/system/books.rs"]
mod books;
#[path = "../../../../crates/cni-plugin/tests/power/callers.rs"]
mod callers;
#[path = "../../../../crates/cni-plugin/tests/power/cuts.rs"]
mod cuts;
#[path = "../../../../crates/cni-plugin/tests/system/lab.rs"]
mod lab;
#[path = "../../../../crates/cni-plugin/tests/power/ledger.rs"]
mod ledger;
#[path = "../../../../crates/cni-plugin/tests/system/process.rs"]
mod process;
#[path = "../../../../crates/cni-plugin/tests/system/random.rs"]
mod random;
#[path = "../../../../crates/cni-plugin/tests/power/served.rs"]
mod served;
#[path = "../support/tested.rs"]
mod tested;
#[path = "../../../../crates/cni-plugin/tests/power/world.rs"]
mod world;

use std::process::ExitCode;

use lab::Engine;

const ROUNDS: u64 = 20;

fn main() -> ExitCode {
    let (name, file) = tested::plugged_store();
    let rounds = move || cuts::rounds(Engine::new(name, file), ROUNDS);
    power::main(vec![("power_cuts_lose_nothing".to_owned(), Box::new(rounds))])
}
