//! Runs the engine tests of the crate kv-local on sled.

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    kv_local::testing::main(Sled)
}
