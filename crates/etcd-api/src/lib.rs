#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Serves etcd's v3 API for a store. The crate only translates: the store carries out each request. This crate returns
//! a store's results in the form that etcd's clients expect, including etcd's error texts.
//!
//! The type [`Api`] implements the gRPC services. The trait [`Backing`] has the methods that the services need besides
//! [`kv::Store`]. The crate is independent of storage engines and of IPAM.
//!
mod backing;
mod cluster;
mod convert;
mod kv_service;
mod lease;
mod limits;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use etcd_client::proto::{PbClusterServer, PbKvServer, PbLeaseServer, PbMaintenanceServer, PbResponseHeader};
use kv::Revision;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tower::layer::{Layer, layer_fn};

pub use backing::{Backing, MemberIdentity, StoreGeneration, StoreSizes};
pub use limits::{ClientShare, LimitedService};

use lease::LeaseClock;
use limits::{Limits, MAX_REQUEST_BYTES};
use watch::WatchService;

/// The version that `Maintenance.Status` reports. Clients trust a server's watch progress reports only if the server
/// reports at least etcd 3.5.13. Reporting an etcd version with reliable progress reports is safe, because this API's
/// progress reports are never ahead of an event.
pub const VERSION: &str = "3.5.13";

/// Maximum number of streams per connection that the client has reset before the server accepted them. The limit is
/// high, because a client that cancels many calls is not attacking the server.
const MAX_PENDING_RESETS: usize = 10_000;

/// Maximum number of open streams per connection. With the default limit of 200 streams, clients that open a stream for
/// each watch would have to wait.
const MAX_STREAMS_PER_CONNECTION: u32 = 10_000;

/// Maximum number of open watches of all clients. Each watch takes about 3 KiB of memory.
const MAX_WATCHES: usize = 20_000;

/// Default interval of a watch's progress reports, as in etcd.
const REPORT_INTERVAL: Duration = Duration::from_secs(10 * 60);
/// Minimum interval of a watch's progress reports, as in etcd.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// How long a request about the server itself waits for the store while another process has it. If this time runs out,
/// the answer's header has the newest revision of all earlier answers.
const STORE_WAIT_TIMEOUT: Duration = Duration::from_millis(100);

/// Implements etcd's gRPC services for a store. An `Api` is cheap to clone.
#[derive(Clone, Debug)]
pub struct Api {
    backing: Arc<dyn Backing>,
    /// The newest revision among the answers so far, and the cluster id in the answer that carried it.
    newest: Arc<Mutex<Option<(u64, Revision)>>>,
    /// Permits for opening further watches.
    watches: Arc<Semaphore>,
    clock: Arc<LeaseClock>,
    limits: Limits,
    report_interval: Duration,
}

impl Api {
    /// Creates etcd's gRPC services for a store.
    pub fn new(backing: Arc<dyn Backing>) -> Self {
        let watches = Arc::new(Semaphore::new(MAX_WATCHES));
        let report_interval = REPORT_INTERVAL;
        Self {
            backing,
            newest: Arc::default(),
            watches,
            clock: Arc::default(),
            limits: Limits::default(),
            report_interval,
        }
    }

    /// Sets the interval of a watch's progress reports (default 10 minutes, at least 100 ms).
    #[must_use]
    pub fn with_report_interval(self, interval: Duration) -> Self {
        Self { report_interval: interval.max(MIN_REPORT_INTERVAL), ..self }
    }

    /// Revokes leases when their time ends. The returned future never completes. Lease requests are answered only after
    /// the future that this function returns has been polled, because polling loads the leases.
    pub async fn end_leases(&self) {
        self.clock.run(&*self.backing).await;
    }

    /// Returns the routes of all services, for a gRPC server.
    pub fn routes(&self) -> Routes {
        // The size of an answer is unlimited, because an answer may be as large as the stored data, as in etcd.
        Routes::new(
            PbKvServer::new(self.clone())
                .max_decoding_message_size(MAX_REQUEST_BYTES)
                .max_encoding_message_size(usize::MAX),
        )
        .add_service(WatchService(self.clone()))
        .add_service(PbLeaseServer::new(self.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(PbClusterServer::new(self.clone()))
        .add_service(PbMaintenanceServer::new(self.clone()))
        .add_service(cluster::AuthService(self.clone()))
        .add_service(health())
    }

    /// Returns a gRPC server with all services, for any kind of connection. The caller must call `set_nodelay` on each
    /// TCP connection. A connection should have a [`ClientShare`] as its `ConnectInfo`; without a [`ClientShare`], each
    /// request gets a share of its own.
    pub fn server(&self) -> Router<impl Layer<Routes, Service = LimitedService<Routes>> + Clone + use<>> {
        let limits = self.limits.clone();
        Server::builder()
            .layer(layer_fn(move |services| LimitedService::new(services, limits.clone())))
            .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
            .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
            .add_routes(self.routes())
    }

    fn header(&self, revision: Revision) -> Option<PbResponseHeader> {
        let StoreGeneration { cluster, member, .. } = self.backing.place();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.is_none_or(|(of, newest)| of != cluster || newest < revision) {
            *newest = Some((cluster, revision));
        }
        Some(PbResponseHeader { cluster_id: cluster, member_id: member, revision: revision.get(), raft_term: 1 })
    }

    /// Reads the store's revision without reading a key.
    async fn revision(&self) -> Result<Revision, Status> {
        let nothing = kv::RangeRequest::new(kv::Range::key("\0")).with_content(kv::Content::CountOnly);
        let found = self.backing.store().range(nothing).await.map_err(|error| convert::status(&error))?;
        Ok(found.revision)
    }

    /// Returns a recent revision, like [`Self::revision_within`], for a request that must be answered without waiting
    /// for another process.
    async fn recent_revision(&self) -> Result<Revision, Status> {
        self.revision_within(STORE_WAIT_TIMEOUT).await
    }

    /// Returns the store's revision. A read fails while another process has the store, or while a full disk keeps the
    /// store from being opened again. If the store cannot be read within `patience`, returns the newest revision that
    /// an earlier answer reported.
    async fn revision_within(&self, patience: Duration) -> Result<Revision, Status> {
        let read = timeout(patience, self.revision()).await;
        if let Ok(Ok(revision)) = read {
            return Ok(revision);
        }
        let cluster = self.backing.place().cluster;
        let newest = *self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let known = newest.and_then(|(of, revision)| (of == cluster).then_some(revision));
        known.ok_or_else(|| match read {
            Ok(Err(failed)) => failed,
            _ => convert::Refusal::Timeout.status(),
        })
    }
}

/// Returns the service `grpc.health.v1.Health`, which always reports the status `SERVING`.
fn health() -> HealthServer<HealthService> {
    HealthServer::new(HealthService::from_health_reporter(HealthReporter::new()))
}
