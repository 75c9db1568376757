//! The store on redb, judged by all cases.

use std::process::ExitCode;

use backend_redb::Redb;
use testkit::judged;

fn main() -> ExitCode {
    judged::main(Redb, &[])
}
