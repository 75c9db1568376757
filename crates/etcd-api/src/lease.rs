//! The service Lease, and the time of leases: when each of them ends.
//!
//! The time is kept in memory, as with etcd: after a start every lease has its full time again, and a renewal writes nothing.
//!
//! The clock goes on while another process has the store. A lease that ends meanwhile is revoked afterwards, and no renewal
//! brings it back. When another store takes the place of this one, the clock begins anew with the leases of that store.

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

/// The shortest time to live, in seconds: as with an etcd of the usual settings, a shorter one is raised to it.
const MIN_TTL_SECONDS: i64 = 2;
/// How long `LeaseTimeToLive` and `LeaseLeases` wait for the store while another process has it.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time to live of a lease that is not there, as etcd says it.
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
        // A client that gives up while another process has the store leaves nothing behind.
        self.revision().await?;
        self.leases_are_known().await?;
        let lease = Lease { id: LeaseId::new(id).unwrap_or_else(|| self.free_lease_id()), ttl };
        let api = self.clone();
        // Once it is begun it comes to its end, so that the clock and the store agree.
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

    /// Waits up to `patience` for the store, then until the clock has read its leases, and returns a recent revision. A process
    /// that has the store may replace it. Without the store the clock's leases are those from before, whose time goes on.
    async fn revision_of_leases(&self, patience: Duration) -> Result<Revision, Status> {
        let recent = self.revision_within(patience).await?;
        self.leases_are_known().await?;
        Ok(recent)
    }

    /// A number that no lease has.
    fn free_lease_id(&self) -> LeaseId {
        loop {
            let id = LeaseId::new(fastrand::i64(1..));
            if let Some(id) = id.filter(|id| !self.clock.has(*id)) {
                return id;
            }
        }
    }

    /// Grants a lease. The clock knows of it before it is there, so that it ends in any case.
    async fn grant(&self, lease: Lease) -> Result<(), Status> {
        if !self.clock.reserve(lease) {
            return Err(Refusal::LeaseExists.into());
        }
        match self.backing.grant(lease).await {
            Ok(GrantOutcome::New) => {
                self.clock.begin(lease);
                Ok(())
            }
            // The store has a lease that the clock does not know.
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

    /// Revokes a lease. One that may be gone is not renewed any more.
    async fn revoke(&self, id: LeaseId) -> Result<Revision, Status> {
        let revoked = self.backing.revoke(id, self.backing.place()).await;
        match &revoked {
            Err(error) if error.outcome() == Outcome::Unknown => self.clock.end(id),
            Err(error) if *error.kind() != ErrorKind::LeaseNotFound => {}
            _ => self.clock.forget(id),
        }
        revoked.map_err(|error| status(&error))
    }

    /// Gives a lease its full time again. The answer for one that is not there has no time.
    async fn renew(&self, id: i64) -> Result<PbLeaseKeepAliveResponse, Status> {
        let header = self.header(self.revision_of_leases(STORE_WAIT_TIMEOUT).await?);
        let renewed = LeaseId::new(id).and_then(|id| self.clock.renew(id));
        Ok(PbLeaseKeepAliveResponse { header, id, ttl: renewed.map_or(0, |left| seconds(left.ttl)) })
    }
}

/// Whole seconds, as etcd counts them down.
fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

/// How often the clock looks whether another store has taken the place of this one.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);
/// How long the clock leaves a lease alone that the store failed to revoke.
const REVOKE_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// How long a request waits until the leases are known.
const LEASES_KNOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// A time that does not come.
const UNLIMITED_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The times of all leases.
#[derive(Debug)]
pub(crate) struct LeaseClock {
    times: Mutex<HashMap<LeaseId, LeaseTime>>,
    /// When the clock looks next. A lease that ends before must wake it.
    next_scan: Mutex<Instant>,
    /// The clock has something to do before the time that it waits for.
    sooner: Notify,
    /// The store whose leases are here; `None` until they were read.
    loaded: watch::Sender<Option<StoreGeneration>>,
}

/// The time of a lease.
#[derive(Clone, Copy, Debug)]
struct LeaseTime {
    ttl: Duration,
    end: Instant,
    /// The grant of the lease. No renewal changes it.
    granted: GrantState,
    /// The lease is not revoked before, since that has just failed.
    revoke_from: Instant,
}

/// The state of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GrantState {
    /// It is on its way: the lease neither ends nor is it renewed.
    Pending,
    /// The lease has been there since then, as far as this process knows.
    Since(Instant),
}

/// The time of a lease, and the rest of it.
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

    /// The time at which the lease must be revoked.
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

    /// Keeps the number of a lease that is about to be granted. False if a lease has it already.
    fn reserve(&self, lease: Lease) -> bool {
        let mut times = self.times();
        if times.contains_key(&lease.id) {
            return false;
        }
        times.insert(lease.id, LeaseTime::begin(lease.ttl, GrantState::Pending));
        true
    }

    /// Begins the time of a lease that is there, or may be.
    pub(crate) fn begin(&self, lease: Lease) {
        let time = LeaseTime::begin(lease.ttl, GrantState::Since(Instant::now()));
        self.times().insert(lease.id, time);
        if time.due() < *self.next_scan() {
            self.sooner.notify_one();
        }
    }

    /// Forgets a lease, which is not there or not any more.
    fn forget(&self, id: LeaseId) {
        self.times().remove(&id);
    }

    /// Ends a lease now: whether the store still has it is not known.
    pub(crate) fn end(&self, id: LeaseId) {
        if let Some(time) = self.times().get_mut(&id) {
            time.end = Instant::now();
        }
        self.sooner.notify_one();
    }

    /// Forgets a lease, and reads all from the store again.
    fn reload(&self, id: LeaseId) {
        self.forget(id);
        self.loaded.send_replace(None);
        self.sooner.notify_one();
    }

    /// Gives a lease its full time again; `None` if it has ended or was never there.
    fn renew(&self, id: LeaseId) -> Option<TimeLeft> {
        let (mut times, now) = (self.times(), Instant::now());
        let time = times.get_mut(&id).filter(|time| time.is_there() && now < time.end)?;
        time.end = after(now, time.ttl);
        Some(TimeLeft { ttl: time.ttl, left: time.ttl })
    }

    /// The rest of a lease's time; `None` if it was never there, or is revoked.
    pub(crate) fn left(&self, id: LeaseId) -> Option<TimeLeft> {
        let (times, now) = (self.times(), Instant::now());
        let time = times.get(&id).filter(|time| time.is_there())?;
        Some(TimeLeft { ttl: time.ttl, left: time.end.saturating_duration_since(now) })
    }

    /// All leases, in the order of their numbers.
    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        let times = self.times();
        let mut ids: Vec<_> = times.iter().filter(|(_, time)| time.is_there()).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// True if a lease has this number, or is about to.
    pub(crate) fn has(&self, id: LeaseId) -> bool {
        self.times().contains_key(&id)
    }

    /// Waits until the leases of the store that is there were read. False if that takes too long.
    async fn is_loaded(&self, backing: &dyn Backing) -> bool {
        let is_there = |loaded: &Option<StoreGeneration>| *loaded == Some(backing.place());
        if !is_there(&self.loaded.borrow()) {
            self.sooner.notify_one();
        }
        // The clock lives as long as its handles, so only time can be over.
        matches!(timeout(LEASES_KNOWN_TIMEOUT, self.loaded.subscribe().wait_for(is_there)).await, Ok(Ok(_)))
    }

    /// Has every lease end in its time, for ever.
    pub(crate) async fn run(&self, backing: &dyn Backing) {
        loop {
            let place = backing.place();
            if *self.loaded.borrow() != Some(place)
                && let Err(error) = self.load(backing, place).await
            {
                tracing::warn!(%error, "the leases cannot be read yet; their keys stay");
                let _ = timeout(CLOCK_INTERVAL, self.sooner.notified()).await;
                continue;
            }
            let ended = self.ended();
            if ended.is_empty() {
                // In both cases the clock looks again.
                let _ = timeout(self.next(), self.sooner.notified()).await;
            }
            for id in ended {
                if backing.place() != place {
                    // Another store is there now.
                    break;
                }
                // A client may have revoked it, and granted another one of this number.
                if self.times().get(&id).is_some_and(|time| time.has_ended(Instant::now())) {
                    self.revoke(backing, place, id).await;
                }
            }
        }
    }

    /// Revokes a lease that has ended.
    async fn revoke(&self, backing: &dyn Backing, place: StoreGeneration, id: LeaseId) {
        match backing.revoke(id, place).await {
            Ok(_) => {
                tracing::debug!(%id, "a lease has ended");
                self.forget(id);
            }
            Err(error) if *error.kind() == ErrorKind::LeaseNotFound => self.forget(id),
            Err(_) if backing.place() != place => {}
            Err(error) => {
                tracing::warn!(%id, %error, "a lease has ended and its keys are still there; trying again");
                if let Some(time) = self.times().get_mut(&id) {
                    time.revoke_from = Instant::now() + REVOKE_RETRY_INTERVAL;
                }
            }
        }
    }

    /// Begins the time of all leases anew.
    async fn load(&self, backing: &dyn Backing, place: StoreGeneration) -> kv::Result<()> {
        let begun = Instant::now();
        let leases = backing.leases().await?;
        let mut times = self.times();
        // The list may be older than a grant that is under way, or has just been confirmed.
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

    /// The leases whose time is over, in the order in which they are due. No renewal brings one of them back.
    fn ended(&self) -> Vec<LeaseId> {
        let (times, now) = (self.times(), Instant::now());
        let due = times.iter().filter(|(_, time)| time.has_ended(now));
        let mut due: Vec<_> = due.map(|(id, time)| (time.due(), *id)).collect();
        due.sort_unstable();
        due.into_iter().map(|(_, id)| id).collect()
    }

    /// How long no lease ends, at most as long as the clock may go without a look at the store.
    fn next(&self) -> Duration {
        let now = Instant::now();
        // A lease that is granted from here on sees the new time, or is seen here.
        let mut next_scan = self.next_scan();
        let due = self.times().values().filter(|time| time.is_there()).map(LeaseTime::due).min();
        *next_scan = due.unwrap_or(now + CLOCK_INTERVAL).min(now + CLOCK_INTERVAL);
        next_scan.saturating_duration_since(now)
    }
}
