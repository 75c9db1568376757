//! Starts a server of the API for a store in memory, on a free loopback port.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use etcd_api::{Api, Backing};
use futures::stream::unfold;
use kv_mvcc::{FORMAT_WITH_LEASES, MemoryTable, MvccStore, Options};
pub(crate) use testkit::backing::Memory;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A server of the API that runs until it is stopped.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    store: Arc<MvccStore>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Starts an etcd API server for the store whose rows are in `table`.
    ///
    /// # Errors
    /// Any error if no loopback port is free or the table is damaged.
    pub(crate) async fn start(table: &MemoryTable) -> Result<Self, Error> {
        Self::start_behind(table, |backing| Arc::new(backing)).await
    }

    /// Starts an etcd API server for a store with the rows of `table`; `spoil` wraps the store's backing to inject
    /// failures.
    ///
    /// # Errors
    /// Any error if no loopback port is free or the table is damaged.
    pub(crate) async fn start_behind(
        table: &MemoryTable,
        spoil: impl FnOnce(Memory) -> Arc<dyn Backing>,
    ) -> Result<Self, Error> {
        let options = Options { name: "memory", format: FORMAT_WITH_LEASES, ..Options::default() };
        let store = Arc::new(MvccStore::open(Box::new(table.clone()), options)?);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let backing = Memory { store: Arc::clone(&store), url: format!("http://{address}") };
        let connections = unfold(listener, |listener| async {
            let accepted = listener.accept().await.and_then(|(stream, _)| stream.set_nodelay(true).map(|()| stream));
            Some((accepted, listener))
        });
        let api = Api::new(spoil(backing)).with_report_interval(Duration::from_millis(100));
        let task = tokio::spawn(async move {
            tokio::select! {
                served = api.server().serve_with_incoming(Box::pin(connections)) => served,
                () = api.end_leases() => Ok(()),
            }
        });
        Ok(Self { address, store, task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops the server and closes the server's store.
    ///
    /// # Errors
    /// Any store error.
    pub(crate) async fn stop(&self) -> Result<(), Error> {
        self.task.abort();
        Ok(self.store.close().await?)
    }
}
