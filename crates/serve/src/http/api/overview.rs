//! All pools and nodes.

use std::cmp::Reverse;

use hyper::StatusCode;
use ipam_core::census::{AddressUse, PoolCensus};
use ipam_core::net::Count;
use ipam_core::quarantine::{QuarantineRow, quarantine_rows};
use ipam_operator::QuotaRow;
use serde::Serialize;

use super::super::Shown;
use super::super::answer::{Answer, Failure, json};

/// The most nodes in an answer.
const NODES: usize = 100;
/// The most quotas in an answer.
const QUOTAS: usize = 20;

#[derive(Serialize)]
struct Overview {
    revision: i64,
    pools: Vec<Pool>,
    nodes: Vec<Node>,
    nodes_total: usize,
    /// The quotas that are used most.
    quotas: Vec<QuotaRow>,
    quotas_total: usize,
    /// The number of blocks that lie in no pool.
    orphaned: usize,
    /// The number of addresses that are held for nodes that are not registered any more.
    gone: usize,
    quarantined: Vec<QuarantineRow>,
}

#[derive(Serialize)]
struct Pool {
    name: String,
    cidr: String,
    block_size: u8,
    /// The length of its prefixes; absent if it has addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    enabled: bool,
    capacity: Count,
    used: usize,
    borrowed: usize,
    resting: usize,
    reserved: Count,
    free: Count,
    blocks: usize,
    /// The number of blocks without a free address.
    full: usize,
}

#[derive(Serialize)]
struct Node {
    name: String,
    blocks: usize,
    used: usize,
    registered: bool,
}

impl Pool {
    fn of(census: &PoolCensus) -> Self {
        let PoolCensus { pool, usage, blocks } = census;
        let count = |wanted| blocks.iter().map(|block| block.count(wanted)).sum::<usize>();
        let (used, borrowed, resting) =
            (count(AddressUse::Used), count(AddressUse::Borrowed), count(AddressUse::InCooldown));
        let free = usage.available;
        // An address can be in use and reserved; a bar shows it as in use.
        let held = [used, borrowed, resting].map(Count::from).into_iter().fold(free, Count::plus);
        Self {
            name: pool.name().to_owned(),
            cidr: pool.cidr().to_string(),
            block_size: pool.block_size(),
            prefix_length: pool.prefix_length(),
            enabled: pool.is_enabled(),
            capacity: usage.capacity,
            used,
            borrowed,
            resting,
            reserved: usage.capacity.minus(held),
            free,
            blocks: blocks.len(),
            full: blocks.iter().filter(|block| block.count(AddressUse::Free) == 0).count(),
        }
    }
}

pub(super) async fn answer(shown: &Shown) -> Result<Answer, Failure> {
    let census = shown.asked.census(shown.operator.ipam()).await?;
    let mut nodes: Vec<Node> = census
        .nodes
        .iter()
        .map(|(name, node)| Node {
            name: name.clone(),
            blocks: node.blocks,
            used: node.used,
            registered: census.registered.is_empty() || census.registered.contains(name),
        })
        .collect();
    nodes.sort_by(|one, other| other.used.cmp(&one.used).then_with(|| one.name.cmp(&other.name)));
    let nodes_total = nodes.len();
    nodes.truncate(NODES);
    let mut quotas: Vec<QuotaRow> = census.quotas.iter().map(QuotaRow::from).collect();
    quotas.sort_by_key(|quota| Reverse(quota.percent));
    quotas.truncate(QUOTAS);
    let overview = Overview {
        revision: census.revision.get(),
        pools: census.pools.iter().map(Pool::of).collect(),
        nodes,
        nodes_total,
        quotas,
        quotas_total: census.quotas.len(),
        orphaned: census.orphaned.len(),
        gone: census.of_gone_nodes(),
        quarantined: quarantine_rows(census.quarantined.clone()),
    };
    Ok(json(StatusCode::OK, &overview))
}
