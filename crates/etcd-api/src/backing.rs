//! The parts of a store that the API needs besides its keys.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use kv::{GrantOutcome, Key, Lease, LeaseId, Revision};

/// The name and URLs of the only member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberIdentity {
    /// The member's name.
    pub name: String,
    /// The URLs by which clients reach the member.
    pub urls: Vec<String>,
}

/// Identifies one of the stores that have followed each other behind the API. Stores made from the same files have the
/// same ids, but different generations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreGeneration {
    /// The id of the cluster. A restored store has another id, so that clients notice the change.
    pub cluster: u64,
    /// The id of the only member.
    pub member: u64,
    /// A number that grows whenever another store replaces the current one.
    pub generation: u64,
}

/// The disk space of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSizes {
    /// The size of the files.
    pub total: u64,
    /// The part of the files that is in use.
    pub used: u64,
}

/// A store behind the API.
#[async_trait]
pub trait Backing: Debug + Send + Sync + 'static {
    /// The store of keys and values.
    fn store(&self) -> Arc<dyn kv::Store>;

    /// The same store for transactions without puts. On a full disk, it may still accept these when it refuses others.
    fn store_to_release(&self) -> Arc<dyn kv::Store>;

    /// The name and URLs of the member.
    fn identity(&self) -> MemberIdentity;

    /// Returns which store is open. Every answer calls this, so it must be cheap.
    fn place(&self) -> StoreGeneration;

    /// Returns the disk space of the store.
    ///
    /// # Errors
    /// The store cannot be reached or measured.
    async fn sizes(&self) -> kv::Result<StoreSizes>;

    /// Checks that there is space for puts.
    ///
    /// # Errors
    /// `NoSpace` if there is none; any error of reaching the store.
    async fn check_room(&self) -> kv::Result<()>;

    /// Raises the oldest revision that clients of the API may read. A store without a separate mark for them compacts.
    ///
    /// # Errors
    /// Any error of a compaction.
    async fn compact(&self, to: Revision) -> kv::Result<()>;

    /// The oldest revision that clients of the API may read; unset if all can.
    fn oldest(&self) -> Revision;

    /// Grants a lease durably.
    ///
    /// # Errors
    /// `Unsupported`, with advice, if the store keeps no leases; any store error.
    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome>;

    /// Revokes a lease of this store and deletes its keys in one transaction. Returns the revision of that transaction.
    ///
    /// # Errors
    /// `LeaseNotFound`; `RevisionRegressed` if another store has replaced this one; any store error.
    async fn revoke(&self, id: LeaseId, of: StoreGeneration) -> kv::Result<Revision>;

    /// Lists all granted leases.
    ///
    /// # Errors
    /// Any store error.
    async fn leases(&self) -> kv::Result<Vec<Lease>>;

    /// Lists the keys of a lease in ascending order.
    ///
    /// # Errors
    /// Any store error.
    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>>;

    /// Shrinks the store's files by their unused space. Other requests wait meanwhile.
    ///
    /// # Errors
    /// Any store error.
    async fn defragment(&self) -> kv::Result<()>;
}
