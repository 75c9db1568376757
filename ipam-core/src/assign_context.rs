//! Reads the settings, reservations, pools and node that an assignment needs besides blocks.

use ipnet::IpNet;
use kv::{ErrorKind, Key, Range, Transaction, TxnRange, Value};
use time::OffsetDateTime;

use crate::error::Result;
use crate::ipam::{Claimant, Ipam};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, IpReservation, IpamConfig, Labels, Owner, Pool};
use crate::quarantine::in_force;
use crate::reservations::Reservations;

/// Maximum number of keys of unused pools that one commit deletes. A commit has at most 120 guards, and deleting such a
/// key takes one or two guards.
const MAX_KEYS_DELETED: usize = 40;

/// The settings, reservations, pools and node of an assignment.
///
/// The commit fails if a pool, a reservation or the settings are created or changed after they were read, so no address
/// is assigned against an existing rule. Deletions of reservations are not guarded, because they do no harm. The pool
/// of the assigned addresses has a separate guard. A commit can check at most 64 pools or reservations; with more, only
/// the pool of the assigned addresses is guarded.
#[derive(Debug)]
pub(crate) struct AssignContext {
    pub(crate) config: IpamConfig,
    /// All addresses that reservations exclude from assignment.
    pub(crate) reservations: Reservations,
    /// The well-formed reservation documents.
    pub(crate) reservation_documents: Vec<IpReservation>,
    /// How many more keys of unused pools the commit may delete.
    pub(crate) deletable: usize,
    /// Reservations that apply to the current request only.
    kept_off: Vec<IpReservation>,
    /// All pools, ordered by name.
    pub(crate) pools: Vec<Pool>,
    /// The node or the virtual owner that requests addresses.
    pub(crate) host: Claimant,
    /// Whether Calico also reads this store, according to Calico's ClusterInformation document. Calico creates this
    /// document first and never deletes it. The commit does not guard the ClusterInformation document. An assignment
    /// that does not see the document yet creates blocks as in a store without Calico, and these blocks are moved
    /// later.
    pub(crate) beside_calico: bool,
}

impl AssignContext {
    /// Reads the context in one round trip, together with the other requested keys and the keys in the `named` ranges.
    pub(crate) async fn read(
        ipam: &Ipam,
        tx: &mut Transaction,
        owner: &Owner,
        mut keys: Vec<Key>,
        mut named: Vec<Range>,
    ) -> Result<Self> {
        let cluster = Range::Key(keys::cluster_information());
        named.push(cluster.clone());
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        keys.extend(ipam.claimant_keys(owner));
        keys.push(keys::config());
        let full = [pools.clone(), reservations.clone()].map(TxnRange::new);
        tx.prefetch(keys, full.into_iter().chain(named.into_iter().map(TxnRange::keys_of)).collect()).await?;

        let host = ipam.claimant(tx, owner).await?;
        let beside_calico = !tx.snapshot_keys(&cluster).await?.is_empty();
        let config = read_config(tx).await?;
        let pools = decode_all(&list_guarded_if_short(tx, &pools).await?);
        let documents: Vec<IpReservation> = decode_all(&list_guarded_if_short(tx, &reservations).await?);
        let documents: Vec<_> = documents.into_iter().map(|document| in_force(document, ipam.now())).collect();
        let reservations = reservations_of(&documents);
        Ok(Self {
            config,
            reservations,
            reservation_documents: documents,
            deletable: MAX_KEYS_DELETED,
            kept_off: Vec::new(),
            pools,
            host,
            beside_calico,
        })
    }

    /// Adds a reservation that the commit will write, or replaces the reservation of this name.
    pub(crate) fn set_reservation(&mut self, document: IpReservation) {
        self.reservation_documents.retain(|other| other.name() != document.name());
        self.reservation_documents.push(document);
        self.count_reservations();
    }

    /// Removes a reservation that the commit will delete.
    pub(crate) fn remove_reservation(&mut self, name: &str) {
        self.reservation_documents.retain(|other| other.name() != name);
        self.count_reservations();
    }

    /// Reserves networks for the current request only. Nothing is written to the store.
    pub(crate) fn keep_off(&mut self, name: &str, networks: &[IpNet]) {
        self.kept_off.push(IpReservation::new(name, networks, "", OffsetDateTime::UNIX_EPOCH));
        self.count_reservations();
    }

    /// Removes the reservations that [`Self::keep_off`] added.
    pub(crate) fn allow_all(&mut self) {
        if !self.kept_off.is_empty() {
            self.kept_off.clear();
            self.count_reservations();
        }
    }

    fn count_reservations(&mut self) {
        self.reservations = reservations_of(self.reservation_documents.iter().chain(&self.kept_off));
    }
}

fn reservations_of<'d>(documents: impl IntoIterator<Item = &'d IpReservation>) -> Reservations {
    let (reservations, skipped) = Reservations::from_documents(documents);
    for entry in skipped {
        tracing::warn!(reservation = %entry.reservation, entry = %entry.entry, "skipping a reservation entry that is not a CIDR");
    }
    reservations
}

/// Returns the pool that contains the first address of a block.
pub(crate) fn pool_holding<'p>(pools: impl IntoIterator<Item = &'p Pool>, block: IpNet) -> Option<&'p Pool> {
    pools.into_iter().find(|pool| pool.cidr().contains(&block.network()))
}

/// True if the pool is enabled, but its node selector excludes a node with these labels. False if the selector cannot
/// be parsed.
pub(crate) fn excludes_node(pool: &Pool, node: &Labels) -> bool {
    pool.is_enabled() && pool.selects_node(node) == Ok(false)
}

/// Reads the IPAM settings and adds a guard for them. Returns the defaults if no settings are stored.
pub async fn read_config(tx: &mut Transaction) -> Result<IpamConfig> {
    let key = keys::config();
    Ok(match tx.get(&key).await? {
        Some(value) => IpamConfig::decode(&key, value.as_bytes())?,
        None => IpamConfig::default(),
    })
}

async fn list_guarded_if_short(tx: &mut Transaction, range: &Range) -> Result<Vec<(Key, Value)>> {
    match tx.list(range).await {
        Err(error) if matches!(error.kind(), ErrorKind::ReadSetTooLarge { .. }) => Ok(tx.snapshot_list(range).await?),
        listed => Ok(listed?),
    }
}

/// Decodes the well-formed documents of a listing. Malformed documents are logged and skipped, as in Calico.
pub fn decode_all<D: Document>(listed: &[(Key, Value)]) -> Vec<D> {
    let decoded = listed.iter().filter_map(|(key, value)| match D::decode(key, value.as_bytes()) {
        Ok(document) => Some(document),
        Err(error) => {
            tracing::warn!(%error, "skipping a stored pool, reservation or block that cannot be decoded");
            None
        }
    });
    decoded.collect()
}
