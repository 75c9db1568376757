//! etcd's v3 API in front of a store: translation alone. What the store does is the store's, and what etcd's clients see of it,
//! to the texts of errors, is decided here.
//!
//! [`Api`] has the services; [`Backing`] is what they need besides [`kv::Store`]. No engine and no IPAM is known here.
//!
//! Leases are not served yet: a request with one gets etcd's error for a lease that does not exist.

mod backing;
mod cluster;
mod convert;
mod kv_service;
mod lease;
mod maintenance;
mod refusals;
mod sorting;
mod watch;
mod watch_cursor;

use std::sync::Arc;

use etcd_client::proto::{
    PbClusterServer, PbKvServer, PbLeaseServer, PbMaintenanceServer, PbResponseHeader, PbWatchServer,
};
use kv::Revision;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;

pub use backing::{Backing, Identity, Sizes};

/// The version that `Maintenance.Status` reports: the oldest whose reports of progress clients believe. They
/// are never ahead of an event here.
pub const VERSION: &str = "3.5.13";

/// A request may have so many bytes, as with etcd: 1.5 MiB and some room for what surrounds keys and values.
const MAX_REQUEST: usize = 1_572_864 + 512 * 1024;

/// A connection may have so many streams that its client has given up and the server has not seen yet: a program that drops calls
/// is no attack.
const RESETS: usize = 10_000;

/// A connection may have so many open streams. Clients that open one for each watch wait at the end of the default, 200.
const STREAMS: u32 = 10_000;

/// etcd's services over a store. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Api {
    backing: Arc<dyn Backing>,
}

impl Api {
    /// The services over this store.
    pub fn new(backing: Arc<dyn Backing>) -> Self {
        Self { backing }
    }

    /// All services, for a server of gRPC.
    pub fn routes(&self) -> Routes {
        // An answer may be as large as what is stored, as with etcd.
        Routes::new(
            PbKvServer::new(self.clone()).max_decoding_message_size(MAX_REQUEST).max_encoding_message_size(usize::MAX),
        )
        .add_service(PbWatchServer::new(self.clone()).max_encoding_message_size(usize::MAX))
        .add_service(PbLeaseServer::new(self.clone()))
        .add_service(PbClusterServer::new(self.clone()))
        .add_service(PbMaintenanceServer::new(self.clone()))
    }

    /// A server of gRPC with all services, for any connections. TCP connections need `set_nodelay`, which only the caller can set.
    pub fn server(&self) -> Router {
        Server::builder()
            .max_concurrent_streams(STREAMS)
            .http2_max_pending_accept_reset_streams(Some(RESETS))
            .add_routes(self.routes())
    }

    /// The header of an answer at this revision.
    fn header(&self, revision: Revision) -> Option<PbResponseHeader> {
        let Identity { cluster, member, .. } = self.backing.identity();
        Some(PbResponseHeader { cluster_id: cluster, member_id: member, revision: revision.get(), raft_term: 1 })
    }

    /// The store's revision, by a read that costs no key.
    async fn revision(&self) -> Result<Revision, Status> {
        let nothing = kv::RangeRequest::new(kv::Range::key("\0")).with_content(kv::Content::CountOnly);
        let found = self.backing.store().range(nothing).await.map_err(|error| refusals::status(&error))?;
        Ok(found.revision)
    }
}
