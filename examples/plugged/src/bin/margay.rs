//! The program `margay`, built with the plugged example stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&plugged::drivers())
}
