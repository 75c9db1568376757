//! Assigns addresses to a handle without a container (a service of a load balancer, a tunnel, a virtual machine), and
//! ensures that an owner has a block without assigning an address.
//!
//! For a handle without a container, the attributes of an attachment are not recorded, so its interfaces and boots are
//! unknown. Each assignment to a handle adds addresses, which are kept until they are released by handle or one by one.

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

/// The request of an assignment to a handle. All addresses of the request are assigned in one commit, or none.
#[derive(Clone, Debug)]
pub struct HandleRequest {
    handle: String,
    owner: Owner,
    attributes: BTreeMap<String, String>,
    most: Option<usize>,
    terms: AssignRequest,
}

impl HandleRequest {
    /// Creates a request of these addresses for a handle, in the blocks of this owner. By default, the addresses are
    /// for a workload, or for a load balancer if the owner is virtual.
    pub fn new(handle: impl Into<String>, owner: Owner, wanted: RequestedAddresses) -> Self {
        let terms = AssignRequest::of_owner(&owner, wanted);
        Self { handle: handle.into(), owner, attributes: BTreeMap::new(), most: None, terms }
    }

    /// Records these attributes with each address. Calico's own callers record at least `node`.
    #[must_use]
    pub fn with_attributes(mut self, attributes: BTreeMap<String, String>) -> Self {
        self.attributes = attributes;
        self
    }

    /// Limits the number of addresses of each requested family that the handle may hold, including the addresses that
    /// it already holds. A request that would exceed the limit fails.
    #[must_use]
    pub fn with_most_per_family(mut self, most: usize) -> Self {
        self.most = Some(most);
        self
    }

    /// Takes addresses only from these pools, given by name or network, in this order. By default, addresses come from
    /// the pools that select the node.
    #[must_use]
    pub fn with_pools(mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.terms.set_pools(family, pools);
        self
    }

    /// Sets the use of the addresses. Only pools that allow this use are used.
    #[must_use]
    pub fn with_usage(mut self, usage: PoolUse) -> Self {
        self.terms.usage = usage;
        self
    }

    /// Sets the labels of the namespace, for pools with a namespace selector.
    #[must_use]
    pub fn with_namespace_labels(mut self, labels: Labels) -> Self {
        self.terms.namespace_labels = labels;
        self
    }

    /// Limits the number of the owner's blocks, in addition to the limit in the settings; 0 for no additional limit.
    #[must_use]
    pub fn with_max_blocks(mut self, most: u32) -> Self {
        self.terms.max_blocks = most;
        self
    }

    /// Sets the addresses that the owner reserves for itself in each new block.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }

    /// Checks that the handle is not empty and contains neither a slash nor a carriage return. A handle is the last
    /// part of a key, and old migrations left keys with text after a carriage return.
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
    /// Assigns any free addresses or specific addresses to a handle, in the blocks of a node or of a virtual owner.
    /// Each call assigns further addresses, even if the handle already has addresses.
    /// [`HandleRequest::with_most_per_family`] limits the number of addresses that the handle may hold. The attributes
    /// of the request are recorded unchanged.
    ///
    /// The commit guards the handle and the keys that [`assign`](Self::assign) guards. An assignment to a handle
    /// records no pending commit. On a store that another process serves, the commit of a killed process may still
    /// happen, so release the handle before you forget it. Two concurrent requests with equal attributes write the same
    /// values. If the answer to one of two equal requests is lost, both requests may return the only address that was
    /// assigned. An attribute that differs between the requests prevents this.
    ///
    /// # Errors
    /// `HandleLimit` if the handle's limit would be exceeded. `Invalid` for an invalid handle or owner. Any error of
    /// [`assign`](Self::assign).
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

/// Refuses a request that exceeds the limit of a handle. The addresses that the handle holds are counted in the blocks,
/// and the handle is guarded.
///
/// If a handle's count differs from its block, another writer was interrupted, or is about to write the block.
/// Rewriting the block makes that writer fail and retry, and corrects the handle.
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

/// A request for blocks: an owner, the families in which the owner needs a block, and the pools to use.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    owner: Owner,
    terms: AssignRequest,
}

impl BlockRequest {
    /// Creates a request of a block of each of these families for this owner.
    pub fn new(owner: Owner, families: &[Family]) -> Self {
        let one = |family| usize::from(families.contains(&family));
        let terms = AssignRequest::of_owner(&owner, RequestedAddresses::any(one(Family::V4), one(Family::V6)));
        Self { owner, terms }
    }

    /// Uses only these pools, given by name or network, in this order. By default, the pools that select the node are
    /// used.
    #[must_use]
    pub fn with_pools(mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.terms.set_pools(family, pools);
        self
    }

    /// Sets the use of the addresses. Only pools that allow this use are used.
    #[must_use]
    pub fn with_usage(mut self, usage: PoolUse) -> Self {
        self.terms.usage = usage;
        self
    }

    /// Sets the addresses that the owner reserves for itself in a new block. An existing block is not changed.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }
}

impl Ipam {
    /// Ensures that an owner has a block of each family, and returns one block of each family, IPv4 first. The returned
    /// block is an existing block, full or not, or a newly claimed block. All blocks are claimed in one commit, or
    /// none. If the owner already has a block of each family, nothing is written. No address is assigned.
    ///
    /// The commit has the guards of [`assign`](Self::assign).
    ///
    /// # Errors
    /// `NoNewBlocks` if claiming is off or no block is available. `Pool` if no pool can serve the owner. `UnknownNode`
    /// if the node is not registered. `Invalid` for an invalid owner. Any store error.
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
