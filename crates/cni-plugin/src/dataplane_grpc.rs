//! The client of an external data plane: a gRPC server that creates and removes the interfaces of containers.
//!
//! The request and reply messages are those of the gRPC service `cni.CniDataplane` (proto3), with Calico's field
//! numbers.

use std::collections::BTreeMap;
use std::future::{Ready, ready};
use std::io;
use std::net::IpAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use agent::{CniError, Result};
use http::Uri;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use prost::Message;
use serde_json::Value;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::Service;

use crate::gojson::{GoJson, printed, quoted, untyped};
use crate::kubernetes::{ApiStream, HardwareAddress};

/// Time limit of a gRPC call to the data plane, as in Calico's plugin.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const SOCKET_ADVICE: &str =
    "dataplane_options.socket is the address of the program that makes this network's interfaces; check that it runs";

/// The data plane of a network, which creates the interfaces of containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dataplane {
    /// The kernel's data plane, configured through netlink.
    Linux,
    /// An external program that creates interfaces on request over gRPC.
    Grpc(GrpcDataplane),
}

/// The socket of an external data plane, and the options that the network configuration has for that data plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrpcDataplane {
    target: String,
    /// The string-valued fields of `dataplane_options`; they are sent with every request to the data plane.
    options: BTreeMap<String, String>,
}

/// The interface of a container, as created by the external data plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CreatedInterface {
    pub(crate) host_interface: String,
    /// The MAC address of the container's interface.
    pub(crate) mac: HardwareAddress,
}

impl Dataplane {
    /// Reads `dataplane_options`. If the network configuration has no `dataplane_options`, the kernel is the data
    /// plane. As in Calico, the names of the fields in `dataplane_options` are case-sensitive.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if `dataplane_options` has an unknown `type` or no `socket`.
    pub(crate) fn choose(options: Option<&GoJson>) -> Result<Self> {
        let options = options.map_or(Value::Null, untyped);
        let kind = match options.get("type") {
            None => return Ok(Self::Linux),
            Some(kind) => printed(kind),
        };
        if kind != "grpc" {
            return Err(CniError::internal(format!("invalid dataplane type: {kind}")));
        }
        let Some(target) = options["socket"].as_str().map(str::to_owned) else {
            return Err(CniError::internal("GRPC dataplane socket not configured").with_details(SOCKET_ADVICE));
        };
        let text = |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.to_owned()));
        let options = options.as_object().into_iter().flatten().filter_map(text).collect();
        Ok(Self::Grpc(GrpcDataplane { target, options }))
    }
}

impl GrpcDataplane {
    /// Asks the external data plane to create a container's interface, and fills in `dataplane_options` of the request.
    /// The gRPC call takes at most the remaining time `left`, and at most five seconds.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if the data plane cannot be reached or refuses the request.
    pub(crate) async fn add(&self, mut request: AddRequest, left: Duration) -> Result<CreatedInterface> {
        request.dataplane_options.clone_from(&self.options);
        let reply: AddReply = self.call("/cni.CniDataplane/Add", request, left).await?;
        if !reply.successful {
            return Err(refusal(&reply.error_message));
        }
        let mac = HardwareAddress::read(&reply.container_mac).map_err(CniError::internal)?;
        Ok(CreatedInterface { host_interface: reply.host_interface_name, mac })
    }

    /// Asks the external data plane to remove a container's interface. The gRPC call takes at most the remaining time
    /// `left`, and at most five seconds.
    ///
    /// # Errors
    /// Any error of [`add`](Self::add).
    pub(crate) async fn del(&self, interface: &str, netns: &str, left: Duration) -> Result<()> {
        let request = DelRequest {
            interface_name: interface.to_owned(),
            netns: netns.to_owned(),
            dataplane_options: self.options.clone(),
        };
        let reply: DelReply = self.call("/cni.CniDataplane/Del", request, left).await?;
        if reply.successful { Ok(()) } else { Err(refusal(&reply.error_message)) }
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q, left: Duration) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let patience = CALL_TIMEOUT.min(left);
        let deadline = Instant::now() + patience;
        let mut request = Request::new(request);
        request.set_timeout(patience);
        let answer = timeout_at(deadline, self.ask(path, request)).await;
        // The gRPC library also enforces the time limit of a call, but its error message differs from Go's.
        let late = || Status::deadline_exceeded("context deadline exceeded");
        let answer = answer.unwrap_or_else(|_| Err(late()));
        answer.map_err(|status| reported(&if Instant::now() < deadline { status } else { late() }))
    }

    async fn ask<Q, A>(&self, path: &'static str, request: Request<Q>) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let (authority, stream) = connect(&self.target).await?;
        let broken = |error: tonic::transport::Error| {
            // The transport error itself only says "transport error"; its source contains the reason.
            unavailable(&std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
        };
        let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(broken)?;
        let channel = endpoint.connect_with_connector(OnceConnector(Some(stream))).await.map_err(broken)?;
        let mut client = Grpc::new(channel);
        client.ready().await.map_err(broken)?;
        let codec = ProstCodec::<Q, A>::default();
        Ok(client.unary(request, PathAndQuery::from_static(path), codec).await?.into_inner())
    }
}

/// Connects to a gRPC server whose address is written in the notation of Go's gRPC library. Returns the open
/// connection, and the server name that requests on the connection must contain.
async fn connect(target: &str) -> Result<(String, Box<dyn ApiStream>), Status> {
    let dialed = |network: &str, address: &str, error: &io::Error| {
        // Rust appends `(os error N)` to the message of an I/O error, and Go does not.
        let reason = error.to_string().to_lowercase();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        unavailable(&format!("dial {network} {address}: connect: {reason}"))
    };
    if let Some(path) = target.strip_prefix("unix://").or_else(|| target.strip_prefix("unix:")) {
        let stream = UnixStream::connect(path).await.map_err(|error| dialed("unix", path, &error))?;
        return Ok(("localhost".to_owned(), Box::new(stream)));
    }
    let address = ["dns:///", "passthrough:///", "dns:"].iter().find_map(|scheme| target.strip_prefix(scheme));
    let address = address.unwrap_or(target);
    let stream = TcpStream::connect(address).await.map_err(|error| dialed("tcp", address, &error))?;
    // Disable Nagle's algorithm, which may delay a small request.
    let _ = stream.set_nodelay(true);
    Ok((address.to_owned(), Box::new(stream)))
}

/// Returns the error that Go's gRPC client reports for an unreachable server.
fn unavailable(reason: &str) -> Status {
    let reason = quoted(&format!("transport: Error while dialing: {reason}"));
    Status::unavailable(format!("connection error: desc = {reason}"))
}

/// Formats a gRPC error status as Go's gRPC client does.
fn reported(status: &Status) -> CniError {
    let code = match status.code() {
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    };
    CniError::internal(format!("rpc error: code = {code} desc = {}", status.message())).with_details(SOCKET_ADVICE)
}

fn refusal(message: &str) -> CniError {
    CniError::internal(format!("grpc dataplane error: {message}"))
}

/// A connector for tonic that returns an already open connection on its first call, and an error on later calls.
struct OnceConnector(Option<Box<dyn ApiStream>>);

impl Service<Uri> for OnceConnector {
    type Response = TokioIo<Box<dyn ApiStream>>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let gone = || io::Error::other("the connection is gone");
        ready(self.0.take().map(TokioIo::new).ok_or_else(gone))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AddRequest {
    #[prost(string, tag = "1")]
    pub(crate) interface_name: String,
    #[prost(string, tag = "2")]
    pub(crate) netns: String,
    #[prost(string, tag = "3")]
    pub(crate) desired_host_interface_name: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) settings: Option<ContainerSettings>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) container_ips: Vec<IpConfig>,
    /// The destinations of the routes in the container, in CIDR notation.
    #[prost(string, repeated, tag = "6")]
    pub(crate) container_routes: Vec<String>,
    #[prost(message, optional, tag = "7")]
    pub(crate) workload: Option<WorkloadIds>,
    /// The fields of the network configuration's `dataplane_options` whose values are strings.
    #[prost(btree_map = "string, string", tag = "8")]
    pub(crate) dataplane_options: BTreeMap<String, String>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct ContainerSettings {
    #[prost(bool, tag = "1")]
    pub(crate) allow_ip_forwarding: bool,
    #[prost(int32, tag = "2")]
    pub(crate) mtu: i32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct IpConfig {
    #[prost(string, tag = "1")]
    pub(crate) address: String,
    #[prost(string, tag = "2")]
    pub(crate) gateway: String,
}

impl IpConfig {
    /// Converts a container's address, which has the prefix length that the IPAM plugin returned, for the gRPC request.
    pub(crate) fn new(address: IpNet, gateway: Option<IpAddr>) -> Self {
        // Go prints a gateway that is missing as `<nil>`.
        let gateway = gateway.map_or_else(|| "<nil>".to_owned(), |gateway| gateway.to_string());
        Self { address: address.to_string(), gateway }
    }
}

/// The workload that owns the interface, described by its WorkloadEndpoint and its pod's annotations.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WorkloadIds {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) namespace: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[prost(string, tag = "5")]
    pub(crate) endpoint: String,
    #[prost(string, tag = "6")]
    pub(crate) node: String,
    #[prost(string, tag = "7")]
    pub(crate) orchestrator: String,
    #[prost(string, tag = "8")]
    pub(crate) pod: String,
    #[prost(message, repeated, tag = "9")]
    pub(crate) ports: Vec<GrpcPort>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct GrpcPort {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) protocol: String,
    #[prost(uint32, tag = "3")]
    pub(crate) port: u32,
    #[prost(uint32, tag = "4")]
    pub(crate) host_port: u32,
    #[prost(string, tag = "5")]
    pub(crate) host_ip: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct AddReply {
    #[prost(bool, tag = "1")]
    successful: bool,
    #[prost(string, tag = "2")]
    error_message: String,
    #[prost(string, tag = "3")]
    host_interface_name: String,
    #[prost(string, tag = "4")]
    container_mac: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DelRequest {
    #[prost(string, tag = "1")]
    pub(crate) interface_name: String,
    #[prost(string, tag = "2")]
    pub(crate) netns: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) dataplane_options: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct DelReply {
    #[prost(bool, tag = "1")]
    successful: bool,
    #[prost(string, tag = "2")]
    error_message: String,
}

#[cfg(test)]
#[path = "dataplane_grpc/tests.rs"]
mod tests;
