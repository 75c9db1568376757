//! The service Lease.

use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse, PbLeaseLeasesRequest,
    PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse, PbLeaseService, PbLeaseStatus,
    PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse,
};
use futures::Stream;
use futures::stream::unfold;
use kv::{ErrorKind, Granted, Lease, LeaseId, Outcome, Revision};
use tonic::{Request, Response, Status, Streaming};

use crate::lease_clock::Left;
use crate::refusals::{Refusal, status};
use crate::{Api, RECENT};

/// The shortest time to live, in seconds: as with an etcd of the usual settings, a shorter one is raised to it.
const SHORTEST: i64 = 2;
/// How long `LeaseTimeToLive` and `LeaseLeases` wait for the store while another process has it.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time to live of a lease that is not there, as etcd says it.
const GONE: i64 = -1;

#[async_trait]
impl PbLeaseService for Api {
    type LeaseKeepAliveStream = Pin<Box<dyn Stream<Item = Result<PbLeaseKeepAliveResponse, Status>> + Send>>;

    async fn lease_grant(
        &self,
        request: Request<PbLeaseGrantRequest>,
    ) -> Result<Response<PbLeaseGrantResponse>, Status> {
        let PbLeaseGrantRequest { ttl, id } = request.into_inner();
        let ttl = Duration::from_secs(ttl.max(SHORTEST).unsigned_abs());
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
        let Some((lease, Left { ttl, left })) = left else {
            return Ok(Response::new(PbLeaseTimeToLiveResponse { header, id, ttl: GONE, ..Default::default() }));
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
            Ok(Granted::New) => {
                self.clock.begin(lease);
                Ok(())
            }
            // The store has a lease that the clock does not know.
            Ok(Granted::Taken) => {
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
        let header = self.header(self.revision_of_leases(RECENT).await?);
        let renewed = LeaseId::new(id).and_then(|id| self.clock.renew(id));
        Ok(PbLeaseKeepAliveResponse { header, id, ttl: renewed.map_or(0, |left| seconds(left.ttl)) })
    }
}

/// Whole seconds, as etcd counts them down.
fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
