//! Runs the SQLite store on a disk that forgets unsynced data.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use sqlite_store::Sqlite;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Sqlite, None)
}
