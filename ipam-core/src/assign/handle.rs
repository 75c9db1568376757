//! Assigns addresses to a handle of no container (a service of a load balancer, a tunnel, a virtual machine), and makes sure that
//! an owner has a block without assigning an address of it.
//!
//! For a handle the attributes of an attachment are not recorded, so interfaces and boots are not known: each call assigns further
//! addresses, and they stay until they are released by handle or one by one.

use std::collections::BTreeMap;

use ipnet::IpNet;
use kv::Deadline;

use super::{AssignRequest, AssignedAddress, Assignment, RequestedAddresses};
use crate::assign_context::pool_holding;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{Attribute, Document, Handle, HostReserved, Labels, Owner, Pool, PoolUse, keys};
use crate::net::Family;
use crate::write_set::WriteSet;

/// The request of an assignment to a handle. It is carried out as a whole, in one commit, or not at all.
#[derive(Clone, Debug)]
pub struct HandleRequest {
    handle: String,
    owner: Owner,
    attributes: BTreeMap<String, String>,
    most: Option<usize>,
    terms: AssignRequest,
}

impl HandleRequest {
    /// These addresses for this handle, in the blocks of this owner: for a workload on a node, for a load balancer where
    /// the owner is virtual.
    pub fn new(handle: impl Into<String>, owner: Owner, wanted: RequestedAddresses) -> Self {
        let terms = AssignRequest::of_owner(&owner, wanted);
        Self { handle: handle.into(), owner, attributes: BTreeMap::new(), most: None, terms }
    }

    /// Recorded with each address. Calico's own callers record at least `node`.
    #[must_use]
    pub fn with_attributes(mut self, attributes: BTreeMap<String, String>) -> Self {
        self.attributes = attributes;
        self
    }

    /// Only if the handle then holds at most so many addresses of each requested family, those among them that it holds
    /// already.
    #[must_use]
    pub fn with_most_per_family(mut self, most: usize) -> Self {
        self.most = Some(most);
        self
    }

    /// From these pools, by name or network, in this order; else from those that select the node.
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

    /// For a namespace with these labels, where pools have a namespace selector.
    #[must_use]
    pub fn with_namespace_labels(mut self, labels: Labels) -> Self {
        self.terms.namespace_labels = labels;
        self
    }

    /// The most blocks that the owner may have, besides the limit in the settings; 0 for no limit of the request's own.
    #[must_use]
    pub fn with_max_blocks(mut self, most: u32) -> Self {
        self.terms.max_blocks = most;
        self
    }

    /// The addresses that the owner keeps for itself in each new block.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }

    /// A handle is the last part of a key, and old migrations have left text behind a carriage return.
    fn check(&self) -> Result<()> {
        if self.handle.is_empty() || self.handle.contains(['/', '\r']) {
            let handle = &self.handle;
            return Err(Error::Invalid(format!(
                "{handle:?} cannot be a handle: use a name without / and control characters"
            )));
        }
        Ok(())
    }
}

impl Ipam {
    /// Assigns addresses to a handle: any free ones, or requested ones, in the blocks of a node or of a virtual owner.
    /// Each call assigns further addresses, also to a handle that has some; [`HandleRequest::with_most_per_family`]
    /// limits how many it may have. The attributes of the request are recorded unchanged.
    ///
    /// Guards: as [`assign`](Self::assign), and the handle. A process that is killed in here leaves no pending commit:
    /// on a store of other processes its commit may still happen, so release the handle before you forget it. Two
    /// requests at once that are equal to the last attribute write the same; if a reply is lost then, both may be
    /// answered with the one address that was assigned. An attribute of the caller's own distinguishes them.
    ///
    /// # Errors
    /// `HandleLimit`; `Invalid` for a handle or an owner that cannot be one; otherwise those of [`assign`](Self::assign).
    #[boxed_future]
    pub async fn assign_to_handle(&self, request: &HandleRequest, deadline: Deadline) -> Result<Vec<AssignedAddress>> {
        request.check()?;
        let HandleRequest { handle, owner, attributes, most, terms } = request;
        let mut misdated = Vec::new();
        let assigned = transact!(self, deadline, |tx| {
            let mut context =
                self.read_context(tx, owner, &terms.wanted, vec![keys::handle(handle)], Vec::new()).await?;
            let holder = Attribute::new(Some(handle), attributes.clone());
            let mut work = WriteSet::new(tx, self.now(), context.config.cooldown_seconds());
            work.heed_quotas().await?;
            if let Some(most) = most {
                stay_within(&mut work, handle, &terms.wanted, *most).await?;
            }
            let mut assignment = Assignment::new(self, terms, &mut context, holder, handle.clone());
            let done = assignment.all(&mut work).await;
            misdated = work.misdated().to_vec();
            done?;
            let answer = assignment.answer;
            work.check_quotas(Some(&**self.store())).await?;
            work.write().await?;
            Ok(answer)
        });
        if assigned.is_err() && !misdated.is_empty() {
            self.redate(&misdated, deadline).await?;
        }
        assigned
    }
}

/// Refuses a request for more than a handle may hold. The blocks say what it holds, and the handle is guarded.
///
/// If a handle does not count what a block holds, a foreign writer broke off, or is about to write the block. Rewriting
/// the block makes that writer start again, and the handle is right again.
async fn stay_within(work: &mut WriteSet<'_>, handle: &str, wanted: &RequestedAddresses, most: usize) -> Result<()> {
    let key = keys::handle(handle);
    let stored = work.tx.get(&key).await?;
    let document = stored.map(|value| Handle::decode(&key, value.as_bytes())).transpose()?.unwrap_or_default();
    let named: Vec<(IpNet, i64)> = document.blocks().collect();
    work.read_ahead(&named.iter().map(|(cidr, _)| *cidr).collect::<Vec<_>>()).await?;
    let mut holds = Vec::new();
    for (cidr, counted) in named {
        let held = work.block(cidr).await?.map_or(0, |block| block.ips_by_handle(handle).len());
        if usize::try_from(counted) != Ok(held) {
            work.change(cidr, |_| ()).await?;
            work.touch_handle(handle, cidr);
        }
        holds.push((Family::of_net(cidr), held));
    }
    for family in [Family::V4, Family::V6] {
        let held: usize = holds.iter().filter(|(of, _)| *of == family).map(|(_, held)| held).sum();
        let requested = wanted.all_of(family);
        if requested > 0 && held + requested > most {
            return Err(Error::HandleLimit { handle: handle.to_owned(), family, most, held, requested });
        }
    }
    Ok(())
}

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
        let terms = AssignRequest::of_owner(&owner, RequestedAddresses::any(one(Family::V4), one(Family::V6)));
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
    #[boxed_future]
    pub async fn ensure_blocks(&self, request: &BlockRequest, deadline: Deadline) -> Result<Vec<IpNet>> {
        let BlockRequest { owner, terms } = request;
        transact!(self, deadline, |tx| {
            let mut context = self.read_context(tx, owner, &terms.wanted, Vec::new(), Vec::new()).await?;
            let mut work = WriteSet::new(tx, self.now(), context.config.cooldown_seconds());
            let (holder, handle) = (Attribute::default(), String::new());
            let mut assignment = Assignment::new(self, terms, &mut context, holder, handle);
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
    async fn ensure_block(&mut self, work: &mut WriteSet<'_>, family: Family) -> Result<IpNet> {
        let requested = self.requested_pools(work, family).await?;
        let pools = self.select(family, &requested)?;
        let chosen: Vec<&Pool> = pools.iter().collect();
        let block = self.family_assigner(family, 0, &chosen).ensure_block(work).await?;
        if let Some(pool) = pool_holding(&pools, block) {
            self.guard_pool(work, pool.cidr()).await?;
        }
        Ok(block)
    }
}
