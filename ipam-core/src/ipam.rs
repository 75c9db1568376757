//! The allocator: a store, a clock, and one method for each verb.

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

/// Runs the body of a verb as one transaction on the allocator's store, or on another one, and returns the body's
/// result. A store that is [being filled](crate::import_lock) refuses all of them but those that are only `reading`: a
/// person's queries.
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

/// The source of the time, so that tests can set it.
pub type Clock = Arc<dyn Fn() -> OffsetDateTime + Send + Sync>;

/// The source of the unique ids of new resources: random UUIDs, as text.
pub type Uids = Arc<dyn Fn() -> String + Send + Sync>;

/// Fewer full blocks than this are read again rather than remembered.
const MIN_REMEMBERED_FULL_BLOCKS: usize = 64;

/// The nodes that may have addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// The registered ones, as in a cluster.
    Registered,
    /// While none is registered, the node of the first request, under the name that it then had: on a store of a single
    /// machine no node is registered, and a host that is renamed stays the same. It has no labels and no limit of
    /// blocks. Once a node is registered, as above.
    FirstSeen,
}

/// The allocator on a store. Cheap to clone.
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
    /// The allocator on this store, by the system's clock.
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

    /// With another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// With another source of unique ids.
    #[must_use]
    pub fn with_uids(mut self, uids: Uids) -> Self {
        self.uids = uids;
        self
    }

    /// Records what an assignment is about to commit: for a store of other processes, see [`crate::pending_commits`].
    #[must_use]
    pub fn with_pending_commits(mut self, pending_commits: Arc<dyn PendingCommits>) -> Self {
        self.pending_commits = Some(pending_commits);
        self
    }

    /// Remembers which blocks were used: for a store that is a network away, see [`crate::hints`].
    #[must_use]
    pub fn with_hints(mut self, hints: Arc<dyn Hints>) -> Self {
        self.hints = Some(hints);
        self
    }

    /// Lets an assignment that finds no room free the leftovers of earlier boots, on this evidence; see [`crate::gc`].
    #[must_use]
    pub fn with_liveness(mut self, liveness: Arc<dyn LivenessSource>) -> Self {
        self.liveness = Some(liveness);
        self
    }

    /// The source of evidence about the machine, if there is one.
    pub(crate) fn liveness(&self) -> Option<&Arc<dyn LivenessSource>> {
        self.liveness.as_ref()
    }

    /// Makes sure that no pending commit for this attachment can happen from now on.
    pub(crate) async fn settle_pending_commits(&self, attachment: &Attachment, deadline: Deadline) -> Result<()> {
        match &self.pending_commits {
            Some(pending_commits) => {
                pending_commits::settle_all(&**pending_commits, &self.store, attachment, deadline).await
            }
            None => Ok(()),
        }
    }

    /// The store for assignments to an attachment: one that records each commit as pending, if any are recorded.
    pub(crate) fn recording_store(&self, attachment: &Attachment) -> Arc<dyn Store> {
        let store = Arc::clone(&self.store);
        match &self.pending_commits {
            Some(pending_commits) => {
                Arc::new(RecordingStore::new(store, Arc::clone(pending_commits), attachment.clone()))
            }
            None => store,
        }
    }

    /// The hints for an attachment's node and network, if there are any.
    pub(crate) fn recall(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.hints.as_ref().map(|hints| hints.recall(attachment)).unwrap_or_default()
    }

    /// Remembers blocks, unless they are equal to `recalled`.
    pub(crate) fn remember(&self, attachment: &Attachment, recalled: &[IpNet], blocks: &[IpNet]) {
        if let Some(hints) = self.hints.as_ref().filter(|_| recalled != blocks) {
            hints.remember(attachment, blocks);
        }
    }

    /// The full blocks that are remembered for an attachment's node and network.
    pub(crate) fn recall_full(&self, attachment: &Attachment) -> FullBlocks {
        self.hints.as_ref().map(|hints| hints.recall_full(attachment)).unwrap_or_default()
    }

    /// Remembers full blocks, unless they are few.
    pub(crate) fn remember_full(&self, attachment: &Attachment, blocks: &FullBlocks) {
        if let Some(hints) = self.hints.as_ref().filter(|_| blocks.len() >= MIN_REMEMBERED_FULL_BLOCKS) {
            hints.remember_full(attachment, blocks);
        }
    }

    /// The pools that had no room for an attachment's node and network.
    pub(crate) fn recall_full_pools(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.hints.as_ref().map(|hints| hints.recall_full_pools(attachment)).unwrap_or_default()
    }

    /// Remembers pools without room.
    pub(crate) fn remember_full_pools(&self, attachment: &Attachment, pools: &[IpNet]) {
        if let Some(hints) = &self.hints {
            hints.remember_full_pools(attachment, pools);
        }
    }

    /// Records that a node is about to hold addresses of blocks that are not its own.
    pub(crate) fn note_held(&self, node: &str, blocks: &[IpNet]) {
        if let Some(hints) = self.hints.as_ref().filter(|_| !blocks.is_empty()) {
            hints.about_to_hold(node, blocks);
        }
    }

    /// The nodes that may have addresses.
    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// Where pending commits are recorded, if they are.
    pub(crate) fn pending_commits(&self) -> Option<&Arc<dyn PendingCommits>> {
        self.pending_commits.as_ref()
    }

    /// Where used blocks are remembered, if they are.
    pub(crate) fn hints(&self) -> Option<&Arc<dyn Hints>> {
        self.hints.as_ref()
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The time.
    pub fn now(&self) -> OffsetDateTime {
        (self.clock)()
    }

    /// A unique id for a new resource.
    pub fn uid(&self) -> String {
        (self.uids)()
    }

    /// The facts about the node of a request. [`Self::host_keys`] must be read before.
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

    /// The same for any owner of blocks. A virtual one has no document: no labels, and the limit of blocks holds for it.
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

    /// The keys that [`Self::claimant`] reads, to be read along with others.
    pub(crate) fn claimant_keys(&self, owner: &Owner) -> Vec<Key> {
        match owner {
            Owner::Host(name) => self.host_keys(name),
            Owner::Virtual(_) | Owner::Other(_) => Vec::new(),
        }
    }

    /// The owner as the store knows it, also one that is not registered any more; see [`Self::known_name`].
    pub(crate) async fn known_owner(&self, tx: &mut Transaction, owner: &Owner) -> Result<Owner> {
        match owner {
            Owner::Host(name) => Ok(Owner::Host(self.known_name(tx, name).await?)),
            Owner::Virtual(name) if !name.is_empty() => Ok(owner.clone()),
            Owner::Virtual(_) | Owner::Other(_) => Err(cannot_own_blocks(owner)),
        }
    }

    /// The keys that [`Self::host`] reads, to be read along with others.
    pub(crate) fn host_keys(&self, name: &str) -> Vec<Key> {
        let node = keys::resource(ResourceKind::Node, name);
        match self.nodes {
            Nodes::Registered => vec![node],
            Nodes::FirstSeen => vec![node, keys::PINNED_NODE.into()],
        }
    }

    /// The name under which a store knows the node that calls itself `name`: another one only where the store has
    /// pinned it and no node is registered.
    pub(crate) async fn known_name(&self, tx: &mut Transaction, name: &str) -> Result<String> {
        match self.host(tx, name).await {
            Ok(host) => Ok(host.name),
            // A node that was removed from the cluster still has addresses to release.
            Err(Error::UnknownNode(_)) => Ok(name.to_owned()),
            Err(error) => Err(error),
        }
    }
}

/// An owner that no block can have.
fn cannot_own_blocks(owner: &Owner) -> Error {
    Error::Invalid(format!(
        "\"{owner}\" cannot own blocks: name a node as host:NAME, or a virtual owner as virtual:NAME"
    ))
}

/// Whether the commit pins the node's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pin {
    None,
    Write,
}

/// The node of a request, or the virtual owner.
#[derive(Clone, Debug)]
pub(crate) struct Claimant {
    /// The name under which the store knows it.
    pub(crate) name: String,
    owner: Owner,
    /// Its labels.
    pub(crate) labels: Labels,
    /// Whether the limit of blocks per host holds for it.
    pub(crate) limited: bool,
    pin: Pin,
}

impl Claimant {
    /// It, as the owner of blocks.
    pub(crate) fn owner(&self) -> Owner {
        self.owner.clone()
    }

    /// Pins the name, if that is due.
    pub(crate) fn pin(&self, tx: &mut Transaction) -> Result<()> {
        if self.pin == Pin::Write {
            tx.put(&keys::PINNED_NODE.into(), self.name.clone())?;
        }
        Ok(())
    }
}
