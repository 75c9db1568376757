//! What happens to an etcd: it is frozen for a while, or killed and started again.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;
use nix::sys::signal::Signal;

use crate::Failure;
use crate::etcd::Etcd;
use crate::ledger::Ledger;

/// A thread that makes trouble until it is told to stop.
pub(crate) struct Chaos {
    etcd: Arc<Mutex<Etcd>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Chaos {
    /// Begins to make trouble.
    pub(crate) fn begin(etcd: Etcd, seed: u64, ledger: Arc<Ledger>) -> Self {
        let etcd = Arc::new(Mutex::new(etcd));
        let stop = Arc::new(AtomicBool::new(false));
        let (server, ended) = (Arc::clone(&etcd), Arc::clone(&stop));
        let thread = std::thread::spawn(move || trouble(&server, &ended, &mut Rng::with_seed(seed), &ledger));
        Self { etcd, stop, thread }
    }

    /// Ends the trouble; the server is well, and lives as long as what is returned.
    pub(crate) fn end(self) -> Result<Arc<Mutex<Etcd>>, Failure> {
        self.stop.store(true, SeqCst);
        self.thread.join().map_err(|_| Failure("the thread that makes trouble has panicked".into()))??;
        Ok(self.etcd)
    }
}

fn trouble(etcd: &Mutex<Etcd>, stop: &AtomicBool, rng: &mut Rng, ledger: &Ledger) -> std::io::Result<()> {
    while !stop.load(SeqCst) {
        std::thread::sleep(Duration::from_millis(rng.u64(300..1500)));
        let mut etcd = etcd.lock().unwrap_or_else(PoisonError::into_inner);
        if rng.u32(..3) > 0 {
            etcd.signal(Signal::SIGSTOP)?;
            std::thread::sleep(Duration::from_millis(rng.u64(20..600)));
            etcd.signal(Signal::SIGCONT)?;
            ledger.count("fault: etcd frozen (SIGSTOP, SIGCONT)", 1);
        } else {
            etcd.stop();
            etcd.run()?;
            ledger.count("fault: etcd killed (SIGKILL) and started", 1);
        }
    }
    Ok(())
}
