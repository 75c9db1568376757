//! Implements the services Cluster, Maintenance and Auth for a cluster that always has one member and no users.
//!
//! The crate `etcd-client` does not export two of the messages of the service Auth, so [`AuthService`] cannot implement
//! the trait for Auth, and dispatches on the name of the method.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use async_trait::async_trait;
use etcd_client::proto::{
    PbAlarmMember, PbAlarmRequest, PbAlarmResponse, PbClusterService, PbDefragmentRequest, PbDefragmentResponse,
    PbDowngradeRequest, PbDowngradeResponse, PbHashKvRequest, PbHashKvResponse, PbHashRequest, PbHashResponse,
    PbMaintenanceService, PbMember, PbMemberAddRequest, PbMemberAddResponse, PbMemberListRequest, PbMemberListResponse,
    PbMemberPromoteRequest, PbMemberPromoteResponse, PbMemberRemoveRequest, PbMemberRemoveResponse,
    PbMemberUpdateRequest, PbMemberUpdateResponse, PbMoveLeaderRequest, PbMoveLeaderResponse, PbResponseHeader,
    PbSnapshotRequest, PbSnapshotResponse, PbStatusRequest, PbStatusResponse,
};
use futures::Stream;
use kv::ErrorKind;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::convert::{status, unsupported};
use crate::{Api, MemberIdentity, STORE_WAIT_TIMEOUT, VERSION};

const ONE: &str = "the store has one member";

#[async_trait]
impl PbClusterService for Api {
    async fn member_list(&self, _: Request<PbMemberListRequest>) -> Result<Response<PbMemberListResponse>, Status> {
        let now = self.recent_revision().await?;
        let MemberIdentity { name, urls } = self.backing.identity();
        let only = PbMember { id: self.backing.place().member, name, client_ur_ls: urls, ..PbMember::default() };
        Ok(Response::new(PbMemberListResponse { header: self.header(now), members: vec![only] }))
    }

    async fn member_add(&self, _: Request<PbMemberAddRequest>) -> Result<Response<PbMemberAddResponse>, Status> {
        Err(unsupported(ONE))
    }

    async fn member_remove(
        &self,
        _: Request<PbMemberRemoveRequest>,
    ) -> Result<Response<PbMemberRemoveResponse>, Status> {
        Err(unsupported(ONE))
    }

    async fn member_update(
        &self,
        _: Request<PbMemberUpdateRequest>,
    ) -> Result<Response<PbMemberUpdateResponse>, Status> {
        Err(unsupported(ONE))
    }

    async fn member_promote(
        &self,
        _: Request<PbMemberPromoteRequest>,
    ) -> Result<Response<PbMemberPromoteResponse>, Status> {
        Err(unsupported(ONE))
    }
}

#[async_trait]
impl PbMaintenanceService for Api {
    type SnapshotStream = Pin<Box<dyn Stream<Item = Result<PbSnapshotResponse, Status>> + Send>>;

    async fn status(&self, _: Request<PbStatusRequest>) -> Result<Response<PbStatusResponse>, Status> {
        let now = self.recent_revision().await?;
        let sizes = self.backing.sizes().await.map_err(|error| status(&error))?;
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let index = now.get().unsigned_abs();
        Ok(Response::new(PbStatusResponse {
            header: self.header(now),
            version: VERSION.to_owned(),
            db_size: bytes(sizes.total),
            db_size_in_use: bytes(sizes.used),
            leader: self.backing.place().member,
            raft_index: index,
            raft_applied_index: index,
            raft_term: 1,
            ..PbStatusResponse::default()
        }))
    }

    /// The alarm NOSPACE is active while the disk has no space for puts. Clients can neither raise nor clear the
    /// NOSPACE alarm.
    async fn alarm(&self, request: Request<PbAlarmRequest>) -> Result<Response<PbAlarmResponse>, Status> {
        const ACTIVATE: i32 = 1;
        const NOSPACE: i32 = 1;
        if request.into_inner().action == ACTIVATE {
            return Err(unsupported("raising an alarm"));
        }
        let now = self.recent_revision().await?;
        // While another process has the store, the answer to an alarm request contains no alarm.
        let is_full = match timeout(STORE_WAIT_TIMEOUT, self.backing.check_room()).await {
            Ok(Err(error)) if *error.kind() == ErrorKind::NoSpace => true,
            Ok(Err(error)) => return Err(status(&error)),
            Ok(Ok(())) | Err(_) => false,
        };
        let alarm = PbAlarmMember { member_id: self.backing.place().member, alarm: NOSPACE };
        Ok(Response::new(PbAlarmResponse {
            header: self.header(now),
            alarms: is_full.then_some(alarm).into_iter().collect(),
        }))
    }

    async fn defragment(&self, _: Request<PbDefragmentRequest>) -> Result<Response<PbDefragmentResponse>, Status> {
        self.backing.defragment().await.map_err(|error| status(&error))?;
        let now = self.revision().await?;
        Ok(Response::new(PbDefragmentResponse { header: self.header(now) }))
    }

    async fn hash(&self, _: Request<PbHashRequest>) -> Result<Response<PbHashResponse>, Status> {
        Err(unsupported("Hash; use: margay store verify"))
    }

    async fn hash_kv(&self, _: Request<PbHashKvRequest>) -> Result<Response<PbHashKvResponse>, Status> {
        Err(unsupported("HashKV; use: margay store verify"))
    }

    async fn snapshot(&self, _: Request<PbSnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        Err(unsupported("Snapshot; use: margay store backup"))
    }

    async fn move_leader(&self, _: Request<PbMoveLeaderRequest>) -> Result<Response<PbMoveLeaderResponse>, Status> {
        Err(unsupported("MoveLeader: the store has one member"))
    }

    async fn downgrade(&self, _: Request<PbDowngradeRequest>) -> Result<Response<PbDowngradeResponse>, Status> {
        Err(unsupported("Downgrade"))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct AuthStatusRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct AuthStatusResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<PbResponseHeader>,
    #[prost(bool, tag = "2")]
    enabled: bool,
    #[prost(uint64, tag = "3")]
    auth_revision: u64,
}

/// The service Auth. The API has no users, and clients cannot create users.
#[derive(Clone, Debug)]
pub(crate) struct AuthService(pub(crate) Api);

impl NamedService for AuthService {
    const NAME: &'static str = "etcdserverpb.Auth";
}

impl Service<http::Request<Body>> for AuthService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // Clients cannot enable authentication, because authentication requires users and clients cannot create users.
        match request.uri().path() {
            "/etcdserverpb.Auth/AuthStatus" => {
                let status = AuthStatus(self.0.clone());
                Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(status, request).await) })
            }
            "/etcdserverpb.Auth/AuthEnable" => {
                let refused = Status::new(Code::FailedPrecondition, "etcdserver: root user does not exist");
                Box::pin(ready(Ok(refused.into_http())))
            }
            _ => {
                let refused = Status::new(Code::FailedPrecondition, "etcdserver: authentication is not enabled");
                Box::pin(ready(Ok(refused.into_http())))
            }
        }
    }
}

struct AuthStatus(Api);

impl UnaryService<AuthStatusRequest> for AuthStatus {
    type Response = AuthStatusResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<AuthStatusResponse>, Status>> + Send>>;

    fn call(&mut self, _: Request<AuthStatusRequest>) -> Self::Future {
        let api = self.0.clone();
        Box::pin(async move {
            let header = api.header(api.recent_revision().await?);
            Ok(Response::new(AuthStatusResponse { header, enabled: false, auth_revision: 1 }))
        })
    }
}
