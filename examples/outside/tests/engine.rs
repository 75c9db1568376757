//! Tests the duties of an engine on the rows in a file.

use std::process::ExitCode;

use outside::FileRows;

fn main() -> ExitCode {
    kv_local::testing::main(FileRows)
}
