//! Tests the plugin and the daemon with one of the example stores of `examples/plugged`, on a disk whose power is cut.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/tested.rs"]
#[allow(dead_code, reason = "shared with the other test programs")]
mod tested;

use std::process::ExitCode;

use testkit::lab::Engine;
use testkit::power_cuts::rounds;

const ROUNDS: u64 = 20;

fn main() -> ExitCode {
    tested::use_plugged();
    let (name, file) = tested::plugged_store();
    let rounds = move || rounds(Engine::new(name, file), ROUNDS);
    power::main(vec![("power_cuts_lose_nothing".to_owned(), Box::new(rounds))])
}
