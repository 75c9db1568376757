//! Kills plugin processes with SIGKILL at random moments; their store is one of the example stores of
//! `examples/plugged`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/tested.rs"]
#[allow(dead_code, reason = "shared with the other test programs")]
mod tested;

use testkit::crash;
use testkit::lab::Engine;

const ROUNDS: u64 = 20;

#[test]
fn kills_leave_all_or_nothing() {
    tested::use_plugged();
    let (name, file) = tested::plugged_store();
    crash::rounds(Engine::new(name, file), ROUNDS);
}
