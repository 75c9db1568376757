//! Defines what etcd's API needs from a store besides keys and values: identity, sizes, leases and maintenance.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use kv::{GrantOutcome, Key, Lease, LeaseId, Revision};

/// The name and URLs of the etcd cluster's only member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberIdentity {
    /// The member's name.
    pub name: String,
    /// The URLs by which clients reach the member.
    pub urls: Vec<String>,
}

/// Identifies the store behind the API; changes when another store replaces it. Two stores that were made from the same
/// files have the same ids, but different generations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreGeneration {
    /// The id of the cluster. A restored store gets a new cluster id, so that clients notice the replacement.
    pub cluster: u64,
    /// The id of the cluster's only etcd member.
    pub member: u64,
    /// A number that grows whenever another store replaces the current store.
    pub generation: u64,
}

/// The disk space of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSizes {
    /// The size of the store's files.
    pub total: u64,
    /// The number of bytes in use in the store's files.
    pub used: u64,
}

/// A store that the API serves to clients.
#[async_trait]
pub trait Backing: Debug + Send + Sync + 'static {
    /// Returns the key-value store that the API serves.
    fn store(&self) -> Arc<dyn kv::Store>;

    /// Returns a second handle to the store, for transactions without puts. On a full disk, the handle that this method
    /// returns may accept transactions that [`store`](Self::store) refuses.
    fn store_to_release(&self) -> Arc<dyn kv::Store>;

    /// Returns the name and URLs of the cluster's only member.
    fn identity(&self) -> MemberIdentity;

    /// Identifies the store that is open now. The method must be cheap, because the API calls it for every answer.
    fn place(&self) -> StoreGeneration;

    /// Returns the disk space that the store takes.
    ///
    /// # Errors
    /// Any error if the store cannot be reached or measured.
    async fn sizes(&self) -> kv::Result<StoreSizes>;

    /// Checks that the disk has space for puts.
    ///
    /// # Errors
    /// `NoSpace` if the disk has no space for puts; any error if the store cannot be reached.
    async fn check_room(&self) -> kv::Result<()>;

    /// Raises the oldest revision that clients of the API may read. If the store cannot keep a separate oldest revision
    /// for API clients, this method compacts the store itself.
    ///
    /// # Errors
    /// Any store error from the compaction.
    async fn compact(&self, to: Revision) -> kv::Result<()>;

    /// Returns the oldest revision that clients of the API may read; unset if clients may read all revisions.
    fn oldest(&self) -> Revision;

    /// Grants a lease and records the lease durably in the store.
    ///
    /// # Errors
    /// `Unsupported`, with advice, if the store keeps no leases; any store error.
    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome>;

    /// Revokes a lease unless another store has replaced the store `of`. Deletes the lease and its keys in one
    /// transaction, and returns the transaction's revision.
    ///
    /// # Errors
    /// `LeaseNotFound` if the store has no lease with this id; `RevisionRegressed` if another store has replaced the
    /// store `of`; any store error.
    async fn revoke(&self, id: LeaseId, of: StoreGeneration) -> kv::Result<Revision>;

    /// Lists all granted leases.
    ///
    /// # Errors
    /// Any store error.
    async fn leases(&self) -> kv::Result<Vec<Lease>>;

    /// Lists the keys that are attached to a lease, in ascending order.
    ///
    /// # Errors
    /// Any store error.
    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>>;

    /// Shrinks the store's files by their unused space. Other requests to the store wait until the files are shrunk.
    ///
    /// # Errors
    /// Any store error.
    async fn defragment(&self) -> kv::Result<()>;
}
