//! Why an assignment would return a certain address, or none. It runs like an assignment, up to the commit.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Content, Deadline, Range, Revision, StoreExt, Transaction};

use super::Assignment;
use super::request::{AssignRequest, AssignedAddress, NamespaceLabels, RequestedAddresses};
use crate::assign_context::{AssignContext, decode_all, read_config};
use crate::attachment::{NAMESPACE, NODE};
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{Attribute, Block, Labels, Owner, Pool, keys};
use crate::net::{Count, Family};
use crate::pools::{self, Obstacle, PoolError, PoolQuery};
use crate::quarantine::quarantine_of;
use crate::utilization::{PoolUsage, Usage, utilization};
use crate::write_set::{BlockSlot, WriteSet};

/// The label of each namespace that has its name.
const NAMESPACE_NAME: &str = "projectcalico.org/name";

/// How an assignment would go.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The revision of which all this is true.
    pub revision: Revision,
    /// The node, by the name under which the store knows it.
    pub node: String,
    /// Its labels.
    pub labels: Labels,
    /// The family of the address.
    pub family: Family,
    /// Whether addresses come from the node's own blocks alone.
    pub strict_affinity: bool,
    /// Whether new blocks are claimed when the node's own are full.
    pub claims_blocks: bool,
    /// How many blocks of the pools that are chosen the node may have; `None` for no limit.
    pub block_limit: Option<usize>,
    /// All pools, by name.
    pub pools: Vec<PoolState>,
    /// The outcome that it would have.
    pub outcome: PredictedOutcome,
}

/// A pool, as an assignment finds it.
#[derive(Debug)]
#[non_exhaustive]
pub struct PoolState {
    /// The pool.
    pub pool: Pool,
    /// Why no address is taken from it; an error if a selector of it cannot be read.
    pub obstacle: Result<Option<Obstacle>, PoolError>,
    /// How full it is.
    pub stock: PoolStock,
}

/// How full a pool is. An address whose cooldown is over counts as free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStock {
    /// The numbers of the pool; addresses in cooldown are in use.
    pub usage: Usage,
    /// The number of its addresses in quarantine; they are reserved.
    pub quarantined: usize,
    /// The number of its addresses in cooldown.
    pub in_cooldown: usize,
    /// The number of its blocks that are stored.
    pub blocks: usize,
    /// How many of these are the node's.
    pub own_blocks: usize,
    /// How many addresses are free in the node's blocks.
    pub own_free: usize,
}

/// The outcome that an assignment would have.
#[derive(Debug)]
#[non_exhaustive]
pub enum PredictedOutcome {
    /// An address.
    Given {
        /// The address, or the first one of the prefix.
        address: IpAddr,
        /// The length of the prefix; `None` for an address.
        prefix_length: Option<u8>,
        /// Its block.
        block: IpNet,
        /// Its pool's network.
        pool: IpNet,
        /// How many addresses are free in the block now.
        free: usize,
        /// Why that block.
        source: AddressSource,
    },
    /// None, because of this.
    Refused(Error),
}

/// Where an address would come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressSource {
    /// From a block of the node's.
    Own,
    /// From a block that is not stored yet and that the node would claim.
    New,
    /// From a block without a holder that the node would take over from its owner; `None` if it has none.
    TakenOver(Option<Owner>),
    /// From a block that keeps its owner; `None` if it has none.
    Borrowed(Option<Owner>),
}

impl Ipam {
    /// How an assignment of one address on a node would go: the pools that the address may come from, the reasons
    /// against the others, and the block that it would come from. Quotas of the node and of the namespace, whose name is
    /// one of its labels, are heeded; those of networks are not. Nothing is written. Without `family` it is that of
    /// the pools that are named, else IPv4; without `namespace` the labels of the pod's namespace are not known.
    ///
    /// # Errors
    /// Those of the store, and damaged settings. The reason for which an assignment would be refused is an [`PredictedOutcome`].
    #[boxed_future]
    pub async fn explain(
        &self,
        node: &str,
        family: Option<Family>,
        pools: &[String],
        namespace: Option<&Labels>,
        deadline: Deadline,
    ) -> Result<Explanation> {
        let owner = Owner::host(node);
        let mut request = AssignRequest::of_owner(&owner, RequestedAddresses::any(1, 1));
        request.namespace = if namespace.is_some() { NamespaceLabels::Known } else { NamespaceLabels::NotYetRead };
        request.namespace_labels = namespace.cloned().unwrap_or_default();
        transact!(self, deadline, |tx| {
            let known = self.read_context(tx, &owner, &request.wanted, Vec::new(), Vec::new()).await;
            tx.forget_writes();
            let explained = match known {
                Ok(context) => self.explain_in(tx, request.clone(), context, family, pools).await,
                Err(error @ Error::UnknownNode(_)) => self.explain_unknown(tx, node, family, error).await,
                Err(error) => Err(error),
            };
            tx.forget_writes();
            explained
        })
    }

    async fn explain_in(
        &self,
        tx: &mut Transaction,
        mut request: AssignRequest,
        mut context: AssignContext,
        family: Option<Family>,
        named: &[String],
    ) -> Result<Explanation> {
        let is_of = |family| named.iter().all(|text| pools::parse_requested(text, &context.pools, family).is_ok());
        let v6_alone = !named.is_empty() && is_of(Family::V6);
        let family = family.unwrap_or(if v6_alone { Family::V6 } else { Family::V4 });
        request.set_pools(family, named.iter().cloned());
        let revision = tx.revision();
        let (node, labels) = (context.host.name.clone(), context.host.labels.clone());
        let (config, host) = (context.config.clone(), context.host.owner());

        let mut work = WriteSet::new(tx, self.now(), config.cooldown_seconds());
        let blocks = self.blocks_at(revision, family, config.cooldown_seconds()).await?;
        let requested: Vec<IpNet> =
            named.iter().filter_map(|text| pools::parse_requested(text, &context.pools, family).ok()).collect();
        let query = PoolQuery {
            family,
            requested: &requested,
            node: &node,
            node_labels: &labels,
            namespace_labels: &request.namespace_labels,
            wanted: request.usage,
            host_reserved: None,
        };
        let stocks = stocks(&context, &blocks, &host);
        let pools = context.pools.iter().zip(stocks);
        let pools = pools.filter(|(pool, _)| pool.family() == family);
        let pools = pools
            .map(|(pool, stock)| PoolState { obstacle: pools::obstacle(pool, &query), pool: pool.clone(), stock })
            .collect();
        let namespace = request.namespace_labels.get(NAMESPACE_NAME).map(|name| (NAMESPACE.to_owned(), name.clone()));
        let attributes = namespace.into_iter().chain([(NODE.to_owned(), node.clone())]).collect();
        let (holder, handle) = (Attribute::new(None, attributes), String::new());
        let mut assignment = Assignment::new(self, &request, &mut context, holder, handle);
        let block_limit = assignment.family_assigner(family, 1, &[]).limit();
        let outcome = assignment.outcome(&mut work, family, &blocks).await?;
        Ok(Explanation {
            revision,
            node,
            labels,
            family,
            strict_affinity: config.strict_affinity(),
            claims_blocks: config.auto_allocate_blocks(),
            block_limit: (block_limit < usize::MAX).then_some(block_limit),
            pools,
            outcome,
        })
    }

    /// The explanation for a node that is not registered: no address is assigned to it.
    async fn explain_unknown(
        &self,
        tx: &mut Transaction,
        node: &str,
        family: Option<Family>,
        error: Error,
    ) -> Result<Explanation> {
        let config = read_config(tx).await?;
        Ok(Explanation {
            revision: tx.revision(),
            node: node.to_owned(),
            labels: Labels::new(),
            family: family.unwrap_or(Family::V4),
            strict_affinity: config.strict_affinity(),
            claims_blocks: config.auto_allocate_blocks(),
            block_limit: None,
            pools: Vec::new(),
            outcome: PredictedOutcome::Refused(error),
        })
    }

    /// All blocks of a family as of a revision, as an assignment sees them.
    async fn blocks_at(&self, at: Revision, family: Family, cooldown_seconds: i64) -> Result<Vec<Block>> {
        let range = Range::Prefix(keys::blocks_prefix(Some(family)));
        let listing = self.store().list_at(range, at, Content::Full).await?;
        let pairs: Vec<_> = listing.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
        let mut blocks: Vec<Block> = decode_all(&pairs);
        for block in &mut blocks {
            let _ = block.apply_cooldown(self.now(), cooldown_seconds);
        }
        Ok(blocks)
    }
}

/// How full each pool is.
fn stocks(context: &AssignContext, blocks: &[Block], host: &Owner) -> Vec<PoolStock> {
    let counted = utilization(&context.pools, blocks, &context.reservations);
    let quarantined = quarantine_of(&context.reservation_documents);
    let of_pool = |cidr: IpNet| quarantined.keys().filter(|ip| cidr.contains(*ip)).count();
    let stock =
        |pool: &PoolUsage| PoolStock { usage: pool.usage, quarantined: of_pool(pool.cidr), ..PoolStock::default() };
    let mut stocks: Vec<PoolStock> = counted.pools.iter().map(stock).collect();
    for block in blocks {
        let place = context.pools.iter().position(|pool| pool.cidr().contains(&block.cidr()));
        let Some(stock) = place.and_then(|place| stocks.get_mut(place)) else { continue };
        stock.blocks += 1;
        stock.in_cooldown += block.allocated().filter(|(_, entry)| entry.released_at().is_some()).count();
        let is_own = |owner: Owner| owner == *host || (owner.node().is_some() && owner.node() == host.node());
        if block.owner().is_some_and(is_own) {
            stock.own_blocks += 1;
            stock.own_free += block.free_count(&context.reservations);
        }
    }
    stocks
}

impl Assignment<'_> {
    /// Assigns one address in memory, and returns its source.
    async fn outcome(&mut self, work: &mut WriteSet<'_>, family: Family, before: &[Block]) -> Result<PredictedOutcome> {
        let done = match self.any(work, family, 1).await {
            Ok(()) => work.check_quotas(Some(&**self.ipam.store())).await,
            failed => failed,
        };
        match done {
            Ok(()) => {}
            Err(error @ (Error::Store(_) | Error::Malformed(_))) => return Err(error),
            Err(error) => return Ok(PredictedOutcome::Refused(error)),
        }
        let Some(assigned) = self.answer.first() else { return Ok(PredictedOutcome::Refused(Error::NoNewBlocks)) };
        let host = self.context.host.owner();
        let is_own_now = match work.find(assigned.block).await? {
            BlockSlot::There(block) => block.is_owned_by(&host),
            BlockSlot::Absent | BlockSlot::Damaged => false,
        };
        let found = before.iter().find(|block| block.cidr() == assigned.block);
        let source = match found.map(Block::owner) {
            None => AddressSource::New,
            Some(Some(owner)) if owner == host => AddressSource::Own,
            Some(owner) if is_own_now => AddressSource::TakenOver(owner),
            Some(owner) => AddressSource::Borrowed(owner),
        };
        let free = found.map_or_else(
            || {
                let all = Count::of_parts(assigned.block, assigned.length()).to_u128();
                usize::try_from(all.unwrap_or_default()).unwrap_or_default()
            },
            |block| block.free_count(&self.context.reservations),
        );
        let AssignedAddress { ip: address, prefix_length, block, pool, .. } = *assigned;
        Ok(PredictedOutcome::Given { address, prefix_length, block, pool, free, source })
    }
}
