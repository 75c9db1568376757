//! The store on sled in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../crates/kv-local/tests/support/cuts.rs"]
mod cuts;

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    cuts::main(Sled, None)
}
