//! The service Maintenance: where the store stands.

use std::pin::Pin;

use async_trait::async_trait;
use etcd_client::proto::{
    PbAlarmMember, PbAlarmRequest, PbAlarmResponse, PbDefragmentRequest, PbDefragmentResponse, PbDowngradeRequest,
    PbDowngradeResponse, PbHashKvRequest, PbHashKvResponse, PbHashRequest, PbHashResponse, PbMaintenanceService,
    PbMoveLeaderRequest, PbMoveLeaderResponse, PbSnapshotRequest, PbSnapshotResponse, PbStatusRequest,
    PbStatusResponse,
};
use futures::Stream;
use kv::ErrorKind;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use crate::refusals::{status, unsupported};
use crate::{Api, RECENT, VERSION};

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

    /// NOSPACE is on as long as the disk has no room for puts, and nobody can change that by a request.
    async fn alarm(&self, request: Request<PbAlarmRequest>) -> Result<Response<PbAlarmResponse>, Status> {
        const ACTIVATE: i32 = 1;
        const NOSPACE: i32 = 1;
        if request.into_inner().action == ACTIVATE {
            return Err(unsupported("raising an alarm"));
        }
        let now = self.recent_revision().await?;
        // While another process has the store, no alarm is known.
        let is_full = match timeout(RECENT, self.backing.check_room()).await {
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
