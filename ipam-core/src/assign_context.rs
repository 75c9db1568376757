//! Reads what an assignment needs in addition to blocks: the settings, the reservations, the pools and the node.

use ipnet::IpNet;
use kv::{ErrorKind, Key, Range, Transaction, TxnRange, Value};
use time::OffsetDateTime;

use crate::error::Result;
use crate::ipam::{Claimant, Ipam};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, IpReservation, IpamConfig, Labels, Owner, Pool};
use crate::quarantine::in_force;
use crate::reservations::Reservations;

/// Maximum number of keys that one commit deletes in order to replace unused pools. The deletion of a key needs one or
/// two guards, and a commit can have at most 120 guards.
const MAX_KEYS_DELETED: usize = 40;

/// The settings, reservations, pools and node that an assignment uses.
///
/// The commit of an assignment fails if a pool, a reservation or the settings were created or changed after they were
/// read. Because the commit guards these documents, no assignment contradicts a pool, a reservation or settings that
/// were written while the assignment ran. Deletions of reservations are not guarded, because an assignment stays valid
/// when a reservation is deleted. A commit can check at most 64 pools and at most 64 reservations. If a store has more
/// than 64 pools, or more than 64 reservations, only the pool of the assigned addresses is guarded.
#[derive(Debug)]
pub(crate) struct AssignContext {
    pub(crate) config: IpamConfig,
    /// All addresses that reservations exclude from assignment.
    pub(crate) reservations: Reservations,
    /// The stored reservations that can be decoded.
    pub(crate) reservation_documents: Vec<IpReservation>,
    /// Number of keys that the commit may still delete in order to replace unused pools.
    pub(crate) deletable: usize,
    /// Temporary reservations that apply only to the current request and are not stored.
    kept_off: Vec<IpReservation>,
    /// All pools, ordered by name.
    pub(crate) pools: Vec<Pool>,
    /// The node or the virtual owner for which addresses are requested.
    pub(crate) host: Claimant,
    /// True if Calico also uses the store, which is the case if the store has Calico's ClusterInformation document.
    /// Calico creates its ClusterInformation document before any other document, and never deletes it. An assignment's
    /// commit does not guard the ClusterInformation document, because a block that was created for the wrong owner is
    /// corrected later. An assignment that runs just before the ClusterInformation document is created may still create
    /// blocks of secondary networks for a node. If an assignment has created a block of secondary networks for a node,
    /// the node's next assignment in these networks moves the block to a virtual owner.
    pub(crate) beside_calico: bool,
}

impl AssignContext {
    /// Reads the settings, reservations, pools and node of an assignment in one round trip. The request that reads
    /// these documents also reads the keys in `keys` and lists the keys in the ranges `named`.
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

    /// Adds a reservation that the commit will write, or replaces the reservation of the same name.
    pub(crate) fn set_reservation(&mut self, document: IpReservation) {
        self.reservation_documents.retain(|other| other.name() != document.name());
        self.reservation_documents.push(document);
        self.count_reservations();
    }

    /// Removes a reservation from the context, because the commit will delete the reservation.
    pub(crate) fn remove_reservation(&mut self, name: &str) {
        self.reservation_documents.retain(|other| other.name() != name);
        self.count_reservations();
    }

    /// Excludes the addresses in `networks` from assignment for the current request only. `keep_off` writes nothing to
    /// the store.
    pub(crate) fn keep_off(&mut self, name: &str, networks: &[IpNet]) {
        self.kept_off.push(IpReservation::new(name, networks, "", OffsetDateTime::UNIX_EPOCH));
        self.count_reservations();
    }

    /// Allows all addresses again that [`Self::keep_off`] excluded.
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

/// True if the pool is enabled and its node selector does not match the labels of a node. False if the selector cannot
/// be parsed.
pub(crate) fn excludes_node(pool: &Pool, node: &Labels) -> bool {
    pool.is_enabled() && pool.selects_node(node) == Ok(false)
}

/// Reads the IPAM settings and guards their key. Returns the default settings if none are stored.
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

/// Decodes the documents that a read of a key range has returned. Documents that cannot be decoded are logged and
/// skipped, as in Calico.
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
