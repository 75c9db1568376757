//! Runs the SQLite store on a simulated disk that, at a power cut, loses unsynced data.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use sqlite_store::Sqlite;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Sqlite, None)
}
