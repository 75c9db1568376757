//! Both plugins: `margay-cni`, the main one, which also runs under the name `calico`; and `margay-ipam`, also
//! `calico-ipam`. The name by which the program is called decides.

#[cfg(any(target_env = "musl", test))]
mod memory;

use std::io::{self, Write};
use std::process::ExitCode;

use cni_plugin::served::Served;
use cni_plugin::wired::remover;
use cni_plugin::{Invocation, Kind, Outcome, answer_option, install_hook, run, wired};

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: memory::Allocator = memory::Allocator;

fn main() -> ExitCode {
    install_hook();
    let mut arguments = std::env::args_os();
    let outcome = match Kind::from_argument(arguments.next().as_deref()) {
        Kind::Remover => return ExitCode::from(remover::run(arguments)),
        Kind::Main => {
            let arguments: Vec<_> = arguments.collect();
            wired::run(&Invocation::of_this_process(), &arguments, &mut io::stdin().lock())
        }
        Kind::Ipam => answer_option(arguments.next().as_deref())
            .unwrap_or_else(|| run(&Invocation::of_this_process(), &mut io::stdin().lock(), &Served::default())),
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
