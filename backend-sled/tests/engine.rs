//! Tests that sled meets the requirements on an engine.

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    kv_local::testing::main(Sled)
}
