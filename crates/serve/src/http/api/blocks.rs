//! The blocks of a pool, and one block with its addresses.

use std::collections::BTreeMap;

use hyper::StatusCode;
use ipam_core::census::{AddressUse, BlockCensus};
use ipam_core::model::{Block, Document, Owner, keys};
use ipnet::IpNet;
use kv::{Deadline, StoreExt};
use serde::Serialize;

use super::super::Shown;
use super::super::answer::{Answer, Failure, json};
use super::Query;
use super::row::Address;
use super::scan::Rules;

/// The most blocks of an answer.
const MOST: usize = 10_000;

/// Blocks, in few bytes.
#[derive(Serialize)]
struct Blocks<'a> {
    revision: i64,
    from: usize,
    total: usize,
    /// The owners of the blocks; a block names one by its place here.
    owners: Vec<String>,
    /// Network, place of the owner or -1, in use, borrowed, resting, reserved, free.
    blocks: Vec<(&'a IpNet, i64, usize, usize, usize, usize, usize)>,
}

/// A part of the blocks of a pool; of those in no pool if no pool is named.
pub(super) async fn many(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let from = if query.get("from").is_some() { query.parsed::<usize>("from")? } else { 0 };
    let census = shown.asked.census(shown.operator.ipam()).await?;
    let all = match query.get("pool") {
        None => &census.orphaned,
        Some(name) => {
            let found = census.pools.iter().find(|pool| pool.pool.name() == name);
            let missing = || Failure { status: StatusCode::NOT_FOUND, text: format!("there is no pool {name}") };
            &found.ok_or_else(missing)?.blocks
        }
    };
    let mut owners: BTreeMap<&Owner, i64> = BTreeMap::new();
    let mut names = Vec::new();
    let mut reported = Vec::new();
    for block in all.iter().skip(from).take(MOST) {
        let owner = match &block.owner {
            None => -1,
            Some(owner) => *owners.entry(owner).or_insert_with(|| {
                names.push(owner.to_string());
                // No answer has more owners than blocks.
                i64::try_from(names.len()).unwrap_or_default() - 1
            }),
        };
        let BlockCensus { cidr, .. } = block;
        let count = |wanted| block.count(wanted);
        let (used, borrowed, resting) =
            (count(AddressUse::Used), count(AddressUse::Borrowed), count(AddressUse::InCooldown));
        reported.push((cidr, owner, used, borrowed, resting, count(AddressUse::Reserved), count(AddressUse::Free)));
    }
    let answer = Blocks { revision: census.revision.get(), from, total: all.len(), owners: names, blocks: reported };
    Ok(json(StatusCode::OK, &answer))
}

/// A block.
#[derive(Serialize)]
struct OneBlock {
    cidr: String,
    pool: Option<String>,
    owner: Option<String>,
    exists: bool,
    addresses: Vec<Address>,
}

/// One block with all of its addresses.
pub(super) async fn one(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let cidr: IpNet = query.parsed::<IpNet>("cidr")?.trunc();
    let deadline = Deadline::after(shown.limits.answer);
    let inventory = shown.operator.ipam().inventory(deadline).await?;
    let pool = inventory.pools.iter().find(|pool| pool.cidr().contains(&cidr)).map(|pool| pool.name().to_owned());
    let mut answer = OneBlock { cidr: cidr.to_string(), pool, owner: None, exists: false, addresses: Vec::new() };
    if let Some(kv) = shown.store.get(keys::block(cidr)).await? {
        let rules = Rules::read(shown).await?;
        let damaged = |error| Failure { status: StatusCode::INTERNAL_SERVER_ERROR, text: format!("{error}") };
        let mut block = Block::decode(&kv.key, kv.value.as_bytes()).map_err(damaged)?;
        rules.apply(&mut block);
        answer.exists = true;
        answer.owner = block.owner().map(|owner| owner.to_string());
        answer.addresses = block.addresses().map(|ip| Address::of(&block, ip, &rules.reservations)).collect();
    }
    Ok(json(StatusCode::OK, &answer))
}
