//! Making sure that an owner has a block, without assigning an address of it.

use ipnet::IpNet;
use kv::Deadline;

use super::{AssignRequest, Assignment, Wanted};
use crate::boxed;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::{Attribute, HostReserved, Owner, Pool, PoolUse};
use crate::net::Family;
use crate::surroundings::pool_holding;
use crate::workset::Workset;

/// The families of which an owner needs a block, and its pools.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    owner: Owner,
    terms: AssignRequest,
}

impl BlockRequest {
    /// A block of each of these families for this owner.
    pub fn new(owner: Owner, families: &[Family]) -> Self {
        let one = |family| usize::from(families.contains(&family));
        let terms = AssignRequest::of_owner(&owner, Wanted::any(one(Family::V4), one(Family::V6)));
        Self { owner, terms }
    }

    /// In these pools, by name or network, in this order; else in those that select the node.
    #[must_use]
    pub fn with_pools(mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.terms.set_pools(family, pools);
        self
    }

    /// For this use: only pools that allow it.
    #[must_use]
    pub fn with_usage(mut self, usage: PoolUse) -> Self {
        self.terms.usage = usage;
        self
    }

    /// The addresses that the owner keeps for itself in a new block; a block that it has stays as it is.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }
}

impl Ipam {
    /// Makes sure that an owner has a block of each family, and returns one of each, IPv4 first: one that it has, full
    /// or not, else one that it claims now. All in one commit or nothing; if it has them all, nothing is written. No
    /// address is assigned.
    ///
    /// Guards: as [`assign`](Self::assign).
    ///
    /// # Errors
    /// `NoNewBlocks` if new blocks must not be claimed or none is left; `Pool` if no pool can serve the owner;
    /// `UnknownNode`; `Invalid` for an owner that cannot be one; those of the store.
    #[boxed]
    pub async fn ensure_blocks(&self, request: &BlockRequest, deadline: Deadline) -> Result<Vec<IpNet>> {
        let BlockRequest { owner, terms } = request;
        transact!(self, deadline, |tx| {
            let mut around = self.read_around(tx, owner, &terms.wanted, Vec::new(), Vec::new()).await?;
            let mut work = Workset::new(tx, self.now(), around.config.cooldown_seconds());
            let (holder, handle) = (Attribute::default(), String::new());
            let mut assignment = Assignment::new(self, terms, &mut around, holder, handle);
            let mut blocks = Vec::new();
            for family in [Family::V4, Family::V6].into_iter().filter(|family| terms.wanted.all_of(*family) > 0) {
                blocks.push(assignment.ensure_block(&mut work, family).await?);
            }
            work.write().await?;
            Ok(blocks)
        })
    }
}

impl Assignment<'_> {
    async fn ensure_block(&mut self, work: &mut Workset<'_>, family: Family) -> Result<IpNet> {
        let requested = self.requested_pools(work, family).await?;
        let pools = self.select(family, &requested)?;
        let chosen: Vec<&Pool> = pools.iter().collect();
        let block = self.pass(family, 0, &chosen).ensure_block(work).await?;
        if let Some(pool) = pool_holding(&pools, block) {
            self.guard_pool(work, pool.cidr()).await?;
        }
        Ok(block)
    }
}
