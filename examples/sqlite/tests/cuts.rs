//! The store on SQLite in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../../crates/kv-local/tests/support/cuts.rs"]
mod cuts;

use std::process::ExitCode;

use sqlite_store::Sqlite;

fn main() -> ExitCode {
    cuts::main(Sqlite, None)
}
