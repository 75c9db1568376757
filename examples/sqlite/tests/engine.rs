//! Runs the engine tests of the crate kv-local on SQLite.

use std::process::ExitCode;

use sqlite_store::Sqlite;

fn main() -> ExitCode {
    kv_local::testing::main(Sqlite)
}
