//! Runs the engine tests of the crate kv-local on fjall.

use std::process::ExitCode;

use fjall_store::Fjall;

fn main() -> ExitCode {
    kv_local::testing::main(Fjall)
}
