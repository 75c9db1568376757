//! The process of a call: its arguments, its streams, its exit status.

use std::io::{self, Write};
use std::process::ExitCode;

use agent::Served;
use datastore::Drivers;

use crate::about::answer_option;
use crate::invocation::{Invocation, Kind};
use crate::outcome::Outcome;
use crate::panics::install_hook;
use crate::run::run;
use crate::wired::{self, remover};

/// The whole program, made with these stores: both plugins. The name by which it is called decides.
pub fn main(drivers: Drivers) -> ExitCode {
    install_hook();
    let mut arguments = std::env::args_os();
    let outcome = match Kind::from_argument(arguments.next().as_deref()) {
        Kind::Remover => return ExitCode::from(remover::run(arguments)),
        Kind::Main => {
            let arguments: Vec<_> = arguments.collect();
            wired::run(&Invocation::of_this_process(drivers), &arguments, &mut io::stdin().lock())
        }
        Kind::Ipam => answer_option(arguments.next().as_deref())
            .unwrap_or_else(|| run(&Invocation::of_this_process(drivers), &mut io::stdin().lock(), &Served::default())),
    };
    match print(&outcome) {
        Ok(()) => ExitCode::from(outcome.exit),
        // Only the exit status can report this. The addresses that ADD assigned stay assigned until the runtime's DEL.
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(outcome: &Outcome) -> io::Result<()> {
    io::stderr().lock().write_all(outcome.stderr.as_bytes())?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(outcome.stdout.as_bytes())?;
    stdout.flush()
}
