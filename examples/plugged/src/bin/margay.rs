//! The command `margay`, built with the plugged stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&plugged::drivers())
}
