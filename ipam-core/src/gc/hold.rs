//! Freeing addresses, each only while it is held as it was read.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};

use super::Allocation;
use crate::attachment::{BOOT, INTERFACE, NETWORK, TIMESTAMP};
use crate::boxed;
use crate::endpoints::EndpointOf;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::{Attribute, Block, keys};
use crate::surroundings::read_config;
use crate::workset::{Found, Workset};

/// How many handles and endpoints a commit touches at most: each address can have one of its own, and a commit touches 120
/// keys.
const MOST_AT_ONCE: usize = 64;

/// An address that somebody holds, with all that tells this very assignment of it from a later one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The address; of a prefix the first one.
    pub address: IpAddr,
    /// The address as a network, or the whole prefix.
    pub unit: IpNet,
    /// The block that it is in.
    pub block: IpNet,
    /// The handle that it is held under, if there is one.
    pub handle: Option<String>,
    /// The number that each assignment of the address changes.
    pub sequence_number: u64,
    /// The workload endpoint that goes with it, see [`with_endpoints`](super::with_endpoints).
    pub endpoint: Option<EndpointOf>,
    /// All that is recorded with it.
    entry: Attribute,
}

impl Hold {
    /// An address as a block has it.
    pub(super) fn of(block: &Block, address: IpAddr, entry: &Attribute) -> Self {
        Self {
            address,
            unit: block.unit_of(address),
            block: block.cidr(),
            handle: entry.handle().filter(|handle| !handle.is_empty()).map(str::to_owned),
            sequence_number: block.sequence_number_of(address),
            endpoint: None,
            entry: entry.clone(),
        }
    }

    /// The same, with the endpoint that goes with it.
    pub(super) fn with_endpoint(self, endpoint: Option<EndpointOf>) -> Self {
        Self { endpoint, ..self }
    }

    /// The node that it is recorded for.
    pub fn node(&self) -> Option<&str> {
        self.entry.node()
    }

    /// The network's name, where that is recorded.
    pub fn network(&self) -> Option<&str> {
        self.entry.get(NETWORK)
    }

    /// The interface's name in the container, where that is recorded.
    pub fn interface(&self) -> Option<&str> {
        self.entry.get(INTERFACE)
    }

    /// The boot that it was given in, where that is recorded.
    pub fn boot(&self) -> Option<&str> {
        self.entry.get(BOOT)
    }

    /// When it was given, as it is recorded.
    pub fn timestamp(&self) -> Option<&str> {
        self.entry.get(TIMESTAMP)
    }

    /// True if nothing has happened to it since it was read.
    fn is_still_in(&self, block: &Block) -> bool {
        block.attributes_of(self.address) == Some(&self.entry)
            && block.sequence_number_of(self.address) == self.sequence_number
    }
}

impl From<&Hold> for Hold {
    fn from(hold: &Hold) -> Self {
        hold.clone()
    }
}

impl From<&Allocation> for Hold {
    fn from(one: &Allocation) -> Self {
        Self {
            address: one.address,
            unit: one.unit,
            block: one.block,
            handle: Some(one.handle.clone()),
            sequence_number: one.sequence_number,
            endpoint: None,
            entry: one.entry.clone(),
        }
    }
}

/// The outcome for addresses that a caller wants freed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Those that are free now, or rest.
    pub released: Vec<IpAddr>,
    /// Those that were assigned again or released since they were read, and were left alone.
    pub changed: Vec<IpAddr>,
    /// The workload endpoints that are deleted.
    pub endpoints: Vec<EndpointOf>,
}

/// Divides allocations into batches that one commit can free: all of one block, and not too many.
pub fn batches<'a, A>(held: &'a [A]) -> Vec<Vec<Hold>>
where
    Hold: From<&'a A>,
{
    let mut by_block: BTreeMap<IpNet, Vec<Hold>> = BTreeMap::new();
    for hold in held.iter().map(Hold::from) {
        by_block.entry(hold.block).or_default().push(hold);
    }
    by_block.into_values().flat_map(divided).collect()
}

/// Divides the allocations of a block.
fn divided(block: Vec<Hold>) -> Vec<Vec<Hold>> {
    let (mut batches, mut batch, mut keys) = (Vec::new(), Vec::new(), 0);
    for hold in block {
        let more = 1 + usize::from(hold.endpoint.is_some());
        if keys + more > MOST_AT_ONCE {
            batches.push(std::mem::take(&mut batch));
            keys = 0;
        }
        keys += more;
        batch.push(hold);
    }
    batches.push(batch);
    batches
}

impl Ipam {
    /// Frees what one commit can, one of [`batches`]. An allocation that has changed since it was read stays.
    ///
    /// # Errors
    /// Those of the store; a damaged handle.
    #[boxed]
    pub async fn free(&self, batch: &[Hold], deadline: Deadline) -> Result<Freed> {
        let freed = transact!(self, deadline, |tx| self.free_in(tx, batch).await)?;
        tell(batch, &freed);
        Ok(freed)
    }

    /// The same for what a node held that is gone: the commit fails if it has come back.
    ///
    /// # Errors
    /// `Invalid` if the node is registered; those of [`free`](Self::free).
    #[boxed]
    pub async fn free_of_gone(&self, node: &str, batch: &[Hold], deadline: Deadline) -> Result<Freed> {
        let freed = transact!(self, deadline, |tx| {
            self.require_gone(tx, node).await?;
            self.free_in(tx, batch).await
        })?;
        tell(batch, &freed);
        Ok(freed)
    }

    async fn free_in(&self, tx: &mut Transaction, batch: &[Hold]) -> Result<Freed> {
        let endpoints: BTreeSet<Key> =
            batch.iter().filter_map(|hold| hold.endpoint.as_ref()).map(EndpointOf::key).collect();
        tx.prefetch(endpoints.into_iter().chain([keys::config()]).collect(), Vec::new()).await?;
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let now = self.now();
        let mut work = Workset::new(tx, now, cooldown);
        let mut freed = Freed::default();
        let blocks: BTreeSet<IpNet> = batch.iter().map(|hold| hold.block).collect();
        for cidr in blocks {
            let Found::There(block) = work.find(cidr).await? else { continue };
            let still = batch.iter().filter(|one| one.block == cidr && one.is_still_in(block));
            let still: BTreeMap<IpAddr, Option<String>> = still.map(|one| (one.address, one.handle.clone())).collect();
            if still.is_empty() {
                continue;
            }
            work.change(cidr, |block| block.release_where(now, cooldown, |ip, _| still.contains_key(&ip))).await?;
            for handle in still.values().flatten() {
                work.touch_handle(handle, cidr);
            }
            freed.released.extend(still.into_keys());
        }
        for hold in batch.iter().filter(|one| freed.released.contains(&one.address)) {
            if let Some(endpoint) = hold.endpoint.as_ref().filter(|one| !freed.endpoints.contains(one))
                && endpoint.delete(work.tx).await?
            {
                freed.endpoints.push(endpoint.clone());
            }
        }
        work.write().await?;
        let gone = batch.iter().map(|one| one.address).filter(|ip| !freed.released.contains(ip));
        freed.changed = gone.collect();
        Ok(freed)
    }
}

/// Tells the log what was freed.
fn tell(batch: &[Hold], freed: &Freed) {
    for hold in batch.iter().filter(|one| freed.released.contains(&one.address)) {
        let (address, handle, interface, node) = (hold.address, &hold.handle, hold.interface(), hold.node());
        tracing::info!(%address, handle, interface, node, "freed");
    }
    for EndpointOf { namespace, name, .. } in &freed.endpoints {
        tracing::info!(namespace, name, "deleted the workload endpoint");
    }
}
