//! Injects faults into the server processes of the store. A fault freezes etcd or `margay serve` for a moment, or kills
//! and restarts it.

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
use crate::ledger::Ledger;

pub(crate) use testkit::server::Etcd;

/// The name under which the ledger counts the fault that freezes a process. Every run with faults freezes the process
/// at least once.
pub(crate) const FROZEN: &str = "frozen (SIGSTOP, SIGCONT)";
pub(crate) const KILLED: &str = "killed (SIGKILL) and started";

/// A server process that serves the store to the workers, and into which faults are injected.
pub(crate) trait Victim: Send + 'static {
    const NAME: &'static str;

    fn signal(&self, signal: Signal) -> io::Result<()>;

    /// Makes the server process release the store to another process for a moment. Returns false if a server of this
    /// kind cannot release its store.
    fn hand_over(&self) -> io::Result<bool> {
        Ok(false)
    }

    fn restart(&mut self) -> io::Result<()>;
}

impl Victim for Etcd {
    const NAME: &'static str = "etcd";

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Etcd::signal(self, signal)
    }

    fn restart(&mut self) -> io::Result<()> {
        self.stop();
        self.run()
    }
}

/// A thread that injects faults into a server process until [`Chaos::end`] is called.
pub(crate) struct Chaos<V> {
    victim: Arc<Mutex<V>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<()>>,
}

impl<V: Victim> Chaos<V> {
    pub(crate) fn begin(victim: V, seed: u64, ledger: Arc<Ledger>) -> Self {
        let victim = Arc::new(Mutex::new(victim));
        let stop = Arc::new(AtomicBool::new(false));
        let (server, ended) = (Arc::clone(&victim), Arc::clone(&stop));
        let thread = std::thread::spawn(move || trouble(&*server, &ended, &mut Rng::with_seed(seed), &ledger));
        Self { victim, stop, thread }
    }

    /// Stops the faults. The server process runs on until the returned value is dropped.
    pub(crate) fn end(self) -> Result<Arc<Mutex<V>>, Failure> {
        self.stop.store(true, SeqCst);
        self.thread.join().map_err(|_| Failure("the thread that makes trouble has panicked".into()))??;
        Ok(self.victim)
    }
}

/// Injects faults into the server process until `stop` is set. The first two faults are a freeze and a kill, so that
/// even a short run has both; later faults are random.
fn trouble<V: Victim>(victim: &Mutex<V>, stop: &AtomicBool, rng: &mut Rng, ledger: &Ledger) -> io::Result<()> {
    let mut first = [1, 3].into_iter();
    while !stop.load(SeqCst) {
        let (trouble, calm) = match first.next() {
            Some(trouble) => (trouble, rng.u64(100..400)),
            None => (rng.u32(..4), rng.u64(300..1500)),
        };
        std::thread::sleep(Duration::from_millis(calm));
        let mut victim = victim.lock().unwrap_or_else(PoisonError::into_inner);
        if trouble == 0 && victim.hand_over()? {
            ledger.count(&format!("fault: {} handed the store over", V::NAME), 1);
        } else if trouble < 3 {
            victim.signal(Signal::SIGSTOP)?;
            std::thread::sleep(Duration::from_millis(rng.u64(20..600)));
            victim.signal(Signal::SIGCONT)?;
            ledger.count(&format!("fault: {} {FROZEN}", V::NAME), 1);
        } else {
            victim.restart()?;
            ledger.count(&format!("fault: {} {KILLED}", V::NAME), 1);
        }
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

impl Victim for Daemon {
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
