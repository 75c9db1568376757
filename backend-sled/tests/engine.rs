//! Tests the requirements on an engine with sled.

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    kv_local::testing::main(Sled)
}
