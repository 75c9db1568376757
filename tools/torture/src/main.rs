//! The program `torture` tests the allocator on a store, with faults and killed processes, and reports violations.

use std::process::ExitCode;

fn main() -> ExitCode {
    torture::main(&stores::drivers())
}
