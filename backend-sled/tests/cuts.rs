//! Tests the sled store on a simulated disk that, at a power cut, loses all data that was not synced.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::ExitCode;

use backend_sled::Sled;
use testkit::cuts;

fn main() -> ExitCode {
    cuts::main(Sled, None)
}
