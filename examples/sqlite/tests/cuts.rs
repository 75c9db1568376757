//! The store on SQLite in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use sqlite_store::Sqlite;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Sqlite, None)
}
