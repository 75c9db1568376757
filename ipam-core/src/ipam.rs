//! Defines the allocator [`Ipam`] with its store, its clock and its options.

use std::sync::Arc;

use ipnet::IpNet;
use kv::{Deadline, Key, Range, Store, Transaction};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::attachment::Attachment;
use crate::error::{Error, Result};
use crate::gc::LivenessSource;
use crate::hints::{FullBlocks, Hints};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, Labels, Node, Owner};
use crate::pending_commits::{self, PendingCommits, RecordingStore};

/// Runs a Rust block as one transaction on the allocator's store, or on the store given after `on`, and returns the
/// block's result. While the store has an [import lock](crate::import_lock), only transactions that are marked
/// `reading` succeed.
#[macro_export]
macro_rules! transact {
    ($ipam:expr, $deadline:expr, |$tx:ident| $body:expr) => {
        $crate::transact!(on std::sync::Arc::clone($ipam.store()), $deadline, |$tx| $body)
    };
    (on $store:expr, $deadline:expr, |$tx:ident| $body:expr) => {{
        let store = $store;
        let options = kv::TransactOptions::new($deadline).with_extra_reads([$crate::import_lock::import_lock_key(), $crate::model::keys::quotas()]);
        let done: $crate::Result<kv::Committed<_>> = kv::transact!(store, options, |$tx| {
            let done: $crate::Result<_> = async { $body }.await;
            $crate::import_lock::unless_import_locked($tx, done).await
        });
        done.map(|committed| committed.value)
    }};
    (reading $ipam:expr, $deadline:expr, |$tx:ident| $body:expr) => {{
        let store = std::sync::Arc::clone($ipam.store());
        let options = kv::TransactOptions::new($deadline);
        let done: $crate::Result<kv::Committed<_>> = kv::transact!(store, options, |$tx| $body);
        done.map(|committed| committed.value)
    }};
}
pub(crate) use transact;

/// A function that returns the current time. Tests use a function of their own instead of the system clock.
pub type Clock = Arc<dyn Fn() -> OffsetDateTime + Send + Sync>;

/// A function that returns unique ids for new resources. By default, the unique ids of new resources are random UUIDs.
pub type Uids = Arc<dyn Fn() -> String + Send + Sync>;

/// Minimum number of full blocks that an assignment must find in order to remember them. Fewer full blocks are not
/// remembered, because reading fewer than 64 blocks again is cheap.
const MIN_REMEMBERED_FULL_BLOCKS: usize = 64;

/// The rule for which nodes can get addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// In a cluster, or in a store with registered nodes, only registered nodes can get addresses.
    Registered,
    /// In the store of a single machine, no node is registered, and all addresses go to the node of the first request.
    /// The store pins the name of the first node, so a host keeps its node and addresses when it is renamed. An
    /// unregistered node has no labels and no block limit. Once a node is registered, [`Nodes::Registered`] applies.
    FirstSeen,
}

/// The allocator of addresses in a store. Cloning an `Ipam` is cheap.
#[derive(Clone)]
pub struct Ipam {
    store: Arc<dyn Store>,
    nodes: Nodes,
    clock: Clock,
    uids: Uids,
    pending_commits: Option<Arc<dyn PendingCommits>>,
    hints: Option<Arc<dyn Hints>>,
    liveness: Option<Arc<dyn LivenessSource>>,
}

impl std::fmt::Debug for Ipam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ipam").field("store", &self.store).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl Ipam {
    /// Creates an allocator that uses a store, the system clock and random ids.
    pub fn new(store: Arc<dyn Store>, nodes: Nodes) -> Self {
        let uids: Uids = Arc::new(|| Uuid::new_v4().to_string());
        Self {
            store,
            nodes,
            clock: Arc::new(OffsetDateTime::now_utc),
            uids,
            pending_commits: None,
            hints: None,
            liveness: None,
        }
    }

    /// Replaces the allocator's clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Replaces the allocator's source of unique ids.
    #[must_use]
    pub fn with_uids(mut self, uids: Uids) -> Self {
        self.uids = uids;
        self
    }

    /// Makes the allocator record each commit of an assignment before it is sent, so that another process can find out
    /// the commit's outcome; see [`crate::pending_commits`].
    #[must_use]
    pub fn with_pending_commits(mut self, pending_commits: Arc<dyn PendingCommits>) -> Self {
        self.pending_commits = Some(pending_commits);
        self
    }

    /// Makes the allocator remember recently used blocks, which saves round trips to a networked store; see
    /// [`crate::hints`].
    #[must_use]
    pub fn with_hints(mut self, hints: Arc<dyn Hints>) -> Self {
        self.hints = Some(hints);
        self
    }

    /// Allows an assignment that finds no free address to release leftover addresses of earlier boots. The `liveness`
    /// source provides the evidence that the addresses are unused; see [`crate::gc`].
    #[must_use]
    pub fn with_liveness(mut self, liveness: Arc<dyn LivenessSource>) -> Self {
        self.liveness = Some(liveness);
        self
    }

    pub(crate) fn liveness(&self) -> Option<&Arc<dyn LivenessSource>> {
        self.liveness.as_ref()
    }

    /// Settles every pending commit of an attachment, so that the store executes no pending commit of the attachment
    /// later.
    pub(crate) async fn settle_pending_commits(&self, attachment: &Attachment, deadline: Deadline) -> Result<()> {
        match &self.pending_commits {
            Some(pending_commits) => {
                pending_commits::settle_all(&**pending_commits, &self.store, attachment, deadline).await
            }
            None => Ok(()),
        }
    }

    /// Returns the store to use for assignments to an attachment. If pending commits are recorded, the returned store
    /// records each commit before sending it.
    pub(crate) fn recording_store(&self, attachment: &Attachment) -> Arc<dyn Store> {
        let store = Arc::clone(&self.store);
        match &self.pending_commits {
            Some(pending_commits) => {
                Arc::new(RecordingStore::new(store, Arc::clone(pending_commits), attachment.clone()))
            }
            None => store,
        }
    }

    /// Returns the recently used blocks of an attachment's node and network, most recent first.
    pub(crate) fn recall(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.hints.as_ref().map(|hints| hints.recall(attachment)).unwrap_or_default()
    }

    /// Remembers the recently used blocks as hints, unless they have not changed since they were recalled.
    pub(crate) fn remember(&self, attachment: &Attachment, recalled: &[IpNet], blocks: &[IpNet]) {
        if let Some(hints) = self.hints.as_ref().filter(|_| recalled != blocks) {
            hints.remember(attachment, blocks);
        }
    }

    pub(crate) fn recall_full(&self, attachment: &Attachment) -> FullBlocks {
        self.hints.as_ref().map(|hints| hints.recall_full(attachment)).unwrap_or_default()
    }

    /// Remembers full blocks if there are at least [`MIN_REMEMBERED_FULL_BLOCKS`].
    pub(crate) fn remember_full(&self, attachment: &Attachment, blocks: &FullBlocks) {
        if let Some(hints) = self.hints.as_ref().filter(|_| blocks.len() >= MIN_REMEMBERED_FULL_BLOCKS) {
            hints.remember_full(attachment, blocks);
        }
    }

    /// Returns the pools in which no address was recently free for an attachment's node and network.
    pub(crate) fn recall_full_pools(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.hints.as_ref().map(|hints| hints.recall_full_pools(attachment)).unwrap_or_default()
    }

    pub(crate) fn remember_full_pools(&self, attachment: &Attachment, pools: &[IpNet]) {
        if let Some(hints) = &self.hints {
            hints.remember_full_pools(attachment, pools);
        }
    }

    /// Remembers that a node is about to borrow addresses from blocks of other owners.
    pub(crate) fn note_held(&self, node: &str, blocks: &[IpNet]) {
        if let Some(hints) = self.hints.as_ref().filter(|_| !blocks.is_empty()) {
            hints.about_to_hold(node, blocks);
        }
    }

    /// Returns the rule that decides which nodes can get addresses.
    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    pub(crate) fn pending_commits(&self) -> Option<&Arc<dyn PendingCommits>> {
        self.pending_commits.as_ref()
    }

    pub(crate) fn hints(&self) -> Option<&Arc<dyn Hints>> {
        self.hints.as_ref()
    }

    /// Returns the allocator's store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Returns the current time of the allocator's clock.
    pub fn now(&self) -> OffsetDateTime {
        (self.clock)()
    }

    /// Returns a new unique id for a resource.
    pub fn uid(&self) -> String {
        (self.uids)()
    }

    /// Finds the node that requests addresses, and reads its labels. Callers should prefetch [`Self::host_keys`].
    pub(crate) async fn host(&self, tx: &mut Transaction, name: &str) -> Result<Claimant> {
        let key = keys::resource(ResourceKind::Node, name);
        if let Some(value) = tx.snapshot_get(&key).await? {
            let node = Node::decode(&key, value.as_bytes())?;
            let owner = Owner::host(name);
            return Ok(Claimant {
                name: name.to_owned(),
                owner,
                labels: node.labels().clone(),
                limited: true,
                pin: Pin::None,
            });
        }
        let registered = Range::Prefix(keys::resources_prefix(ResourceKind::Node));
        if self.nodes == Nodes::Registered || !tx.snapshot_is_empty(&registered).await? {
            return Err(Error::UnknownNode(name.to_owned()));
        }
        let pinned = tx.get(&keys::PINNED_NODE.into()).await?;
        let pinned = pinned.and_then(|value| String::from_utf8(value.as_bytes().to_vec()).ok());
        let pin = if pinned.is_some() { Pin::None } else { Pin::Write };
        let name = pinned.unwrap_or_else(|| name.to_owned());
        Ok(Claimant { owner: Owner::host(&name), name, labels: Labels::default(), limited: false, pin })
    }

    /// Finds the owner for which addresses are requested: a node (see [`Self::host`]) or a virtual owner. A virtual
    /// owner has no labels, and the block limit applies to virtual owners.
    pub(crate) async fn claimant(&self, tx: &mut Transaction, owner: &Owner) -> Result<Claimant> {
        match owner {
            Owner::Host(name) => self.host(tx, name).await,
            Owner::Virtual(name) if !name.is_empty() => {
                let (name, owner) = (name.clone(), owner.clone());
                Ok(Claimant { name, owner, labels: Labels::default(), limited: true, pin: Pin::None })
            }
            Owner::Virtual(_) | Owner::Other(_) => Err(cannot_own_blocks(owner)),
        }
    }

    /// Returns the keys that [`Self::claimant`] reads, for a prefetch.
    pub(crate) fn claimant_keys(&self, owner: &Owner) -> Vec<Key> {
        match owner {
            Owner::Host(name) => self.host_keys(name),
            Owner::Virtual(_) | Owner::Other(_) => Vec::new(),
        }
    }

    /// Replaces the owner's name by the name under which the store knows the owner (see [`Self::known_name`]), even for
    /// a node that is no longer registered.
    pub(crate) async fn known_owner(&self, tx: &mut Transaction, owner: &Owner) -> Result<Owner> {
        match owner {
            Owner::Host(name) => Ok(Owner::Host(self.known_name(tx, name).await?)),
            Owner::Virtual(name) if !name.is_empty() => Ok(owner.clone()),
            Owner::Virtual(_) | Owner::Other(_) => Err(cannot_own_blocks(owner)),
        }
    }

    /// Returns the keys that [`Self::host`] reads, for a prefetch.
    pub(crate) fn host_keys(&self, name: &str) -> Vec<Key> {
        let node = keys::resource(ResourceKind::Node, name);
        match self.nodes {
            Nodes::Registered => vec![node],
            Nodes::FirstSeen => vec![node, keys::PINNED_NODE.into()],
        }
    }

    /// Returns the name by which the store knows the node that is now called `name`. The returned name differs from
    /// `name` only if no node is registered and the store has pinned another name for its only node.
    pub(crate) async fn known_name(&self, tx: &mut Transaction, name: &str) -> Result<String> {
        match self.host(tx, name).await {
            Ok(host) => Ok(host.name),
            // A node that was removed from the cluster may still have addresses to release.
            Err(Error::UnknownNode(_)) => Ok(name.to_owned()),
            Err(error) => Err(error),
        }
    }
}

fn cannot_own_blocks(owner: &Owner) -> Error {
    Error::Invalid(format!(
        "\"{owner}\" cannot own blocks: name a node as host:NAME, or a virtual owner as virtual:NAME"
    ))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pin {
    None,
    Write,
}

/// The node or the virtual owner for which addresses are requested.
#[derive(Clone, Debug)]
pub(crate) struct Claimant {
    /// The name by which the store knows the node or virtual owner.
    pub(crate) name: String,
    owner: Owner,
    pub(crate) labels: Labels,
    /// True if the limit of blocks per host applies to the claimant.
    pub(crate) limited: bool,
    pin: Pin,
}

impl Claimant {
    pub(crate) fn owner(&self) -> Owner {
        self.owner.clone()
    }

    /// Records the node's name as the name of the store's only node, if no node is registered and no name is recorded
    /// yet.
    pub(crate) fn pin(&self, tx: &mut Transaction) -> Result<()> {
        if self.pin == Pin::Write {
            tx.put(&keys::PINNED_NODE.into(), self.name.clone())?;
        }
        Ok(())
    }
}
