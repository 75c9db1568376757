//! The program `torture`, built with the plugged example stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    torture::main(&plugged::drivers())
}
