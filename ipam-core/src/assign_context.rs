//! Reads what an assignment needs besides blocks: settings, reservations, pools and the node.

use ipnet::IpNet;
use kv::{ErrorKind, Key, Range, Transaction, TxnRange, Value};
use time::OffsetDateTime;

use crate::error::Result;
use crate::ipam::{Claimant, Ipam};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, IpReservation, IpamConfig, Labels, Owner, Pool};
use crate::quarantine::in_force;
use crate::reservations::Reservations;

/// Maximum number of keys of unused pools that one commit deletes. A commit has at most 120 guards, and each of these
/// keys takes one or two.
const MAX_KEYS_DELETED: usize = 40;

/// The settings, reservations, pools and node of an assignment.
///
/// The commit fails if a pool, a reservation or the settings are created or changed meanwhile, so that no address is
/// assigned against an existing rule. A deleted reservation does no harm, and the used pool has a guard of its own.
/// With more than 64 pools or reservations, which is more than a commit can check, only the used pool is guarded.
#[derive(Debug)]
pub(crate) struct AssignContext {
    pub(crate) config: IpamConfig,
    /// All reserved addresses.
    pub(crate) reservations: Reservations,
    /// The well-formed reservation documents.
    pub(crate) reservation_documents: Vec<IpReservation>,
    /// How many more keys of unused pools the commit may delete.
    pub(crate) deletable: usize,
    /// Reservations that apply to the present request only.
    kept_off: Vec<IpReservation>,
    /// All pools, by name.
    pub(crate) pools: Vec<Pool>,
    /// The node, or the virtual owner.
    pub(crate) host: Claimant,
    /// Whether Calico also reads this store, which its ClusterInformation document shows. Calico creates this document
    /// first and never deletes it. It is not guarded. An assignment that does not see it yet creates blocks as on a
    /// store without Calico, and these are moved later.
    pub(crate) beside_calico: bool,
}

impl AssignContext {
    /// Reads everything in one round trip, together with other keys, and with the keys in the `named` ranges.
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

    /// Adds or replaces a reservation that the commit writes.
    pub(crate) fn set_reservation(&mut self, document: IpReservation) {
        self.reservation_documents.retain(|other| other.name() != document.name());
        self.reservation_documents.push(document);
        self.count_reservations();
    }

    /// Removes a reservation that the commit deletes.
    pub(crate) fn remove_reservation(&mut self, name: &str) {
        self.reservation_documents.retain(|other| other.name() != name);
        self.count_reservations();
    }

    /// Reserves networks for the present request only. Nothing is written.
    pub(crate) fn keep_off(&mut self, name: &str, networks: &[IpNet]) {
        self.kept_off.push(IpReservation::new(name, networks, "", OffsetDateTime::UNIX_EPOCH));
        self.count_reservations();
    }

    /// Removes the reservations of [`Self::keep_off`].
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

/// The pool that contains the first address of a block.
pub(crate) fn pool_holding<'p>(pools: impl IntoIterator<Item = &'p Pool>, block: IpNet) -> Option<&'p Pool> {
    pools.into_iter().find(|pool| pool.cidr().contains(&block.network()))
}

/// True if the pool is enabled, but not for a node with these labels. False if the selector cannot be parsed.
pub(crate) fn excludes_node(pool: &Pool, node: &Labels) -> bool {
    pool.is_enabled() && pool.selects_node(node) == Ok(false)
}

/// Reads and guards the settings. Returns the defaults if none are stored.
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

/// The well-formed documents of a listing. The others are logged and skipped, as in Calico.
pub fn decode_all<D: Document>(listed: &[(Key, Value)]) -> Vec<D> {
    let decoded = listed.iter().filter_map(|(key, value)| match D::decode(key, value.as_bytes()) {
        Ok(document) => Some(document),
        Err(error) => {
            tracing::warn!(%error, "skipping a damaged document");
            None
        }
    });
    decoded.collect()
}
