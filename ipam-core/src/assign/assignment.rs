//! Carries out an assignment: selects the pools and blocks from which the requested addresses are assigned.
//!
//! Either all requested addresses are assigned or none is. The commit of an assignment guards every block that it
//! changes, and the affinity to every block that it creates. As in Calico, node selectors and the block limit are not
//! checked for specifically requested addresses. On a routed network a specifically requested address is assigned even
//! if it is reserved. On a bridged network a reserved address is refused, because it may be the gateway or lie outside
//! the configured ranges.
//!
//! A bridged network can have several pools of a family. An address is assigned from the first enabled pool, in the
//! order of the network's configuration, that has a free address. If [hints](crate::hints) are remembered, a pool that
//! was full is tried last for a minute, which usually saves reading the full pool. An assignment fails only after every
//! pool was tried. A configuration in host-local's format can define several sets of ranges of one family. An
//! attachment gets one address from each set of ranges, and each set has its own list of pools.

use std::net::IpAddr;

use ipnet::IpNet;
use time::OffsetDateTime;

use super::auto::{FamilyAssigner, refuse_among_prefixes};
use super::request::{AssignRequest, AssignedAddress, Gateway, NamespaceLabels, PoolDefinition, RepeatPolicy};
use super::sticky::WorkloadAddresses;
use super::{bridge, define, secondary};
use crate::assign_context::{AssignContext, pool_holding};
use crate::check::HeldAddress;
use crate::error::{BridgeError, Error, OverlapError, Result};
use crate::ipam::Ipam;
use crate::model::{AssignmentMode, Attribute, Block, Owner, PREFIX_LENGTH_ANNOTATION, Pool, keys};
use crate::net::Family;
use crate::pools::{self, PoolError, PoolQuery};
use crate::write_set::WriteSet;

/// The state of an assignment in progress.
pub(super) struct Assignment<'a> {
    pub(super) ipam: &'a Ipam,
    pub(super) request: &'a AssignRequest,
    pub(super) context: &'a mut AssignContext,
    pub(super) holder: Attribute,
    pub(super) handle: String,
    pub(super) held: Vec<HeldAddress>,
    /// The sticky addresses that the request's workload keeps; `None` if the request names no workload.
    pub(super) kept: Option<WorkloadAddresses>,
    pub(super) answer: Vec<AssignedAddress>,
}

impl<'a> Assignment<'a> {
    /// Creates the state for an assignment to a holder that has no addresses yet and belongs to no workload.
    pub(super) fn new(
        ipam: &'a Ipam,
        request: &'a AssignRequest,
        context: &'a mut AssignContext,
        holder: Attribute,
        handle: String,
    ) -> Self {
        Self { ipam, request, context, holder, handle, held: Vec::new(), kept: None, answer: Vec::new() }
    }
}

impl Assignment<'_> {
    pub(super) async fn all(&mut self, work: &mut WriteSet<'_>) -> Result<()> {
        self.these(work, &self.request.wanted.these).await?;
        for family in [Family::V4, Family::V6] {
            self.any(work, family, self.request.wanted.any_of(family)).await?;
        }
        self.check_lengths(work).await
    }

    /// Checks that no other program has changed the prefix length of a pool from which an address was assigned.
    async fn check_lengths(&self, work: &mut WriteSet<'_>) -> Result<()> {
        for assigned in &self.answer {
            let (AssignedAddress { block, pool, .. }, length) = (assigned, assigned.length());
            if let Some(found) = work.block(*block).await?.map(Block::length).filter(|found| *found != length) {
                return Err(Error::Invalid(format!(
                    "pool {pool} assigns networks of /{length}, and its block {block} has some of /{found}; make the pool's \
                     annotation {PREFIX_LENGTH_ANNOTATION} what it was, with: margay apply"
                )));
            }
        }
        Ok(())
    }

    /// Assigns `wanted` addresses of one family; the allocator chooses the addresses.
    pub(super) async fn any(&mut self, work: &mut WriteSet<'_>, family: Family, wanted: usize) -> Result<()> {
        if wanted == 0 {
            return Ok(());
        }
        if self.request.bridge.is_some() {
            return self.on_bridge(work, family, wanted).await;
        }
        let requested = self.requested_pools(work, family).await?;
        let pools = self.select(family, &requested)?;
        pools.iter().try_for_each(|pool| self.require_manual(pool))?;
        let of_pools = |held: &&HeldAddress| {
            pool_holding(&pools, held.block).is_some() && !self.answer.iter().any(|assigned| assigned.ip == held.ip)
        };
        let mut addresses: Vec<(IpAddr, IpNet)> =
            self.held.iter().filter(of_pools).take(wanted).map(|held| (held.ip, held.block)).collect();
        if addresses.len() < wanted {
            addresses.extend(self.take_kept(work, family, &pools, |_| true).await?);
        }
        if addresses.len() < wanted {
            let pools: Vec<&Pool> = pools.iter().collect();
            let new = self.family_assigner(family, wanted - addresses.len(), &pools).run(work).await?;
            self.keep_new(family, &new);
            addresses.extend(new);
        }
        for (ip, block) in addresses {
            let Some(pool) = pool_holding(&pools, block) else { continue };
            self.guard_pool(work, pool.cidr()).await?;
            self.answer.push(AssignedAddress::of(pool, ip, block, None));
        }
        Ok(())
    }

    async fn these(&mut self, work: &mut WriteSet<'_>, addresses: &[IpAddr]) -> Result<()> {
        for ip in addresses {
            let requested = self.requested_pools(work, Family::of(*ip)).await?;
            let assigned = self.this(work, *ip, &requested).await?;
            self.guard_pool(work, assigned.pool).await?;
            self.answer.push(assigned);
        }
        Ok(())
    }

    async fn this(&mut self, work: &mut WriteSet<'_>, ip: IpAddr, requested: &[IpNet]) -> Result<AssignedAddress> {
        let pool = pools::pool_of(&self.context.pools, ip, self.request.usage)?.clone();
        self.require_manual(&pool)?;
        let unit = pool.unit_of(ip);
        let ip = unit.network();
        let mut gateway = None;
        if self.request.bridge.is_some() {
            // A bridged network that names its pools gets addresses only from these pools.
            if !requested.is_empty() && !requested.contains(&pool.cidr()) {
                return Err(PoolError::AddressOutside.into());
            }
            gateway = self.prepare_bridge(work, &pool, self.gateway_in(&pool, requested)).await?;
        }
        let held = self.held.iter().find(|held| held.ip == ip);
        if let Some(held) = held
            && self.request.repeated == RepeatPolicy::SameAnswer
        {
            return Ok(AssignedAddress::of(&pool, ip, held.block, gateway));
        }
        if self.request.bridge.is_some() && self.context.reservations.touches(unit) {
            return Err(Error::Reserved(ip));
        }
        if let Some(block) = pools::block_of(&pool, ip)
            && self.is_kept(work, ip, block).await?
        {
            work.change(block, |block| block.assign_kept(ip, &self.holder)).await?;
            work.touch_handle(&self.handle, block);
            return Ok(AssignedAddress::of(&pool, ip, block, gateway));
        }
        let block = self.specific().assign(work, ip, &pool).await?;
        Ok(AssignedAddress::of(&pool, ip, block, gateway))
    }

    /// Reserves the gateway and the unusable addresses of a bridged network's pool, and returns the gateway.
    async fn prepare_bridge(&mut self, work: &mut WriteSet<'_>, pool: &Pool, wish: Gateway) -> Result<Option<IpAddr>> {
        if pool.prefix_length().is_some() {
            return match wish {
                Gateway::Recorded => Ok(None),
                Gateway::First | Gateway::At(_) => Err(BridgeError::NoGateway { pool: pool.name().to_owned() }.into()),
            };
        }
        let outside = match wish {
            Gateway::At(address) if bridge::is_outside(pool.cidr(), address) => Some(address),
            _ => None,
        };
        let wish = if outside.is_some() { Gateway::Recorded } else { wish };
        let prepared = bridge::prepare(self.ipam, work, pool, wish).await?;
        if let Some(written) = prepared.written {
            self.context.set_reservation(written);
        }
        Ok(outside.or(prepared.gateway))
    }

    pub(super) fn family_assigner<'p>(
        &'p self,
        family: Family,
        wanted: usize,
        pools: &'p [&'p Pool],
    ) -> FamilyAssigner<'p> {
        FamilyAssigner {
            ipam: self.ipam,
            request: self.request,
            context: self.context,
            family,
            wanted,
            holder: self.holder_in(family),
            handle: &self.handle,
            pools,
            owner: self.owner(),
            other: self.other_owner(),
            now: self.ipam.now(),
        }
    }

    /// True if the request is for a secondary network in a store that Calico also uses.
    fn is_secondary(&self) -> bool {
        self.request.bridge.is_some() && self.context.beside_calico
    }

    /// Returns the owner from whose blocks addresses are assigned: the node, or for a secondary network the virtual
    /// owner of the node's secondary networks.
    pub(super) fn owner(&self) -> Owner {
        if self.is_secondary() { Owner::secondary(&self.context.host.name) } else { self.context.host.owner() }
    }

    /// Returns the node's other owner, which is not [`Self::owner`]. A node has two owners of blocks: the node itself,
    /// and the virtual owner of its secondary networks.
    fn other_owner(&self) -> Option<Owner> {
        match self.context.host.owner() {
            Owner::Host(name) if self.is_secondary() => Some(Owner::host(name)),
            Owner::Host(name) => Some(Owner::secondary(&name)),
            Owner::Virtual(_) | Owner::Other(_) => None,
        }
    }

    /// Fails if the request's network must not use the pool. A secondary network must not use a pool from which Calico
    /// also assigns addresses. Calico's network must not use a pool of prefixes, because Calico's agent Felix routes
    /// single addresses only.
    fn require_manual(&self, pool: &Pool) -> Result<()> {
        let is_calicos = self.request.bridge.is_none() && !self.request.attachment.container.is_empty();
        if pool.prefix_length().is_some() && self.context.beside_calico && is_calicos {
            return Err(Error::PrefixesBesideCalico(pool.name().to_owned()));
        }
        if self.is_secondary() && pool.assignment_mode() != AssignmentMode::Manual {
            return Err(BridgeError::CalicosPool { pool: pool.name().to_owned() }.into());
        }
        Ok(())
    }

    fn specific(&self) -> SpecificRequest<'_> {
        SpecificRequest {
            request: self.request,
            context: self.context,
            holder: self.plain_holder(),
            handle: &self.handle,
            owner: self.owner(),
            is_secondary: self.is_secondary(),
            now: self.ipam.now(),
        }
    }

    /// Returns the CIDRs of the pools that the request defines or names for a family. If a pool that the request
    /// defines does not exist, creates the pool.
    pub(super) async fn requested_pools(&mut self, work: &mut WriteSet<'_>, family: Family) -> Result<Vec<IpNet>> {
        let mut names = Vec::new();
        for definition in self.request.definitions(family) {
            names.push(define::prepare(self.ipam, work, self.context, &definition, self.request).await?);
        }
        if names.is_empty() {
            names = self.request.pools(family).to_vec();
        }
        Ok(names
            .iter()
            .map(|text| pools::parse_requested(text, &self.context.pools, family))
            .collect::<Result<_, PoolError>>()?)
    }

    /// Returns the pools from which addresses of a family may be assigned, in the order in which they are tried.
    pub(super) fn select(&self, family: Family, requested: &[IpNet]) -> Result<Vec<Pool>> {
        let query = PoolQuery {
            family,
            requested,
            node: &self.context.host.name,
            node_labels: &self.context.host.labels,
            namespace_labels: &self.request.namespace_labels,
            wanted: self.request.usage,
            host_reserved: self.request.host_reserved.as_ref(),
        };
        if self.request.namespace == NamespaceLabels::NotYetRead
            && pools::asks_for_namespace(&self.context.pools, &query)
        {
            return Err(Error::NamespaceWanted);
        }
        Ok(pools::select_pools(&self.context.pools, &query)?.into_iter().cloned().collect())
    }

    /// Guards a pool, so that the commit fails if the pool is deleted or changed before the commit.
    pub(super) async fn guard_pool(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<()> {
        if let Some(pool) = self.context.pools.iter().find(|pool| pool.cidr() == cidr) {
            work.tx.get(&keys::resource(keys::ResourceKind::IpPool, pool.name())).await?;
        }
        Ok(())
    }
}

/// The inputs that are the same for all specifically requested addresses of one request.
#[derive(Debug)]
struct SpecificRequest<'a> {
    request: &'a AssignRequest,
    context: &'a AssignContext,
    holder: &'a Attribute,
    handle: &'a str,
    owner: Owner,
    is_secondary: bool,
    now: OffsetDateTime,
}

impl SpecificRequest<'_> {
    /// Assigns the specific address `ip` from a pool, and returns the block that contains it.
    async fn assign(&self, work: &mut WriteSet<'_>, ip: IpAddr, pool: &Pool) -> Result<IpNet> {
        let cidr = pools::block_of(pool, ip).ok_or(PoolError::AddressOutside)?;
        if work.block(cidr).await?.is_none() {
            refuse_among_prefixes(work, pool).await?;
            let reserved = self.request.host_reserved.as_ref();
            let block = Block::of_length(cidr, pool.length(), Some(&self.owner), self.now, reserved);
            work.create(block?).await?;
            work.confirm_affinity(&self.owner, cidr).await?;
        } else if let Some(other) = work.overlap_of(cidr).await? {
            return Err(OverlapError::Block { block: cidr, other }.into());
        }
        if self.is_secondary {
            let network = &self.request.attachment.network;
            let block = work.block(cidr).await?;
            if let Some(Owner::Host(node)) = block.and_then(Block::owner)
                && !secondary::make_secondary(work, cidr, &node, network, self.now).await?
            {
                return Err(BridgeError::CalicosBlock { ip, block: cidr, node }.into());
            }
        }
        if self.context.config.strict_affinity() {
            work.block(cidr).await?.map_or(Ok(()), |block| block.require_owner(&self.owner))?;
        }
        let assigned = work.change(cidr, |block| block.assign_specific(ip, self.holder)).await?;
        assigned.unwrap_or(Ok(())).map_err(|error| Error::AlreadyAssigned(error.0))?;
        work.touch_handle(self.handle, cidr);
        Ok(cidr)
    }
}

impl Assignment<'_> {
    /// Assigns addresses of one family on a bridged network. If the configuration defines several sets of ranges,
    /// assigns one address from each set in which the attachment has no address yet, up to `wanted` addresses. If the
    /// request has no range sets, assigns `wanted` addresses from the requested pools.
    async fn on_bridge(&mut self, work: &mut WriteSet<'_>, family: Family, wanted: usize) -> Result<()> {
        let sets = self.request.sets(family);
        if sets.len() < 2 {
            let requested = self.requested_pools(work, family).await?;
            return self.on_bridge_of(work, family, wanted, &requested, &[]).await;
        }
        let mut left = wanted;
        for set in sets {
            let is_served = self.answer.iter().any(|assigned| set.iter().any(|one| one.has(assigned.ip)));
            if is_served || left == 0 {
                continue;
            }
            left -= 1;
            // Clear the ranges of the previous range set before applying the ranges of the current set.
            self.context.allow_all();
            self.requested_pools(work, family).await?;
            let mut requested: Vec<IpNet> = Vec::new();
            for one in &set {
                let cidr = define::pool_of(self.context, one).map_or(one.cidr, Pool::cidr);
                self.context.keep_off(&one.name, &define::outside(cidr, &one.ranges));
                if !requested.contains(&cidr) {
                    requested.push(cidr);
                }
            }
            self.on_bridge_of(work, family, 1, &requested, &set).await?;
        }
        self.context.allow_all();
        Ok(())
    }

    /// Assigns `wanted` addresses of one family from the requested pools on a bridged network. If `set` is not empty,
    /// only addresses in the ranges of the pool definitions in `set` are assigned.
    async fn on_bridge_of(
        &mut self,
        work: &mut WriteSet<'_>,
        family: Family,
        wanted: usize,
        requested: &[IpNet],
        set: &[&PoolDefinition],
    ) -> Result<()> {
        // A disabled pool assigns no new addresses, but a container keeps the addresses that it already has.
        let disabled = self.context.pools.iter().filter(|pool| requested.contains(&pool.cidr()) && !pool.is_enabled());
        let disabled: Vec<Pool> = disabled.cloned().collect();
        let is_enabled = |cidr: &IpNet| disabled.iter().all(|pool| pool.cidr() != *cidr);
        let enabled: Vec<IpNet> = requested.iter().copied().filter(is_enabled).collect();
        let pools = self.select(family, if enabled.is_empty() { requested } else { &enabled })?;
        pools.iter().try_for_each(|pool| self.require_manual(pool))?;
        if requested.is_empty() && pools.len() > 1 {
            let candidates = pools.iter().map(|pool| pool.name().to_owned()).collect();
            return Err(BridgeError::SeveralPools { family, candidates }.into());
        }
        let has = |block: IpNet| pool_holding(pools.iter().chain(&disabled), block);
        let is_of_set = |ip: IpAddr| set.is_empty() || set.iter().any(|one| one.has(ip));
        let held = self.held.iter().filter(|held| {
            let is_new = !self.answer.iter().any(|assigned| assigned.ip == held.ip);
            is_new && is_of_set(held.ip) && has(held.block).is_some()
        });
        let held: Vec<(IpAddr, IpNet)> = held.take(wanted).map(|held| (held.ip, held.block)).collect();
        for (ip, block) in &held {
            let Some(pool) = has(*block) else { continue };
            let gateway = self.prepare_bridge(work, pool, self.gateway_in(pool, requested)).await?;
            self.add(work, *ip, *block, pool, gateway).await?;
        }
        for _ in held.len()..wanted {
            let kept = self.take_kept(work, family, &pools, is_of_set).await?;
            match kept.and_then(|(ip, block)| Some((ip, block, pool_holding(&pools, block)?))) {
                Some((ip, block, pool)) => {
                    let gateway = self.prepare_bridge(work, pool, self.gateway_in(pool, requested)).await?;
                    self.add(work, ip, block, pool, gateway).await?;
                }
                None => self.first_with_room(work, family, &pools, requested).await?,
            }
        }
        Ok(())
    }

    /// Assigns an address from the first pool in `pools` that has a free address. If no pool has a free address,
    /// assigns a sticky address whose wait for its workload has ended.
    async fn first_with_room(
        &mut self,
        work: &mut WriteSet<'_>,
        family: Family,
        pools: &[Pool],
        requested: &[IpNet],
    ) -> Result<()> {
        let attachment = &self.request.attachment;
        let known = if pools.len() > 1 { self.ipam.recall_full_pools(attachment) } else { Vec::new() };
        let (last, first): (Vec<&Pool>, Vec<&Pool>) = pools.iter().partition(|pool| known.contains(&pool.cidr()));
        let (mut full, mut gateways, mut refused) = (Vec::new(), Vec::new(), None);
        for pool in first.into_iter().chain(last) {
            let gateway = self.prepare_bridge(work, pool, self.gateway_in(pool, requested)).await?;
            let mut taken = Vec::new();
            match self.family_assigner(family, 1, &[pool]).take_free(work, &mut taken).await {
                Ok(()) => {
                    full.retain(|pool| !self.is_shared(family, *pool));
                    if !full.is_empty() {
                        self.ipam.remember_full_pools(attachment, &full);
                    }
                    return self.add_new(work, family, &taken, pool, gateway).await;
                }
                // If one pool is full and another is excluded by the block limit, the block limit is reported, since an
                // operator can raise the limit.
                Err(error) if error.is_exhaustion() => {
                    if !matches!(refused, Some(Error::BlockLimit)) {
                        refused = Some(error);
                    }
                    full.push(pool.cidr());
                    gateways.push((pool, gateway));
                }
                Err(error) => return Err(error),
            }
        }
        for (pool, gateway) in gateways {
            let mut taken = Vec::new();
            self.family_assigner(family, 1, &[pool]).take_overdue(work, &mut taken).await?;
            if !taken.is_empty() {
                return self.add_new(work, family, &taken, pool, gateway).await;
            }
        }
        let all: Vec<&Pool> = pools.iter().collect();
        Err(match refused {
            Some(Error::Exhausted { .. }) | None => self.family_assigner(family, 1, &all).shortage(0, 0),
            Some(error) => error,
        })
    }

    /// True if several sets of ranges share this pool. Two sets of ranges can use the same pool, so the pool may still
    /// have free addresses when one set is full.
    fn is_shared(&self, family: Family, pool: IpNet) -> bool {
        let is_in = |one: &&PoolDefinition| define::pool_of(self.context, one).map_or(one.cidr, Pool::cidr) == pool;
        self.request.sets(family).iter().filter(|set| set.iter().any(is_in)).count() > 1
    }

    /// Adds newly assigned addresses to the answer to the request, and to the sticky addresses of the request's
    /// workload.
    async fn add_new(
        &mut self,
        work: &mut WriteSet<'_>,
        family: Family,
        taken: &[(IpAddr, IpNet)],
        pool: &Pool,
        gateway: Option<IpAddr>,
    ) -> Result<()> {
        self.keep_new(family, taken);
        for (ip, block) in taken {
            self.add(work, *ip, *block, pool, gateway).await?;
        }
        Ok(())
    }

    async fn add(
        &mut self,
        work: &mut WriteSet<'_>,
        ip: IpAddr,
        block: IpNet,
        pool: &Pool,
        gateway: Option<IpAddr>,
    ) -> Result<()> {
        self.guard_pool(work, pool.cidr()).await?;
        self.answer.push(AssignedAddress::of(pool, ip, block, gateway));
        Ok(())
    }

    /// Returns the gateway that the network requests in one of its pools: a configured gateway inside the pool, or else
    /// the gateway in the pool's definition. If the configured gateway lies in another pool of the network, returns the
    /// gateway that the reservation of `pool` records. Without a recorded gateway, the first host address of `pool` is
    /// used.
    fn gateway_in(&self, pool: &Pool, requested: &[IpNet]) -> Gateway {
        let wish = self.request.bridge.map(|bridge| bridge.gateway(pool.family())).unwrap_or_default();
        if let Some(address) = self.request.gateways.iter().find(|address| pool.cidr().contains(*address)) {
            return Gateway::At(*address);
        }
        let of_pool = self.request.define.iter().filter(|one| one.cidr == pool.cidr());
        if let Some(address) = of_pool.filter_map(|one| one.gateway).next() {
            return Gateway::At(address);
        }
        match wish {
            Gateway::At(address) if !pool.cidr().contains(&address) => {
                let is_anothers = requested.iter().any(|other| other.contains(&address));
                if is_anothers { Gateway::First } else { wish }
            }
            wish => wish,
        }
    }
}
