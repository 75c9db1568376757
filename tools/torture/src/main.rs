//! `torture`: tests the allocator on a store with faults and kills, and reports violations.

use std::process::ExitCode;

fn main() -> ExitCode {
    torture::main(&stores::drivers())
}
