//! Runs the tests that every engine must pass on redb.

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    kv_local::testing::main(Redb)
}
