//! The store on sled, judged by all cases.

use std::process::ExitCode;

use backend_sled::Sled;
use testkit::judged;

fn main() -> ExitCode {
    judged::main(Sled, &[])
}
