//! Runs all conformance cases on the sled store.

use std::process::ExitCode;

use backend_sled::Sled;
use testkit::judged;

fn main() -> ExitCode {
    judged::main(Sled, &[])
}
