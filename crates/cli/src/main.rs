//! The main program of the command `margay`.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&stores::drivers())
}
