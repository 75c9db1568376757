//! The service Watch, with small buffers: a client may open a stream for each watch, and the usual two buffers of 8 KiB each would
//! be half of what such a watch takes.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use etcd_client::proto::{PbWatchRequest, PbWatchResponse};
use http::{Request, Response};
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::Api;
use crate::limits::MAX_REQUEST;
use crate::watch::Answers;

/// How many bytes a buffer has at first.
const BUFFER: usize = 256;
/// At how many bytes messages that are there together are sent.
const SENT: usize = 32 * 1024;

type Prost = ProstCodec<PbWatchResponse, PbWatchRequest>;

/// Protobuf with small buffers.
#[derive(Debug, Default)]
struct Small;

impl Codec for Small {
    type Encode = PbWatchResponse;
    type Decode = PbWatchRequest;
    type Encoder = <Prost as Codec>::Encoder;
    type Decoder = <Prost as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        Prost::raw_encoder(BufferSettings::new(BUFFER, SENT))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Prost::raw_decoder(BufferSettings::new(BUFFER, SENT))
    }
}

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct WatchService(pub(crate) Api);

impl NamedService for WatchService {
    const NAME: &'static str = "etcdserverpb.Watch";
}

impl Service<Request<Body>> for WatchService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() != "/etcdserverpb.Watch/Watch" {
            let unknown = Status::new(Code::Unimplemented, "no such method").into_http();
            return Box::pin(ready(Ok(unknown)));
        }
        let watch = Watch(self.0.clone());
        let mut grpc = Grpc::new(Small).apply_max_message_size_config(Some(MAX_REQUEST), Some(usize::MAX));
        Box::pin(async move { Ok(grpc.streaming(watch, request).await) })
    }
}

/// The method `Watch`.
struct Watch(Api);

impl StreamingService<PbWatchRequest> for Watch {
    type Response = PbWatchResponse;
    type ResponseStream = Answers;
    type Future = Ready<Result<tonic::Response<Answers>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<PbWatchRequest>>) -> Self::Future {
        ready(Ok(tonic::Response::new(self.0.watches(request.into_inner()))))
    }
}
