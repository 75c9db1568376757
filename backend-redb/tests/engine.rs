//! Runs the engine tests of the crate kv-local on redb.

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    kv_local::testing::main(Redb)
}
