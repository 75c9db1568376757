//! SIGKILL at random moments in calls of the plugin, on a plugged store.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]
#![allow(dead_code, reason = "the modules are the plugin's own tests' as well, which use more of them")]

#[path = "../../../../crates/cni-plugin/tests/system/books.rs"]
mod books;
#[path = "../../../../crates/cni-plugin/tests/system/crash.rs"]
mod crash;
#[path = "../../../../crates/cni-plugin/tests/system/lab.rs"]
mod lab;
#[path = "../../../../crates/cni-plugin/tests/system/life.rs"]
mod life;
#[path = "../../../../crates/cni-plugin/tests/system/process.rs"]
mod process;
#[path = "../../../../crates/cni-plugin/tests/system/random.rs"]
mod random;
#[path = "../support/tested.rs"]
mod tested;
#[path = "../../../../crates/cni-plugin/tests/system/victim.rs"]
mod victim;

use lab::Engine;

const ROUNDS: u64 = 20;

#[test]
fn whoever_is_killed_leaves_all_or_nothing() {
    let (name, file) = tested::plugged_store();
    crash::rounds(Engine::new(name, file), ROUNDS);
}
