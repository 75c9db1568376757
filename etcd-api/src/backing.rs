//! The API's needs of a store besides its keys.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;

/// Under which names a store answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The id of the cluster: another one after a restore, so that clients see that the store is another one.
    pub cluster: u64,
    /// The id of the only member.
    pub member: u64,
    /// The member's name.
    pub name: String,
    /// The URLs by which clients reach it.
    pub urls: Vec<String>,
}

/// The room that a store takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
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
    fn identity(&self) -> Identity;

    /// The room that the store takes.
    ///
    /// # Errors
    /// The store cannot be reached, or measured.
    async fn sizes(&self) -> kv::Result<Sizes>;

    /// Checks that there is room for puts.
    ///
    /// # Errors
    /// `NoSpace` if there is none; the store cannot be reached.
    async fn check_room(&self) -> kv::Result<()>;

    /// Has the files give up the room that they do not need. Other requests wait meanwhile.
    ///
    /// # Errors
    /// The store's.
    async fn defragment(&self) -> kv::Result<()>;
}
