//! Tests that redb meets the requirements on an engine.

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    kv_local::testing::main(Redb)
}
