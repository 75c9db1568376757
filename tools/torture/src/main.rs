//! `torture`: tortures the allocator on a store, and says what it found.

use std::process::ExitCode;

fn main() -> ExitCode {
    torture::main(&stores::drivers())
}
