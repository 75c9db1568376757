//! The command `margay`.

use std::io::{stderr, stdout};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut out = stdout().lock();
    let mut err = stderr();
    ExitCode::from(cli::run(std::env::args_os(), &datastore::process_environment, &mut out, &mut err))
}
