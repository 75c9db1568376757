//! The store on sled in its folder, on a disk that forgets what was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use backend_sled::Sled;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Sled, None)
}
