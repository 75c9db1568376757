//! Implements the service Lease, and the clock that decides when each lease ends.
//!
//! The remaining times of leases are only in memory, as in etcd. After a restart of the server, every lease has its
//! full time again. A renewal of a lease does not write to the store.
//!
//! The lease clock keeps running while another process has the store. A lease that ends while another process has the
//! store cannot be renewed, and is revoked once this process has the store again. When a new store replaces the current
//! store, the lease clock restarts with the leases of the new store.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse, PbLeaseLeasesRequest,
    PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse, PbLeaseService, PbLeaseStatus,
    PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse,
};
use futures::Stream;
use futures::stream::unfold;
use kv::{ErrorKind, GrantOutcome, Lease, LeaseId, Outcome, Revision};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tonic::{Request, Response, Status, Streaming};

use crate::backing::{Backing, StoreGeneration};
use crate::convert::{Refusal, status};
use crate::{Api, STORE_WAIT_TIMEOUT};

/// Minimum time to live of a lease, in seconds. A shorter requested time to live is raised to `MIN_TTL_SECONDS`, as in
/// etcd with default settings.
const MIN_TTL_SECONDS: i64 = 2;
/// How long `LeaseTimeToLive` and `LeaseLeases` wait for the store while another process has it.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time to live that etcd reports for a lease that does not exist.
const EXPIRED_TTL: i64 = -1;

#[async_trait]
impl PbLeaseService for Api {
    type LeaseKeepAliveStream = Pin<Box<dyn Stream<Item = Result<PbLeaseKeepAliveResponse, Status>> + Send>>;

    async fn lease_grant(
        &self,
        request: Request<PbLeaseGrantRequest>,
    ) -> Result<Response<PbLeaseGrantResponse>, Status> {
        let PbLeaseGrantRequest { ttl, id } = request.into_inner();
        let ttl = Duration::from_secs(ttl.max(MIN_TTL_SECONDS).unsigned_abs());
        if ttl > Lease::MAX_TTL {
            return Err(Refusal::LeaseTooLong.into());
        }
        // If the client disconnects while the grant waits for the store, the lease is not granted.
        self.revision().await?;
        self.leases_are_known().await?;
        let lease = Lease { id: LeaseId::new(id).unwrap_or_else(|| self.free_lease_id()), ttl };
        let api = self.clone();
        // A started grant must finish even if the client disconnects, so that the lease deadlines in memory match the
        // leases in the store.
        let granting = tokio::spawn(async move { api.grant(lease).await });
        granting.await.unwrap_or_else(|_| Err(Refusal::Stopped.into()))?;
        let header = self.header(self.recent_revision().await?);
        Ok(Response::new(PbLeaseGrantResponse { header, id: lease.id.get(), ttl: seconds(ttl), error: String::new() }))
    }

    async fn lease_revoke(
        &self,
        request: Request<PbLeaseRevokeRequest>,
    ) -> Result<Response<PbLeaseRevokeResponse>, Status> {
        let id = LeaseId::new(request.into_inner().id).ok_or(Refusal::LeaseNotFound)?;
        self.revision().await?;
        self.leases_are_known().await?;
        let api = self.clone();
        let revoking = tokio::spawn(async move { api.revoke(id).await });
        let now = revoking.await.unwrap_or_else(|_| Err(Refusal::Stopped.into()))?;
        Ok(Response::new(PbLeaseRevokeResponse { header: self.header(now) }))
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<PbLeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let renewals = unfold((self.clone(), request.into_inner()), |(api, mut requests)| async {
            match requests.message().await {
                Ok(Some(request)) => Some((api.renew(request.id).await, (api, requests))),
                Ok(None) | Err(_) => None,
            }
        });
        Ok(Response::new(Box::pin(renewals)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<PbLeaseTimeToLiveRequest>,
    ) -> Result<Response<PbLeaseTimeToLiveResponse>, Status> {
        let PbLeaseTimeToLiveRequest { id, keys } = request.into_inner();
        let header = self.header(self.revision_of_leases(STORE_TIMEOUT).await?);
        let left = LeaseId::new(id).and_then(|lease| Some((lease, self.clock.left(lease)?)));
        let Some((lease, TimeLeft { ttl, left })) = left else {
            return Ok(Response::new(PbLeaseTimeToLiveResponse { header, id, ttl: EXPIRED_TTL, ..Default::default() }));
        };
        let keys = if keys { self.backing.leased(lease).await.map_err(|error| status(&error))? } else { Vec::new() };
        Ok(Response::new(PbLeaseTimeToLiveResponse {
            header,
            id,
            ttl: seconds(left),
            granted_ttl: seconds(ttl),
            keys: keys.into_iter().map(|key| key.as_bytes().to_vec()).collect(),
        }))
    }

    async fn lease_leases(&self, _: Request<PbLeaseLeasesRequest>) -> Result<Response<PbLeaseLeasesResponse>, Status> {
        let header = self.header(self.revision_of_leases(STORE_TIMEOUT).await?);
        let leases = self.clock.ids().into_iter().map(|id| PbLeaseStatus { id: id.get() }).collect();
        Ok(Response::new(PbLeaseLeasesResponse { header, leases }))
    }
}

impl Api {
    async fn leases_are_known(&self) -> Result<(), Status> {
        if self.clock.is_loaded(&*self.backing).await { Ok(()) } else { Err(Refusal::Timeout.into()) }
    }

    /// Waits up to `patience` for the store, then until the store's leases are loaded, and returns a recent revision.
    /// If the store was replaced while another process had it, the `LeaseClock` first loads the leases of the new
    /// store. While another process has the store, the `LeaseClock` keeps the leases it knows, and they continue to
    /// expire.
    async fn revision_of_leases(&self, patience: Duration) -> Result<Revision, Status> {
        let recent = self.revision_within(patience).await?;
        self.leases_are_known().await?;
        Ok(recent)
    }

    /// Returns a random lease id that no lease has.
    fn free_lease_id(&self) -> LeaseId {
        loop {
            let id = LeaseId::new(fastrand::i64(1..));
            if let Some(id) = id.filter(|id| !self.clock.has(*id)) {
                return id;
            }
        }
    }

    /// Grants a lease. The `LeaseClock` reserves the lease before the store grants it, so that every lease in the store
    /// has an end.
    async fn grant(&self, lease: Lease) -> Result<(), Status> {
        if !self.clock.reserve(lease) {
            return Err(Refusal::LeaseExists.into());
        }
        match self.backing.grant(lease).await {
            Ok(GrantOutcome::New) => {
                self.clock.begin(lease);
                Ok(())
            }
            // The store has a lease with this id, although the `LeaseClock` does not know the lease.
            Ok(GrantOutcome::Taken) => {
                self.clock.reload(lease.id);
                Err(Refusal::LeaseExists.into())
            }
            Err(error) => {
                match error.outcome() {
                    Outcome::NotApplied => self.clock.forget(lease.id),
                    Outcome::Unknown => self.clock.begin(lease),
                }
                Err(match error.kind() {
                    ErrorKind::Unsupported => Status::failed_precondition(error.detail().unwrap_or("no leases")),
                    _ => status(&error),
                })
            }
        }
    }

    /// Revokes a lease for a client. If the outcome of the revocation is unknown, the lease can no longer be renewed.
    async fn revoke(&self, id: LeaseId) -> Result<Revision, Status> {
        let revoked = self.backing.revoke(id, self.backing.place()).await;
        match &revoked {
            Err(error) if error.outcome() == Outcome::Unknown => self.clock.end(id),
            Err(error) if *error.kind() != ErrorKind::LeaseNotFound => {}
            _ => self.clock.forget(id),
        }
        revoked.map_err(|error| status(&error))
    }

    /// Restores the full time of a lease for a client. The answer for a missing lease has a time to live of 0.
    async fn renew(&self, id: i64) -> Result<PbLeaseKeepAliveResponse, Status> {
        let header = self.header(self.revision_of_leases(STORE_WAIT_TIMEOUT).await?);
        let renewed = LeaseId::new(id).and_then(|id| self.clock.renew(id));
        Ok(PbLeaseKeepAliveResponse { header, id, ttl: renewed.map_or(0, |left| seconds(left.ttl)) })
    }
}

/// Converts a duration to whole seconds, rounded down as in etcd.
fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

/// How often the [`LeaseClock`] checks whether another store has replaced the current store.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);
/// How long the [`LeaseClock`] waits before it retries a failed revocation.
const REVOKE_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// How long a request waits until the leases of the current store are loaded.
const LEASES_KNOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// A duration that never passes in practice (100 years).
const UNLIMITED_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Tracks the remaining times of all leases, and revokes each lease when its time ends.
#[derive(Debug)]
pub(crate) struct LeaseClock {
    times: Mutex<HashMap<LeaseId, LeaseTime>>,
    /// When the [`LeaseClock`] next checks the leases. Granting a lease that ends earlier must wake the [`LeaseClock`].
    next_scan: Mutex<Instant>,
    /// Wakes the [`LeaseClock`] so that it checks the leases before `next_scan`.
    sooner: Notify,
    /// The store whose leases are loaded; `None` before the first load.
    loaded: watch::Sender<Option<StoreGeneration>>,
}

/// The remaining time of a lease.
#[derive(Clone, Copy, Debug)]
struct LeaseTime {
    ttl: Duration,
    end: Instant,
    /// The state of the lease's grant, which renewals do not change.
    granted: GrantState,
    /// The earliest time of an attempt to revoke the lease, which each failed attempt postpones.
    revoke_from: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GrantState {
    /// The grant of the lease is in progress. Until the grant has finished, the lease can neither end nor be renewed.
    Pending,
    /// The time at which this process granted or loaded the lease.
    Since(Instant),
}

/// The full and the remaining time of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeLeft {
    ttl: Duration,
    pub(crate) left: Duration,
}

impl Default for LeaseClock {
    fn default() -> Self {
        Self {
            times: Mutex::default(),
            next_scan: Mutex::new(Instant::now()),
            sooner: Notify::new(),
            loaded: watch::channel(None).0,
        }
    }
}

impl LeaseTime {
    fn begin(ttl: Duration, granted: GrantState) -> Self {
        let now = Instant::now();
        Self { ttl, end: after(now, ttl), granted, revoke_from: now }
    }

    fn is_there(&self) -> bool {
        self.granted != GrantState::Pending
    }

    fn has_ended(&self, now: Instant) -> bool {
        self.is_there() && self.due() <= now
    }

    /// Returns the time at which the `LeaseClock` must next try to revoke the lease.
    fn due(&self) -> Instant {
        self.end.max(self.revoke_from)
    }
}

fn after(now: Instant, ttl: Duration) -> Instant {
    now.checked_add(ttl).unwrap_or(now + UNLIMITED_WAIT)
}

impl LeaseClock {
    fn times(&self) -> MutexGuard<'_, HashMap<LeaseId, LeaseTime>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_scan(&self) -> MutexGuard<'_, Instant> {
        self.next_scan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the id of a lease that is about to be granted. Returns `false` if a lease with this id already exists.
    fn reserve(&self, lease: Lease) -> bool {
        let mut times = self.times();
        if times.contains_key(&lease.id) {
            return false;
        }
        times.insert(lease.id, LeaseTime::begin(lease.ttl, GrantState::Pending));
        true
    }

    /// Starts the countdown of a lease that was granted, or whose grant has an unknown outcome.
    pub(crate) fn begin(&self, lease: Lease) {
        let time = LeaseTime::begin(lease.ttl, GrantState::Since(Instant::now()));
        self.times().insert(lease.id, time);
        if time.due() < *self.next_scan() {
            self.sooner.notify_one();
        }
    }

    /// Removes a lease from the `LeaseClock`, because the store does not have the lease.
    fn forget(&self, id: LeaseId) {
        self.times().remove(&id);
    }

    /// Ends a lease now, even if the store still has the lease.
    pub(crate) fn end(&self, id: LeaseId) {
        if let Some(time) = self.times().get_mut(&id) {
            time.end = Instant::now();
        }
        self.sooner.notify_one();
    }

    /// Removes a lease from the `LeaseClock`, and makes it load all leases from the store again.
    fn reload(&self, id: LeaseId) {
        self.forget(id);
        self.loaded.send_replace(None);
        self.sooner.notify_one();
    }

    /// Restores the full time of a lease. Returns `None` if the lease has ended or never existed.
    fn renew(&self, id: LeaseId) -> Option<TimeLeft> {
        let (mut times, now) = (self.times(), Instant::now());
        let time = times.get_mut(&id).filter(|time| time.is_there() && now < time.end)?;
        time.end = after(now, time.ttl);
        Some(TimeLeft { ttl: time.ttl, left: time.ttl })
    }

    /// Returns the full and the remaining time of a lease, or `None` if the lease was never granted or is revoked.
    pub(crate) fn left(&self, id: LeaseId) -> Option<TimeLeft> {
        let (times, now) = (self.times(), Instant::now());
        let time = times.get(&id).filter(|time| time.is_there())?;
        Some(TimeLeft { ttl: time.ttl, left: time.end.saturating_duration_since(now) })
    }

    /// Lists the ids of all leases in ascending order.
    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        let times = self.times();
        let mut ids: Vec<_> = times.iter().filter(|(_, time)| time.is_there()).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Returns whether a lease has this id or is being granted with this id.
    pub(crate) fn has(&self, id: LeaseId) -> bool {
        self.times().contains_key(&id)
    }

    /// Waits until the leases of the current store are loaded. Returns `false` if the leases are not loaded within
    /// [`LEASES_KNOWN_TIMEOUT`].
    async fn is_loaded(&self, backing: &dyn Backing) -> bool {
        let is_there = |loaded: &Option<StoreGeneration>| *loaded == Some(backing.place());
        if !is_there(&self.loaded.borrow()) {
            self.sooner.notify_one();
        }
        // The wait can fail only by the timeout, because `self` keeps the sender of `loaded` alive.
        matches!(timeout(LEASES_KNOWN_TIMEOUT, self.loaded.subscribe().wait_for(is_there)).await, Ok(Ok(_)))
    }

    /// Revokes every lease when its time ends. The returned future never completes.
    pub(crate) async fn run(&self, backing: &dyn Backing) {
        loop {
            let place = backing.place();
            if *self.loaded.borrow() != Some(place)
                && let Err(error) = self.load(backing, place).await
            {
                tracing::warn!(
                    %error,
                    "cannot read from the store the leases of clients of the etcd API that margay serves; keys of \
                     expired leases stay until a retry succeeds"
                );
                let _ = timeout(CLOCK_INTERVAL, self.sooner.notified()).await;
                continue;
            }
            let ended = self.ended();
            if ended.is_empty() {
                // The `LeaseClock` checks the leases again when its wait times out or when it is notified.
                let _ = timeout(self.next(), self.sooner.notified()).await;
            }
            for id in ended {
                if backing.place() != place {
                    // The ended leases belong to a store that another store has replaced.
                    break;
                }
                // The lease is checked again, because a client may have revoked it and granted a new lease with the
                // same id.
                if self.times().get(&id).is_some_and(|time| time.has_ended(Instant::now())) {
                    self.revoke(backing, place, id).await;
                }
            }
        }
    }

    async fn revoke(&self, backing: &dyn Backing, place: StoreGeneration, id: LeaseId) {
        match backing.revoke(id, place).await {
            Ok(_) => {
                tracing::debug!(%id, "revoked an expired lease and deleted the keys of the lease");
                self.forget(id);
            }
            Err(error) if *error.kind() == ErrorKind::LeaseNotFound => self.forget(id),
            Err(_) if backing.place() != place => {}
            Err(error) => {
                tracing::warn!(%id, %error, "cannot revoke an expired lease; trying again");
                if let Some(time) = self.times().get_mut(&id) {
                    time.revoke_from = Instant::now() + REVOKE_RETRY_INTERVAL;
                }
            }
        }
    }

    /// Loads all leases of the store and restarts the time of each lease.
    async fn load(&self, backing: &dyn Backing, place: StoreGeneration) -> kv::Result<()> {
        let begun = Instant::now();
        let leases = backing.leases().await?;
        let mut times = self.times();
        // Loading the leases does not drop recently granted ones: the list read from the store may be older than a
        // grant that is in progress or just confirmed.
        times.retain(|_, time| match time.granted {
            GrantState::Pending => true,
            GrantState::Since(since) => since >= begun,
        });
        for Lease { id, ttl } in leases {
            times.entry(id).or_insert_with(|| LeaseTime::begin(ttl, GrantState::Since(begun)));
        }
        drop(times);
        self.loaded.send_replace(Some(place));
        Ok(())
    }

    /// Returns the leases whose time has ended and that can no longer be renewed, in the order in which their
    /// revocation is due.
    fn ended(&self) -> Vec<LeaseId> {
        let (times, now) = (self.times(), Instant::now());
        let due = times.iter().filter(|(_, time)| time.has_ended(now));
        let mut due: Vec<_> = due.map(|(id, time)| (time.due(), *id)).collect();
        due.sort_unstable();
        due.into_iter().map(|(_, id)| id).collect()
    }

    /// Returns the time until the next lease ends, at most [`CLOCK_INTERVAL`].
    fn next(&self) -> Duration {
        let now = Instant::now();
        // `next_scan` is locked before the leases are read, so that a concurrently granted lease is either included in
        // `due` or compared with the new `next_scan`.
        let mut next_scan = self.next_scan();
        let due = self.times().values().filter(|time| time.is_there()).map(LeaseTime::due).min();
        *next_scan = due.unwrap_or(now + CLOCK_INTERVAL).min(now + CLOCK_INTERVAL);
        next_scan.saturating_duration_since(now)
    }
}
