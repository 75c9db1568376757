//! Tests the requirements on an engine with redb.

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    kv_local::testing::main(Redb)
}
