//! The service Auth, as a server without users answers. `etcd-client` has no name for two of its messages, so its trait cannot be
//! implemented: this service looks at the method's name.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use etcd_client::proto::PbResponseHeader;
use http::{Request, Response};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::Api;

/// The request of `AuthStatus`.
#[derive(Clone, PartialEq, prost::Message)]
struct AuthStatusRequest {}

/// The answer of `AuthStatus`.
#[derive(Clone, PartialEq, prost::Message)]
struct AuthStatusResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<PbResponseHeader>,
    #[prost(bool, tag = "2")]
    enabled: bool,
    #[prost(uint64, tag = "3")]
    auth_revision: u64,
}

/// The service: there are no users, and none can be made.
#[derive(Clone, Debug)]
pub(crate) struct Auth(pub(crate) Api);

impl NamedService for Auth {
    const NAME: &'static str = "etcdserverpb.Auth";
}

impl Service<Request<Body>> for Auth {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Nobody can enable it either, and nobody can make the users that this would take.
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

/// The method `AuthStatus`.
struct AuthStatus(Api);

impl UnaryService<AuthStatusRequest> for AuthStatus {
    type Response = AuthStatusResponse;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<AuthStatusResponse>, Status>> + Send>>;

    fn call(&mut self, _: tonic::Request<AuthStatusRequest>) -> Self::Future {
        let api = self.0.clone();
        Box::pin(async move {
            let header = api.header(api.recent_revision().await?);
            Ok(tonic::Response::new(AuthStatusResponse { header, enabled: false, auth_revision: 1 }))
        })
    }
}
