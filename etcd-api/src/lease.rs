//! The service Lease, which is not offered yet: no lease exists.

use std::pin::Pin;

use async_trait::async_trait;
use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse, PbLeaseLeasesRequest,
    PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse, PbLeaseService, PbLeaseTimeToLiveRequest,
    PbLeaseTimeToLiveResponse,
};
use futures::Stream;
use tonic::{Request, Response, Status, Streaming};

use crate::Api;
use crate::refusals::Refusal;

#[async_trait]
impl PbLeaseService for Api {
    type LeaseKeepAliveStream = Pin<Box<dyn Stream<Item = Result<PbLeaseKeepAliveResponse, Status>> + Send>>;

    async fn lease_grant(&self, _: Request<PbLeaseGrantRequest>) -> Result<Response<PbLeaseGrantResponse>, Status> {
        Err(Status::failed_precondition("this store keeps no leases"))
    }

    async fn lease_revoke(&self, _: Request<PbLeaseRevokeRequest>) -> Result<Response<PbLeaseRevokeResponse>, Status> {
        Err(Refusal::LeaseNotFound.into())
    }

    async fn lease_keep_alive(
        &self,
        _: Request<Streaming<PbLeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        Err(Refusal::LeaseNotFound.into())
    }

    async fn lease_time_to_live(
        &self,
        request: Request<PbLeaseTimeToLiveRequest>,
    ) -> Result<Response<PbLeaseTimeToLiveResponse>, Status> {
        let now = self.revision().await?;
        // etcd answers with this time for a lease that is gone.
        let answer = PbLeaseTimeToLiveResponse {
            header: self.header(now),
            id: request.into_inner().id,
            ttl: -1,
            ..Default::default()
        };
        Ok(Response::new(answer))
    }

    async fn lease_leases(&self, _: Request<PbLeaseLeasesRequest>) -> Result<Response<PbLeaseLeasesResponse>, Status> {
        let now = self.revision().await?;
        Ok(Response::new(PbLeaseLeasesResponse { header: self.header(now), ..Default::default() }))
    }
}
