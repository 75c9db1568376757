//! The store on redb, judged by all cases.

#[path = "../../crates/kv-local/tests/support/judged.rs"]
mod judged;

use std::process::ExitCode;

use backend_redb::Redb;

fn main() -> ExitCode {
    judged::main(Redb, &[])
}
