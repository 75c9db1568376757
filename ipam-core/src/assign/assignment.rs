//! An assignment: the pools and blocks from which the addresses of a request come.

use std::net::IpAddr;

use ipnet::IpNet;

use super::auto::Pass;
use super::held::Held;
use super::request::{AssignRequest, Assigned, Gateway, NamespaceLabels, Repeated};
use super::specific::Specific;
use super::sticky::Kept;
use super::{bridge, define};
use crate::error::{BridgeError, Error, Result};
use crate::ipam::Ipam;
use crate::model::{AssignmentMode, Attribute, Block, Owner, PREFIX_LENGTH_ANNOTATION, Pool, keys};
use crate::net::Family;
use crate::pools::{self, PoolError, PoolQuery};
use crate::surroundings::{Surroundings, pool_holding};
use crate::workset::Workset;

/// An assignment in progress.
pub(super) struct Assignment<'a> {
    pub(super) ipam: &'a Ipam,
    pub(super) request: &'a AssignRequest,
    pub(super) around: &'a mut Surroundings,
    pub(super) holder: Attribute,
    pub(super) handle: String,
    pub(super) held: Vec<Held>,
    /// The addresses of the workload, if it keeps some.
    pub(super) kept: Option<Kept>,
    pub(super) answer: Vec<Assigned>,
}

impl<'a> Assignment<'a> {
    /// An assignment of which nothing is known yet: the holder has no addresses, and no workload keeps any.
    pub(super) fn new(
        ipam: &'a Ipam,
        request: &'a AssignRequest,
        around: &'a mut Surroundings,
        holder: Attribute,
        handle: String,
    ) -> Self {
        Self { ipam, request, around, holder, handle, held: Vec::new(), kept: None, answer: Vec::new() }
    }
}

impl Assignment<'_> {
    /// Assigns all that is wanted.
    pub(super) async fn all(&mut self, work: &mut Workset<'_>) -> Result<()> {
        self.these(work, &self.request.wanted.these).await?;
        for family in [Family::V4, Family::V6] {
            self.any(work, family, self.request.wanted.any_of(family)).await?;
        }
        self.check_lengths(work).await
    }

    /// Checks that each block has what its pool assigns: the length of a pool's prefixes may have been changed behind our
    /// back.
    async fn check_lengths(&self, work: &mut Workset<'_>) -> Result<()> {
        for assigned in &self.answer {
            let (Assigned { block, pool, .. }, length) = (assigned, assigned.length());
            if let Some(found) = work.block(*block).await?.map(Block::length).filter(|found| *found != length) {
                return Err(Error::Invalid(format!(
                    "pool {pool} assigns networks of /{length}, and its block {block} has some of /{found}; make the pool's \
                     annotation {PREFIX_LENGTH_ANNOTATION} what it was, with: margay apply"
                )));
            }
        }
        Ok(())
    }

    /// Assigns any addresses of one family.
    pub(super) async fn any(&mut self, work: &mut Workset<'_>, family: Family, wanted: usize) -> Result<()> {
        if wanted == 0 {
            return Ok(());
        }
        if self.request.bridge.is_some() {
            return self.on_bridge(work, family, wanted).await;
        }
        let requested = self.requested_pools(work, family).await?;
        let pools = self.select(family, &requested)?;
        pools.iter().try_for_each(|pool| self.require_manual(pool))?;
        let of_pools = |held: &&Held| {
            pool_holding(&pools, held.block).is_some() && !self.answer.iter().any(|assigned| assigned.ip == held.ip)
        };
        let mut addresses: Vec<(IpAddr, IpNet)> =
            self.held.iter().filter(of_pools).take(wanted).map(|held| (held.ip, held.block)).collect();
        if addresses.len() < wanted {
            addresses.extend(self.take_kept(work, family, &pools, |_| true).await?);
        }
        if addresses.len() < wanted {
            let pools: Vec<&Pool> = pools.iter().collect();
            let new = self.pass(family, wanted - addresses.len(), &pools).run(work).await?;
            self.keep_new(family, &new);
            addresses.extend(new);
        }
        for (ip, block) in addresses {
            let Some(pool) = pool_holding(&pools, block) else { continue };
            self.guard_pool(work, pool.cidr()).await?;
            self.answer.push(Assigned::of(pool, ip, block, None));
        }
        Ok(())
    }

    /// Assigns these addresses.
    pub(super) async fn these(&mut self, work: &mut Workset<'_>, addresses: &[IpAddr]) -> Result<()> {
        for ip in addresses {
            let requested = self.requested_pools(work, Family::of(*ip)).await?;
            let assigned = self.this(work, *ip, &requested).await?;
            self.guard_pool(work, assigned.pool).await?;
            self.answer.push(assigned);
        }
        Ok(())
    }

    /// Assigns this address.
    pub(super) async fn this(&mut self, work: &mut Workset<'_>, ip: IpAddr, requested: &[IpNet]) -> Result<Assigned> {
        let pool = pools::pool_of(&self.around.pools, ip, self.request.usage)?.clone();
        self.require_manual(&pool)?;
        let unit = pool.unit_of(ip);
        let ip = unit.network();
        let mut gateway = None;
        if self.request.bridge.is_some() {
            // A network that names its pools has no addresses of other pools.
            if !requested.is_empty() && !requested.contains(&pool.cidr()) {
                return Err(PoolError::AddressOutside.into());
            }
            gateway = self.prepare_bridge(work, &pool, self.gateway_in(&pool, requested)).await?;
        }
        let held = self.held.iter().find(|held| held.ip == ip);
        if let Some(held) = held
            && self.request.repeated == Repeated::SameAnswer
        {
            return Ok(Assigned::of(&pool, ip, held.block, gateway));
        }
        if self.request.bridge.is_some() && self.around.reservations.touches(unit) {
            return Err(Error::Reserved(ip));
        }
        if let Some(block) = pools::block_of(&pool, ip)
            && self.is_kept(work, ip, block).await?
        {
            work.change(block, |block| block.assign_kept(ip, &self.holder)).await?;
            work.touch_handle(&self.handle, block);
            return Ok(Assigned::of(&pool, ip, block, gateway));
        }
        let block = self.specific().assign(work, ip, &pool).await?;
        Ok(Assigned::of(&pool, ip, block, gateway))
    }

    /// Makes a pool ready for a bridged network, and returns its gateway.
    pub(super) async fn prepare_bridge(
        &mut self,
        work: &mut Workset<'_>,
        pool: &Pool,
        wish: Gateway,
    ) -> Result<Option<IpAddr>> {
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
            self.around.set_reservation(written);
        }
        Ok(outside.or(prepared.gateway))
    }

    pub(super) fn pass<'p>(&'p self, family: Family, wanted: usize, pools: &'p [&'p Pool]) -> Pass<'p> {
        Pass {
            ipam: self.ipam,
            request: self.request,
            around: self.around,
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

    /// True for a secondary network in a store that Calico reads.
    pub(super) fn is_secondary(&self) -> bool {
        self.request.bridge.is_some() && self.around.beside_calico
    }

    /// The owner from whose blocks addresses come: the node, or the virtual owner of its secondary networks.
    pub(super) fn owner(&self) -> Owner {
        if self.is_secondary() { Owner::secondary(&self.around.host.name) } else { self.around.host.owner() }
    }

    /// The other one of the node's two owners.
    pub(super) fn other_owner(&self) -> Option<Owner> {
        match self.around.host.owner() {
            Owner::Host(name) if self.is_secondary() => Some(Owner::host(name)),
            Owner::Host(name) => Some(Owner::secondary(&name)),
            Owner::Virtual(_) | Owner::Other(_) => None,
        }
    }

    /// Refuses, for a secondary network, a pool from which Calico assigns addresses, too; and for a network of Calico's
    /// a pool of prefixes, since Felix routes single addresses only.
    pub(super) fn require_manual(&self, pool: &Pool) -> Result<()> {
        let is_calicos = self.request.bridge.is_none() && !self.request.attachment.container.is_empty();
        if pool.prefix_length().is_some() && self.around.beside_calico && is_calicos {
            return Err(Error::PrefixesBesideCalico(pool.name().to_owned()));
        }
        if self.is_secondary() && pool.assignment_mode() != AssignmentMode::Manual {
            return Err(BridgeError::CalicosPool { pool: pool.name().to_owned() }.into());
        }
        Ok(())
    }

    pub(super) fn specific(&self) -> Specific<'_> {
        Specific {
            request: self.request,
            around: self.around,
            holder: self.plain_holder(),
            handle: &self.handle,
            owner: self.owner(),
            is_secondary: self.is_secondary(),
            now: self.ipam.now(),
        }
    }

    /// The networks of the pools that the request names for a family; those that it defines are made first.
    pub(super) async fn requested_pools(&mut self, work: &mut Workset<'_>, family: Family) -> Result<Vec<IpNet>> {
        let mut names = Vec::new();
        for definition in self.request.definitions(family) {
            names.push(define::prepare(self.ipam, work, self.around, &definition, self.request).await?);
        }
        if names.is_empty() {
            names = self.request.pools(family).to_vec();
        }
        Ok(names
            .iter()
            .map(|text| pools::parse_requested(text, &self.around.pools, family))
            .collect::<Result<_, PoolError>>()?)
    }

    /// The pools to take any address of a family from, in order.
    pub(super) fn select(&self, family: Family, requested: &[IpNet]) -> Result<Vec<Pool>> {
        let query = PoolQuery {
            family,
            requested,
            node: &self.around.host.name,
            node_labels: &self.around.host.labels,
            namespace_labels: &self.request.namespace_labels,
            wanted: self.request.usage,
            host_reserved: self.request.host_reserved.as_ref(),
        };
        if self.request.namespace == NamespaceLabels::NotYetRead
            && pools::asks_for_namespace(&self.around.pools, &query)
        {
            return Err(Error::NamespaceWanted);
        }
        Ok(pools::select_pools(&self.around.pools, &query)?.into_iter().cloned().collect())
    }

    /// Makes the commit fail if the pool is deleted or changed meanwhile.
    pub(super) async fn guard_pool(&self, work: &mut Workset<'_>, cidr: IpNet) -> Result<()> {
        if let Some(pool) = self.around.pools.iter().find(|pool| pool.cidr() == cidr) {
            work.tx.get(&keys::resource(keys::ResourceKind::IpPool, pool.name())).await?;
        }
        Ok(())
    }
}
