//! Runs kv-local's engine tests on the engine that keeps rows in a file.

use std::process::ExitCode;

use outside::FileRows;

fn main() -> ExitCode {
    kv_local::testing::main(FileRows)
}
