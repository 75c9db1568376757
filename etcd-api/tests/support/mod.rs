//! A server of the API over a store in memory, on a free port of loopback.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use etcd_api::{Api, Backing, Identity, Sizes};
use futures::stream::unfold;
use kv::{Granted, Key, Lease, LeaseId, Revision};
use kv_mvcc::{FORMAT_WITH_LEASES, MemoryTable, MvccStore, Options};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A store in memory.
#[derive(Debug)]
struct Memory {
    store: Arc<MvccStore>,
    url: String,
}

#[async_trait]
impl Backing for Memory {
    fn store(&self) -> Arc<dyn kv::Store> {
        self.store.clone()
    }

    fn store_to_release(&self) -> Arc<dyn kv::Store> {
        self.store.clone()
    }

    fn identity(&self) -> Identity {
        let id = self.store.id().as_u64_pair();
        Identity { cluster: id.0, member: id.1, name: "memory".to_owned(), urls: vec![self.url.clone()] }
    }

    async fn sizes(&self) -> kv::Result<Sizes> {
        let bytes = self.store.status().log_bytes;
        Ok(Sizes { total: bytes, used: bytes })
    }

    async fn check_room(&self) -> kv::Result<()> {
        Ok(())
    }

    async fn compact(&self, to: Revision) -> kv::Result<()> {
        self.store.compact_for_clients(to).await
    }

    fn oldest(&self) -> Revision {
        self.store.status().oldest_for_clients
    }

    async fn grant(&self, lease: Lease) -> kv::Result<Granted> {
        self.store.grant(lease).await
    }

    async fn revoke(&self, id: LeaseId) -> kv::Result<Revision> {
        self.store.revoke(id).await
    }

    async fn leases(&self) -> kv::Result<Vec<Lease>> {
        self.store.leases().await
    }

    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>> {
        self.store.leased(id).await
    }

    async fn defragment(&self) -> kv::Result<()> {
        Ok(())
    }
}

/// The server, which runs until it is stopped.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    store: Arc<MvccStore>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Serves the store on this table.
    ///
    /// # Errors
    /// No port, or a damaged table.
    pub(crate) async fn start(table: &MemoryTable) -> Result<Self, Error> {
        let options = Options { name: "memory", format: FORMAT_WITH_LEASES, ..Options::default() };
        let store = Arc::new(MvccStore::open(Box::new(table.clone()), options)?);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let backing = Memory { store: Arc::clone(&store), url: format!("http://{address}") };
        let connections = unfold(listener, |listener| async {
            let accepted = listener.accept().await.and_then(|(stream, _)| stream.set_nodelay(true).map(|()| stream));
            Some((accepted, listener))
        });
        let api = Api::new(Arc::new(backing));
        let task = tokio::spawn(async move {
            tokio::select! {
                served = api.server().serve_with_incoming(Box::pin(connections)) => served,
                () = api.end_leases() => Ok(()),
            }
        });
        Ok(Self { address, store, task })
    }

    /// Where it is.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it, and closes the store.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn stop(&self) -> Result<(), Error> {
        self.task.abort();
        Ok(self.store.close().await?)
    }
}
