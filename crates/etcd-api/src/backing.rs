//! The API's needs of a store besides its keys.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use kv::{GrantOutcome, Key, Lease, LeaseId, Revision};

/// The names of the only member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberIdentity {
    /// The member's name.
    pub name: String,
    /// The URLs by which clients reach it.
    pub urls: Vec<String>,
}

/// A store, of those that have followed one another behind the API. Two that were made from the same files have the same ids, and are
/// two all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreGeneration {
    /// The id of the cluster: another one after a restore, so that clients see that the store is another one.
    pub cluster: u64,
    /// The id of the only member.
    pub member: u64,
    /// It grows when another store takes the place.
    pub generation: u64,
}

/// The room that a store takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSizes {
    /// The size of the files.
    pub total: u64,
    /// The part of it that is in use.
    pub used: u64,
}

/// A store as the API needs it.
#[async_trait]
pub trait Backing: Debug + Send + Sync + 'static {
    /// The keys and values.
    fn store(&self) -> Arc<dyn kv::Store>;

    /// The same store, for transactions that put nothing: it may refuse these later than others when the disk is full.
    fn store_to_release(&self) -> Arc<dyn kv::Store>;

    /// The names.
    fn identity(&self) -> MemberIdentity;

    /// Which store it is. Every answer needs it, so it must cost nothing.
    fn place(&self) -> StoreGeneration;

    /// The room that the store takes.
    ///
    /// # Errors
    /// The store cannot be reached, or measured.
    async fn sizes(&self) -> kv::Result<StoreSizes>;

    /// Checks that there is room for puts.
    ///
    /// # Errors
    /// `NoSpace` if there is none; the store cannot be reached.
    async fn check_room(&self) -> kv::Result<()>;

    /// Raises the mark below which clients of the API read nothing. A store that has no mark of its own for them compacts.
    ///
    /// # Errors
    /// Those of a compaction.
    async fn compact(&self, to: Revision) -> kv::Result<()>;

    /// The oldest revision that clients of the API may read; unset if all can.
    fn oldest(&self) -> Revision;

    /// Grants a lease, durably.
    ///
    /// # Errors
    /// `Unsupported`, with what to do, if the store keeps no leases; the store's.
    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome>;

    /// Ends a lease of this store and deletes its keys in one transaction. Returns the revision after it.
    ///
    /// # Errors
    /// `LeaseNotFound`; `RevisionRegressed` if another store is there now; the store's.
    async fn revoke(&self, id: LeaseId, of: StoreGeneration) -> kv::Result<Revision>;

    /// All leases that are granted.
    ///
    /// # Errors
    /// The store's.
    async fn leases(&self) -> kv::Result<Vec<Lease>>;

    /// The keys that are attached to a lease, ascending.
    ///
    /// # Errors
    /// The store's.
    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>>;

    /// Has the files give up the room that they do not need. Other requests wait meanwhile.
    ///
    /// # Errors
    /// The store's.
    async fn defragment(&self) -> kv::Result<()>;
}
