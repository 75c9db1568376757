//! A process of `margay serve`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use datastore::Location;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::chaos::Victim;

/// The daemon of a store, with the environment that its systemd unit sets.
#[derive(Debug)]
pub(crate) struct Daemon {
    program: PathBuf,
    location: Location,
    child: Child,
}

impl Daemon {
    /// Starts it; it may not listen yet.
    pub(crate) fn start(program: &Path, location: &Location) -> io::Result<Self> {
        let child = spawn(program, location)?;
        Ok(Self { program: program.to_owned(), location: location.clone(), child })
    }

    /// The memory that it has now, in MiB.
    pub(crate) fn mib(&self) -> io::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let line = line.ok_or_else(|| io::Error::other("the daemon has ended"))?;
        let kib: f64 = line.split_whitespace().next().unwrap_or_default().parse().map_err(io::Error::other)?;
        Ok(kib / 1024.0)
    }
}

fn spawn(program: &Path, location: &Location) -> io::Result<Child> {
    let mut serve = Command::new(program);
    serve.args(["--store", &location.to_string(), "serve"]).stdin(Stdio::null()).stderr(Stdio::null());
    serve.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "131072");
    serve.spawn().map_err(|error| io::Error::other(format!("{}: {error}", program.display())))
}

impl Victim for Daemon {
    const NAME: &'static str = "margay serve";

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().cast_signed()), signal)?)
    }

    fn restart(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn(&self.program, &self.location)?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.signal(Signal::SIGTERM);
        let _ = self.child.wait();
    }
}
