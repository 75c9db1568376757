//! Assigns addresses to a handle without a container, for example that of a load balancer's service, a tunnel or a
//! virtual machine. The function [`Ipam::ensure_blocks`] ensures that an owner has a block, and assigns no address.
//!
//! An address that is assigned to a handle without a container has no attachment, so no interface and no boot id are
//! recorded for the address. Each assignment adds addresses to the handle, which holds them until they are released by
//! handle or one by one.

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

/// A request for an assignment to a handle. Either all requested addresses are assigned, in one commit, or none is.
#[derive(Clone, Debug)]
pub struct HandleRequest {
    handle: String,
    owner: Owner,
    attributes: BTreeMap<String, String>,
    most: Option<usize>,
    terms: AssignRequest,
}

impl HandleRequest {
    /// Creates a request for addresses from the blocks of `owner`. By default, pools for workloads are used, or pools
    /// for load balancers if the owner is virtual.
    pub fn new(handle: impl Into<String>, owner: Owner, wanted: RequestedAddresses) -> Self {
        let terms = AssignRequest::of_owner(&owner, wanted);
        Self { handle: handle.into(), owner, attributes: BTreeMap::new(), most: None, terms }
    }

    /// Sets the attributes that are recorded with each assigned address. Calico's own programs record at least the
    /// attribute `node`.
    #[must_use]
    pub fn with_attributes(mut self, attributes: BTreeMap<String, String>) -> Self {
        self.attributes = attributes;
        self
    }

    /// Sets the maximum number of addresses that the handle may hold in each requested family, including the addresses
    /// that it already holds. A request that would exceed the handle's address limit fails.
    #[must_use]
    pub fn with_most_per_family(mut self, most: usize) -> Self {
        self.most = Some(most);
        self
    }

    /// Restricts the assignment to `pools` (names or CIDRs), which are tried in the given order. By default, addresses
    /// come from the pools that select the node.
    #[must_use]
    pub fn with_pools(mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.terms.set_pools(family, pools);
        self
    }

    /// Sets what the addresses are for, for example workloads or tunnels. Only pools that allow the use `usage` are
    /// tried.
    #[must_use]
    pub fn with_usage(mut self, usage: PoolUse) -> Self {
        self.terms.usage = usage;
        self
    }

    /// Sets the labels of the workload's namespace, which are matched against the namespace selectors of pools.
    #[must_use]
    pub fn with_namespace_labels(mut self, labels: Labels) -> Self {
        self.terms.namespace_labels = labels;
        self
    }

    /// Sets a limit of blocks for the owner, besides the limit in the settings; 0 for no additional limit.
    #[must_use]
    pub fn with_max_blocks(mut self, most: u32) -> Self {
        self.terms.max_blocks = most;
        self
    }

    /// Sets the addresses that are reserved for the owner itself in each new block.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }

    /// Checks that the handle is not empty and contains neither a slash nor a carriage return. A handle must not
    /// contain a slash, because it is the last segment of a key. Text after a carriage return in a handle is ignored,
    /// because an old migration of Calico left such text in handles.
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
    /// Assigns free or specific addresses to a handle, from the blocks of a node or of a virtual owner. Each request
    /// assigns additional addresses, even if the handle already holds addresses.
    /// [`HandleRequest::with_most_per_family`] limits the number of addresses that the handle may hold. The request's
    /// attributes are recorded unchanged with each address.
    ///
    /// The commit guards the handle and the keys that [`assign`](Self::assign) guards. An assignment to a handle
    /// records no pending commit. If the calling process is killed during the assignment, a store in another process
    /// may still execute the commit. If the caller is killed during the assignment, the handle should be released,
    /// because it may hold addresses that were never returned to the caller. Two concurrent requests must differ in an
    /// attribute: requests with equal attributes write equal values, so both may return the same address if the store's
    /// answer to one of them is lost.
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

/// Fails if a request would exceed the address limit of a handle. Counts the handle's addresses in the blocks, and
/// guards the handle.
///
/// If the handle's count for a block differs from the addresses in the block, another writer was interrupted or is
/// about to write the block. Corrects the number of addresses that the handle records for the block, and rewrites the
/// block, so that the commit of a concurrent writer fails and is retried.
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

/// A request to ensure that an owner has a block in each of the given families.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    owner: Owner,
    terms: AssignRequest,
}

impl BlockRequest {
    /// Creates a request for one block of each family in `families`, for `owner`.
    pub fn new(owner: Owner, families: &[Family]) -> Self {
        let one = |family| usize::from(families.contains(&family));
        let terms = AssignRequest::of_owner(&owner, RequestedAddresses::any(one(Family::V4), one(Family::V6)));
        Self { owner, terms }
    }

    /// Restricts the request to `pools` (names or CIDRs), which are tried in the given order. By default, blocks come
    /// from the pools that select the node.
    #[must_use]
    pub fn with_pools(mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.terms.set_pools(family, pools);
        self
    }

    /// Sets what the addresses are for, for example workloads or tunnels. Only pools that allow the use `usage` are
    /// tried.
    #[must_use]
    pub fn with_usage(mut self, usage: PoolUse) -> Self {
        self.terms.usage = usage;
        self
    }

    /// Sets the addresses that are reserved for the owner itself in a new block. The blocks that the owner already has
    /// are left unchanged.
    #[must_use]
    pub fn with_host_reserved(mut self, reserved: HostReserved) -> Self {
        self.terms.host_reserved = Some(reserved);
        self
    }
}

impl Ipam {
    /// Ensures that an owner has a block of each requested family, and returns one block of each family, IPv4 first.
    /// Each returned block is newly claimed, or is an existing block of the owner, which may be full. All new blocks
    /// are claimed in one commit. If the owner already has a block of each family, nothing is written. Claiming blocks
    /// assigns no address.
    ///
    /// The commit guards the same keys as the commit of [`assign`](Self::assign).
    ///
    /// # Errors
    /// `NoNewBlocks` if the settings forbid new blocks, or if no block can be claimed. `Pool` if no pool can be used
    /// for the owner. `UnknownNode` if the node is not registered. `Invalid` for an invalid owner. Any store error.
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
