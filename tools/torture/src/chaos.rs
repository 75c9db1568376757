//! Injects faults into the server processes of the store. A fault freezes etcd or `margay serve` for a moment, or kills
//! and restarts it. The faults of a whole etcd cluster are in [`members`](crate::members).

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use datastore::Location;
use fastrand::Rng;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Failure;
use crate::ledger::{Ledger, Witness};

pub(crate) use testkit::server::Etcd;

/// The name under which the ledger counts the fault that freezes a process. Every run with faults freezes the process
/// at least once.
pub(crate) const FROZEN: &str = "frozen (SIGSTOP, SIGCONT)";
pub(crate) const KILLED: &str = "killed (SIGKILL) and started";

/// What serves the store to the workers, and into which faults are injected.
pub(crate) trait Victim: Send + 'static {
    /// Injects a random fault, waits until it is over, and counts it in the ledger. The first calls inject each kind of
    /// fault once, so that even a short run has them all; `number` is the number of calls before this one.
    fn inject(&mut self, number: usize, rng: &mut Rng, ledger: &Ledger) -> io::Result<()>;

    /// Returns the pause before the next fault.
    fn calm(&self, rng: &mut Rng) -> Duration {
        Duration::from_millis(rng.u64(300..1500))
    }

    /// Checks the servers after the last fault and the last commit of the workers.
    fn check(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A server process into which faults are injected.
pub(crate) trait Server: Send + 'static {
    const NAME: &'static str;

    fn signal(&self, signal: Signal) -> io::Result<()>;

    /// Makes the server process release the store to another process for a moment. Returns false if a server of this
    /// kind cannot release its store.
    fn hand_over(&self) -> io::Result<bool> {
        Ok(false)
    }

    fn restart(&mut self) -> io::Result<()>;
}

impl<S: Server> Victim for S {
    fn inject(&mut self, number: usize, rng: &mut Rng, ledger: &Ledger) -> io::Result<()> {
        let fault = [1, 3].get(number).copied().unwrap_or_else(|| rng.u32(..4));
        if fault == 0 && self.hand_over()? {
            ledger.count(&format!("fault: {} handed the store over", S::NAME), 1);
        } else if fault < 3 {
            self.signal(Signal::SIGSTOP)?;
            std::thread::sleep(Duration::from_millis(rng.u64(20..600)));
            self.signal(Signal::SIGCONT)?;
            ledger.count(&format!("fault: {} {FROZEN}", S::NAME), 1);
        } else {
            self.restart()?;
            ledger.count(&format!("fault: {} {KILLED}", S::NAME), 1);
        }
        Ok(())
    }
}

impl Server for Etcd {
    const NAME: &'static str = "etcd";

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Etcd::signal(self, signal)
    }

    fn restart(&mut self) -> io::Result<()> {
        self.stop();
        self.run()
    }
}

/// A thread that injects faults until [`Chaos::end`] is called.
pub(crate) struct Chaos {
    victim: Arc<Mutex<Box<dyn Victim>>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<()>>,
}

impl Chaos {
    pub(crate) fn begin(victim: impl Victim, seed: u64, ledger: Arc<Ledger>) -> Self {
        let victim: Arc<Mutex<Box<dyn Victim>>> = Arc::new(Mutex::new(Box::new(victim)));
        let stop = Arc::new(AtomicBool::new(false));
        let (server, ended) = (Arc::clone(&victim), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let done = trouble(&server, &ended, &mut Rng::with_seed(seed), &ledger);
            // End the run, because its remaining operations would see no faults.
            done.inspect_err(|error| ledger.failed(format!("cannot inject a fault: {error}")))
        });
        Self { victim, stop, thread }
    }

    /// Stops the faults. The servers run on until the returned value is dropped.
    pub(crate) fn end(self) -> Result<Arc<Mutex<Box<dyn Victim>>>, Failure> {
        self.stop.store(true, SeqCst);
        self.thread.join().map_err(|_| Failure("the thread that makes trouble has panicked".into()))??;
        self.victim.lock().unwrap_or_else(PoisonError::into_inner).check()?;
        Ok(self.victim)
    }
}

/// Injects faults until `stop` is set.
fn trouble(victim: &Mutex<Box<dyn Victim>>, stop: &AtomicBool, rng: &mut Rng, ledger: &Ledger) -> io::Result<()> {
    for number in 0.. {
        let mut victim = victim.lock().unwrap_or_else(PoisonError::into_inner);
        // A short run must have its first faults soon.
        let calm = if number < 2 { Duration::from_millis(rng.u64(100..400)) } else { victim.calm(rng) };
        std::thread::sleep(calm);
        if stop.load(SeqCst) {
            break;
        }
        victim.inject(number, rng, ledger)?;
    }
    Ok(())
}

pub(crate) fn free_address() -> io::Result<SocketAddr> {
    testkit::server::dead_address()
}

/// Starts an etcd server for a long run, with automatic compaction and a database quota of 8 GiB.
pub(crate) fn start_etcd() -> io::Result<Etcd> {
    let arguments =
        ["--auto-compaction-mode=revision", "--auto-compaction-retention=5000", "--quota-backend-bytes=8589934592"];
    Etcd::start_with("http", &arguments.map(str::to_owned))
}

/// A `margay serve` process, with the environment variables that its systemd unit sets.
#[derive(Debug)]
pub(crate) struct Daemon {
    program: PathBuf,
    location: Location,
    /// The URL at which the daemon offers etcd's API; `None` if it does not offer this API.
    api: Option<String>,
    /// Additional command-line arguments for `margay serve`.
    options: &'static [&'static str],
    child: Child,
}

impl Daemon {
    /// Starts the daemon without waiting until it accepts connections. If `api` contains a URL, the daemon offers
    /// etcd's API at that URL.
    pub(crate) fn start(program: &Path, location: &Location, api: Option<&str>) -> io::Result<Self> {
        Self::start_with(program, location, api, &[])
    }

    /// Starts the daemon like [`Daemon::start`], with additional command-line arguments.
    pub(crate) fn start_with(
        program: &Path,
        location: &Location,
        api: Option<&str>,
        options: &'static [&'static str],
    ) -> io::Result<Self> {
        let child = spawn_daemon(program, location, api, options)?;
        let api = api.map(str::to_owned);
        Ok(Self { program: program.to_owned(), location: location.clone(), api, options, child })
    }

    /// Returns the daemon's resident memory in MiB.
    pub(crate) fn mib(&self) -> io::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let line = line.ok_or_else(|| io::Error::other("the daemon has ended"))?;
        let kib: f64 = line.split_whitespace().next().unwrap_or_default().parse().map_err(io::Error::other)?;
        Ok(kib / 1024.0)
    }
}

fn spawn_daemon(program: &Path, location: &Location, api: Option<&str>, options: &[&str]) -> io::Result<Child> {
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

impl Server for Daemon {
    const NAME: &'static str = "margay serve";

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().cast_signed()), signal)?)
    }

    fn hand_over(&self) -> io::Result<bool> {
        // The command `margay store status` opens the store's files, so the daemon must close them first.
        let mut status = Command::new(&self.program);
        status.args(["--store", &self.location.to_string(), "store", "status"]);
        let done = status.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        Ok(done.success())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn_daemon(&self.program, &self.location, self.api.as_deref(), self.options)?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.signal(Signal::SIGTERM);
        let _ = self.child.wait();
    }
}
