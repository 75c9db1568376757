//! The time of leases: when each of them ends. It is kept in memory, as with etcd: after a start every lease has its full time
//! again, and a renewal writes nothing.
//!
//! The clock goes on while another process has the store. A lease that ends meanwhile is revoked afterwards, and no renewal
//! brings it back.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv::{ErrorKind, Lease, LeaseId};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::Backing;

/// How often the clock looks whether another store has taken the place of this one, whose leases are others.
const LOOK: Duration = Duration::from_secs(5);
/// How long the clock waits after the store failed to revoke a lease. A store that another process has is no failure: the clock
/// waits for it.
const AGAIN: Duration = Duration::from_secs(2);

/// The times of all leases.
#[derive(Debug)]
pub(crate) struct LeaseClock {
    times: Mutex<HashMap<LeaseId, Time>>,
    /// The clock has something to do before the time that it waits for.
    sooner: Notify,
    /// The cluster whose leases are here; `None` until they were read.
    loaded: watch::Sender<Option<u64>>,
}

/// The time of a lease.
#[derive(Clone, Copy, Debug)]
struct Time {
    ttl: Duration,
    end: Instant,
}

/// What is left of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) ttl: Duration,
    pub(crate) left: Duration,
}

impl Default for LeaseClock {
    fn default() -> Self {
        Self { times: Mutex::default(), sooner: Notify::new(), loaded: watch::channel(None).0 }
    }
}

impl LeaseClock {
    fn times(&self) -> MutexGuard<'_, HashMap<LeaseId, Time>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the time of a lease. False if the lease is there already; nothing has changed then.
    pub(crate) fn begin(&self, lease: Lease) -> bool {
        let mut times = self.times();
        if times.contains_key(&lease.id) {
            return false;
        }
        times.insert(lease.id, Time { ttl: lease.ttl, end: Instant::now() + lease.ttl });
        drop(times);
        self.sooner.notify_one();
        true
    }

    /// Forgets a lease, which is not there or not any more.
    pub(crate) fn forget(&self, id: LeaseId) {
        self.times().remove(&id);
    }

    /// Gives a lease its full time again; `None` if it has ended or was never there.
    pub(crate) fn renew(&self, id: LeaseId) -> Option<Left> {
        let (mut times, now) = (self.times(), Instant::now());
        let time = times.get_mut(&id).filter(|time| now < time.end)?;
        time.end = now + time.ttl;
        Some(Left { ttl: time.ttl, left: time.ttl })
    }

    /// What is left of a lease; `None` if it was never there, or is revoked.
    pub(crate) fn left(&self, id: LeaseId) -> Option<Left> {
        self.times()
            .get(&id)
            .map(|time| Left { ttl: time.ttl, left: time.end.saturating_duration_since(Instant::now()) })
    }

    /// All leases, in the order of their numbers.
    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        let mut ids: Vec<_> = self.times().keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Waits until the leases of this cluster were read from the store.
    pub(crate) async fn until_loaded(&self, cluster: u64) {
        if *self.loaded.borrow() != Some(cluster) {
            self.sooner.notify_one();
        }
        // The clock lives as long as its handles, so there is no error.
        let _ = self.loaded.subscribe().wait_for(|loaded| *loaded == Some(cluster)).await;
    }

    /// Has every lease end in its time, for ever.
    pub(crate) async fn run(&self, backing: &dyn Backing) {
        loop {
            let cluster = backing.identity().cluster;
            if *self.loaded.borrow() != Some(cluster)
                && let Err(error) = self.load(backing, cluster).await
            {
                tracing::debug!(%error, "the leases cannot be read yet");
                let _ = timeout(LOOK, self.sooner.notified()).await;
                continue;
            }
            if let Some(id) = self.ended() {
                match backing.revoke(id).await {
                    Ok(_) => tracing::debug!(%id, "a lease has ended"),
                    Err(error) if *error.kind() == ErrorKind::LeaseNotFound => {}
                    Err(error) => {
                        tracing::warn!(%id, %error, "a lease has ended and its keys are still there; trying again");
                        sleep(AGAIN).await;
                        continue;
                    }
                }
                self.forget(id);
                continue;
            }
            // In both cases the clock looks again.
            let _ = timeout(self.next(), self.sooner.notified()).await;
        }
    }

    /// Begins the time of all leases anew.
    async fn load(&self, backing: &dyn Backing, cluster: u64) -> kv::Result<()> {
        let begun = Instant::now();
        let leases = backing.leases().await?;
        let (mut times, now) = (self.times(), Instant::now());
        // A lease that began meanwhile stays: the list may be older.
        times.retain(|_, time| time.end >= begun + time.ttl);
        for Lease { id, ttl } in leases {
            times.entry(id).or_insert(Time { ttl, end: now + ttl });
        }
        drop(times);
        self.loaded.send_replace(Some(cluster));
        Ok(())
    }

    /// A lease whose time is over: the one that ended first.
    fn ended(&self) -> Option<LeaseId> {
        let (times, now) = (self.times(), Instant::now());
        let ended = times.iter().filter(|(_, time)| time.end <= now);
        ended.min_by_key(|(id, time)| (time.end, **id)).map(|(id, _)| *id)
    }

    /// How long no lease ends, at most as long as the clock may go without a look at the store.
    fn next(&self) -> Duration {
        let end = self.times().values().map(|time| time.end).min();
        end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()).min(LOOK))
    }
}
