//! The held store as the API needs it.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use datastore::held::Held;
use etcd_api::{Backing, Identity, Place, Sizes};
use kv::{Error, ErrorKind, Granted, Key, Lease, LeaseId, Operation, Revision, Store};

/// A held store, and the URLs by which clients reach it.
#[derive(Debug)]
pub(crate) struct Served {
    held: Held,
    urls: Vec<String>,
}

impl Served {
    pub(crate) fn new(held: Held, urls: Vec<String>) -> Self {
        Self { held, urls }
    }
}

#[async_trait]
impl Backing for Served {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.held.clone())
    }

    fn store_to_release(&self) -> Arc<dyn Store> {
        Arc::new(self.held.to_release())
    }

    fn identity(&self) -> Identity {
        Identity { name: "margay".to_owned(), urls: self.urls.clone() }
    }

    /// A restored store does not share its id with the one before.
    fn place(&self) -> Place {
        let ((cluster, member), generation) = self.held.place();
        Place { cluster, member, generation }
    }

    async fn sizes(&self) -> kv::Result<Sizes> {
        let folder = self.held.location().path().map(Path::to_owned);
        let measured = tokio::task::spawn_blocking(move || folder.map_or(Ok(0), |folder| bytes(&folder))).await;
        let total = measured.map_err(io::Error::other).and_then(|bytes| bytes).map_err(|error| {
            Error::new(ErrorKind::Io, Operation::Range, self.held.location().to_string()).with_source(error)
        })?;
        Ok(Sizes { total, used: total })
    }

    async fn check_room(&self) -> kv::Result<()> {
        self.held.check_room().await
    }

    async fn compact(&self, to: Revision) -> kv::Result<()> {
        self.held.with_embedded(move |store, _| async move { store.compact_for_clients(to).await }).await
    }

    fn oldest(&self) -> Revision {
        self.held.oldest_for_clients()
    }

    async fn grant(&self, lease: Lease) -> kv::Result<Granted> {
        let granted = self.held.with_embedded(move |store, _| async move { store.grant(lease).await }).await;
        granted.map_err(|error| match error.kind() {
            ErrorKind::Unsupported => {
                let raise = format!("raise its format with: margay --store {} store upgrade", self.held.location());
                let why = error.detail().unwrap_or_default().to_owned();
                error.with_detail(format!("{why}; {raise}"))
            }
            _ => error,
        })
    }

    async fn revoke(&self, id: LeaseId, of: Place) -> kv::Result<Revision> {
        let replaced = self.held.replaced(Operation::Txn);
        self.held
            .with_embedded(move |store, generation| async move {
                if generation == of.generation { store.revoke(id).await } else { Err(replaced) }
            })
            .await
    }

    async fn leases(&self) -> kv::Result<Vec<Lease>> {
        self.held.with_embedded(|store, _| async move { store.leases().await }).await
    }

    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>> {
        self.held.with_embedded(move |store, _| async move { store.leased(id).await }).await
    }

    async fn defragment(&self) -> kv::Result<()> {
        self.held.defragment().await
    }
}

/// The bytes of all files in a folder. Files that go meanwhile count as nothing.
fn bytes(path: &Path) -> io::Result<u64> {
    let found = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        found => found?,
    };
    if !found.is_dir() {
        return Ok(found.len());
    }
    fs::read_dir(path)?.map(|entry| bytes(&entry?.path())).sum()
}
