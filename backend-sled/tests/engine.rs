//! Runs the tests that every engine must pass on sled.

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    kv_local::testing::main(Sled)
}
