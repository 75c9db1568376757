//! The plugin `margay-ipam`, which also runs under the name `calico-ipam`.

use std::io::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;

use cni_plugin::{
    AddRequest, Allocator, Assigned, CheckRequest, CniError, DelRequest, Invocation, Outcome, install_hook, run,
};

fn main() -> ExitCode {
    install_hook();
    let outcome = run(&Invocation::of_this_process(), &mut io::stdin().lock(), &NoAllocator);
    match print(&outcome) {
        Ok(()) => ExitCode::from(outcome.exit),
        // Nobody can be told more than the exit status says. What ADD assigned stays assigned until the runtime's DEL.
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(outcome: &Outcome) -> io::Result<()> {
    io::stderr().lock().write_all(outcome.stderr.as_bytes())?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(outcome.stdout.as_bytes())?;
    stdout.flush()
}

/// Stands where the allocator on a store will stand.
struct NoAllocator;

impl NoAllocator {
    fn error() -> CniError {
        CniError::internal("this build cannot open a store yet")
    }
}

impl Allocator for NoAllocator {
    fn add(&self, _: &AddRequest) -> cni_plugin::Result<Vec<Assigned>> {
        Err(Self::error())
    }

    fn del(&self, _: &DelRequest) -> cni_plugin::Result<()> {
        Err(Self::error())
    }

    fn check(&self, _: &CheckRequest) -> cni_plugin::Result<Vec<IpAddr>> {
        Err(Self::error())
    }
}
