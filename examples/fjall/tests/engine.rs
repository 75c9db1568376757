//! Runs kv-local's engine tests on fjall.

use std::process::ExitCode;

use fjall_store::Fjall;

fn main() -> ExitCode {
    kv_local::testing::main(Fjall)
}
