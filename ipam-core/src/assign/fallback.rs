//! Bridged networks with several pools of a family: which pool an address comes from, and which gateway goes with it.
//!
//! The pools are an ordered list, and the first one with room serves. Disabled ones are passed over. A pool that was full is
//! tried last for a minute, where [hints](crate::hints) are remembered: so a steady assignment reads nothing of it. No
//! assignment is refused before every pool was tried.
//!
//! A configuration in host-local's words may define several sets of ranges of one family. Each set has a list of pools of
//! its own, and an attachment gets one address of each.

use std::net::IpAddr;

use ipnet::IpNet;

use super::assignment::Assignment;
use super::define;
use super::request::{Assigned, Gateway, PoolDefinition};
use crate::error::{BridgeError, Error, Result};
use crate::model::Pool;
use crate::net::Family;
use crate::surroundings::pool_holding;
use crate::workset::Workset;

impl Assignment<'_> {
    /// Assigns addresses of one family on a bridged network: one from each set of ranges that has none yet, or so many
    /// from the pools that the request names.
    pub(super) async fn on_bridge(&mut self, work: &mut Workset<'_>, family: Family, wanted: usize) -> Result<()> {
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
            // One set must keep off the addresses of another.
            self.around.allow_all();
            self.requested_pools(work, family).await?;
            let mut requested: Vec<IpNet> = Vec::new();
            for one in &set {
                let cidr = define::pool_of(self.around, one).map_or(one.cidr, Pool::cidr);
                self.around.keep_off(&one.name, &define::outside(cidr, &one.ranges));
                if !requested.contains(&cidr) {
                    requested.push(cidr);
                }
            }
            self.on_bridge_of(work, family, 1, &requested, &set).await?;
        }
        self.around.allow_all();
        Ok(())
    }

    /// The same from these pools; where they are those of one set of several, from its ranges.
    async fn on_bridge_of(
        &mut self,
        work: &mut Workset<'_>,
        family: Family,
        wanted: usize,
        requested: &[IpNet],
        set: &[&PoolDefinition],
    ) -> Result<()> {
        // A disabled pool assigns nothing new, and a container that has an address of it keeps it.
        let disabled = self.around.pools.iter().filter(|pool| requested.contains(&pool.cidr()) && !pool.is_enabled());
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

    /// Assigns an address of the first of these pools that has room; if none has, one that has waited for its workload for
    /// too long.
    async fn first_with_room(
        &mut self,
        work: &mut Workset<'_>,
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
            match self.pass(family, 1, &[pool]).take_free(work, &mut taken).await {
                Ok(()) => {
                    full.retain(|pool| !self.is_shared(family, *pool));
                    if !full.is_empty() {
                        self.ipam.remember_full_pools(attachment, &full);
                    }
                    return self.add_new(work, family, &taken, pool, gateway).await;
                }
                // The limit of blocks is what an operator can change: it is reported before the lack of room.
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
            self.pass(family, 1, &[pool]).take_overdue(work, &mut taken).await?;
            if !taken.is_empty() {
                return self.add_new(work, family, &taken, pool, gateway).await;
            }
        }
        let all: Vec<&Pool> = pools.iter().collect();
        Err(match refused {
            Some(Error::Exhausted { .. }) | None => self.pass(family, 1, &all).short(0, 0),
            Some(error) => error,
        })
    }

    /// True if several sets of ranges have a part of a pool each: the pool is not full where the part of one set is.
    fn is_shared(&self, family: Family, pool: IpNet) -> bool {
        let is_in = |one: &&PoolDefinition| define::pool_of(self.around, one).map_or(one.cidr, Pool::cidr) == pool;
        self.request.sets(family).iter().filter(|set| set.iter().any(is_in)).count() > 1
    }

    /// Adds addresses that the attachment has got now.
    async fn add_new(
        &mut self,
        work: &mut Workset<'_>,
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
        work: &mut Workset<'_>,
        ip: IpAddr,
        block: IpNet,
        pool: &Pool,
        gateway: Option<IpAddr>,
    ) -> Result<()> {
        self.guard_pool(work, pool.cidr()).await?;
        self.answer.push(Assigned::of(pool, ip, block, gateway));
        Ok(())
    }

    /// The gateway that the network wants in one of its pools: the configured address that lies in it, or that the pool's
    /// definition names. Where the configured one lies in another pool of the network, this one has a gateway, too: the one
    /// on record, else the first address.
    pub(super) fn gateway_in(&self, pool: &Pool, requested: &[IpNet]) -> Gateway {
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
