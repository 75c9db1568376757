//! Runs the engine tests of the crate kv-local on the engine [`outside::FileRows`].

use std::process::ExitCode;

use outside::FileRows;

fn main() -> ExitCode {
    kv_local::testing::main(FileRows)
}
