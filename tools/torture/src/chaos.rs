//! The fate of the process that has the store: it is frozen for a while, or killed and started again.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;
use nix::sys::signal::Signal;

use crate::Failure;
use crate::etcd::Etcd;
use crate::ledger::Ledger;

/// The two troubles that every run has, as the ledger counts them.
pub(crate) const FROZEN: &str = "frozen (SIGSTOP, SIGCONT)";
pub(crate) const KILLED: &str = "killed (SIGKILL) and started";

/// A process that others depend on.
pub(crate) trait Victim: Send + 'static {
    /// The program's name.
    const NAME: &'static str;

    /// Sends it a signal.
    fn signal(&self, signal: Signal) -> std::io::Result<()>;

    /// Has it let another process have the store for a moment. False if it does not do that.
    fn hand_over(&self) -> std::io::Result<bool> {
        Ok(false)
    }

    /// Kills it, and starts it again.
    fn restart(&mut self) -> std::io::Result<()>;
}

impl Victim for Etcd {
    const NAME: &'static str = "etcd";

    fn signal(&self, signal: Signal) -> std::io::Result<()> {
        Etcd::signal(self, signal)
    }

    fn restart(&mut self) -> std::io::Result<()> {
        self.stop();
        self.run()
    }
}

/// A thread that makes trouble until [`Chaos::end`].
pub(crate) struct Chaos<V> {
    victim: Arc<Mutex<V>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl<V: Victim> Chaos<V> {
    /// Begins to make trouble.
    pub(crate) fn begin(victim: V, seed: u64, ledger: Arc<Ledger>) -> Self {
        let victim = Arc::new(Mutex::new(victim));
        let stop = Arc::new(AtomicBool::new(false));
        let (server, ended) = (Arc::clone(&victim), Arc::clone(&stop));
        let thread = std::thread::spawn(move || trouble(&*server, &ended, &mut Rng::with_seed(seed), &ledger));
        Self { victim, stop, thread }
    }

    /// Ends the trouble; the process runs, and lives as long as what is returned.
    pub(crate) fn end(self) -> Result<Arc<Mutex<V>>, Failure> {
        self.stop.store(true, SeqCst);
        self.thread.join().map_err(|_| Failure("the thread that makes trouble has panicked".into()))??;
        Ok(self.victim)
    }
}

/// A freeze and a kill come first and early, so that a short run has both; then troubles come at random.
fn trouble<V: Victim>(victim: &Mutex<V>, stop: &AtomicBool, rng: &mut Rng, ledger: &Ledger) -> std::io::Result<()> {
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
