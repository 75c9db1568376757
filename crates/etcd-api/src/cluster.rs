//! The service Cluster: one member, which stays the only one.

use async_trait::async_trait;
use etcd_client::proto::{
    PbClusterService, PbMember, PbMemberAddRequest, PbMemberAddResponse, PbMemberListRequest, PbMemberListResponse,
    PbMemberPromoteRequest, PbMemberPromoteResponse, PbMemberRemoveRequest, PbMemberRemoveResponse,
    PbMemberUpdateRequest, PbMemberUpdateResponse,
};
use tonic::{Request, Response, Status};

use crate::refusals::unsupported;
use crate::{Api, Identity};

const ONE: &str = "the store has one member";

#[async_trait]
impl PbClusterService for Api {
    async fn member_list(&self, _: Request<PbMemberListRequest>) -> Result<Response<PbMemberListResponse>, Status> {
        let now = self.recent_revision().await?;
        let Identity { name, urls } = self.backing.identity();
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
