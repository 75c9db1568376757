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
    /// Where it offers etcd's API.
    api: Option<String>,
    /// Further arguments of `margay serve`.
    options: &'static [&'static str],
    child: Child,
}

impl Daemon {
    /// Starts it; it may not listen yet. With a URL it offers etcd's API there.
    pub(crate) fn start(program: &Path, location: &Location, api: Option<&str>) -> io::Result<Self> {
        Self::start_with(program, location, api, &[])
    }

    /// Starts it with further arguments of `margay serve`.
    pub(crate) fn start_with(
        program: &Path,
        location: &Location,
        api: Option<&str>,
        options: &'static [&'static str],
    ) -> io::Result<Self> {
        let child = spawn(program, location, api, options)?;
        let api = api.map(str::to_owned);
        Ok(Self { program: program.to_owned(), location: location.clone(), api, options, child })
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

fn spawn(program: &Path, location: &Location, api: Option<&str>, options: &[&str]) -> io::Result<Child> {
    let mut serve = Command::new(program);
    serve.args(["--store", &location.to_string(), "serve"]);
    if let Some(url) = api {
        serve.args(["--listen", url, "--insecure-loopback"]);
    }
    serve.args(options);
    serve.stdin(Stdio::null()).stderr(Stdio::null());
    serve.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "131072");
    serve.spawn().map_err(|error| io::Error::other(format!("{}: {error}", program.display())))
}

impl Victim for Daemon {
    const NAME: &'static str = "margay serve";

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().cast_signed()), signal)?)
    }

    fn hand_over(&self) -> io::Result<bool> {
        // This command opens the store's files.
        let mut status = Command::new(&self.program);
        status.args(["--store", &self.location.to_string(), "store", "status"]);
        let done = status.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        Ok(done.success())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn(&self.program, &self.location, self.api.as_deref(), self.options)?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.signal(Signal::SIGTERM);
        let _ = self.child.wait();
    }
}
