//! The command `margay` with one more store.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&outside::drivers())
}
