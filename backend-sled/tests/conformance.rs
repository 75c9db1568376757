//! The store on sled, judged by all cases.

#[path = "../../crates/kv-local/tests/support/judged.rs"]
mod judged;

use std::process::ExitCode;

use backend_sled::Sled;

fn main() -> ExitCode {
    judged::main(Sled, &[])
}
