//! The store on redb in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use backend_redb::Redb;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Redb, None)
}
