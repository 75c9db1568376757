//! The main program of the operator command `margay`.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&stores::drivers())
}
