//! Explains which address an assignment would return and why, or why the assignment would fail. The explanation is made
//! by running an assignment up to its commit.

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

/// The label of a namespace whose value is the namespace's name.
const NAMESPACE_NAME: &str = "projectcalico.org/name";

/// The explanation of an assignment of one address on a node.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The store revision at which the pools and blocks were read.
    pub revision: Revision,
    /// The node's name, as registered in the store.
    pub node: String,
    /// The node's labels.
    pub labels: Labels,
    /// The family of the requested address.
    pub family: Family,
    /// True if addresses are assigned from the node's own blocks only (strict affinity).
    pub strict_affinity: bool,
    /// True if the node claims a new block when its own blocks are full.
    pub claims_blocks: bool,
    /// Maximum number of blocks that the node may own in the selected pools; `None` for no limit.
    pub block_limit: Option<usize>,
    /// All pools of the requested family, ordered by name.
    pub pools: Vec<PoolState>,
    /// The predicted outcome of the assignment.
    pub outcome: PredictedOutcome,
}

/// A pool, and whether an assignment could use the pool.
#[derive(Debug)]
#[non_exhaustive]
pub struct PoolState {
    /// The pool.
    pub pool: Pool,
    /// The reason why the assignment cannot use the pool; `None` if the assignment can use the pool. Contains an error
    /// if one of the pool's selectors cannot be parsed.
    pub obstacle: Result<Option<Obstacle>, PoolError>,
    /// The address counts of the pool.
    pub stock: PoolStock,
}

/// The address counts of a pool. An address with an expired cooldown counts as free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStock {
    /// How many addresses of the pool are in use, reserved and available. Addresses in cooldown count as in use.
    pub usage: Usage,
    /// The number of quarantined addresses in the pool. Quarantined addresses also count as reserved.
    pub quarantined: usize,
    /// The number of addresses of the pool in cooldown.
    pub in_cooldown: usize,
    /// The number of stored blocks of the pool.
    pub blocks: usize,
    /// The number of stored blocks of the pool that the node owns.
    pub own_blocks: usize,
    /// The number of free addresses in the pool's blocks that the node owns.
    pub own_free: usize,
}

/// The predicted outcome of an assignment of one address.
#[derive(Debug)]
#[non_exhaustive]
pub enum PredictedOutcome {
    /// The assignment would succeed, and return the address or prefix in this variant.
    Given {
        /// The assigned address, or the first address of the assigned prefix.
        address: IpAddr,
        /// The length of the assigned prefix; `None` if a single address is assigned.
        prefix_length: Option<u8>,
        /// The block that contains the assigned address.
        block: IpNet,
        /// The CIDR of the pool from which the address is assigned.
        pool: IpNet,
        /// The number of free addresses in `block` before the assignment.
        free: usize,
        /// Whether the node owns, claims, takes over or borrows from the block.
        source: AddressSource,
    },
    /// The assignment would fail with the error in this variant.
    Refused(Error),
}

/// The kind of block from which an address would come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressSource {
    /// A block that the node already owns.
    Own,
    /// A block that is not stored yet and that the node would claim.
    New,
    /// The node would take over a stored block. Contains the block's present owner, or `None` if the block has none.
    TakenOver(Option<Owner>),
    /// A block from which the node would borrow the address. Contains the block's owner, or `None` if the block has no
    /// owner.
    Borrowed(Option<Owner>),
}

impl Ipam {
    /// Predicts an assignment of one address on a node, without a write. The explanation names the block that would be
    /// used, and the reason why each unsuitable pool would not be used. The quotas of the node and of the namespace are
    /// checked, but the quotas of networks are not. The name of the pod's namespace is read from the label
    /// `projectcalico.org/name`. If `family` is `None`, the family of the named pools is used, or else IPv4.
    /// `namespace` has the labels of the pod's namespace; `None` if these labels are unknown.
    ///
    /// # Errors
    /// Any store error. `Malformed` for damaged settings. If the assignment is predicted to fail, the result is
    /// [`PredictedOutcome::Refused`], not an error.
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

    /// Returns the explanation for a node that is not registered: the assignment fails with `error`.
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

    /// Reads all blocks of a family at a revision, and frees addresses with an expired cooldown in the returned blocks.
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
    /// Assigns one address in the write set but does not commit; returns what a commit would assign.
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
