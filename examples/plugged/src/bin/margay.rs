//! The command `margay` with the plugged stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&plugged::drivers())
}
