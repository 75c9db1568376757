//! Runs all conformance cases on the redb store.

use std::process::ExitCode;

use backend_redb::Redb;
use testkit::judged;

fn main() -> ExitCode {
    judged::main(Redb, &[])
}
