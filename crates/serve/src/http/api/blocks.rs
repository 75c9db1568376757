//! Answers requests for the blocks of a pool, for one block with its addresses, and for one address. This module has a
//! function that visits all blocks of a store.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::ControlFlow;

use hyper::StatusCode;
use ipam_core::Holding;
use ipam_core::attachment::TIMESTAMP;
use ipam_core::census::{AddressUse, BlockCensus};
use ipam_core::model::{AddressState, Attribute, Block, Document, Owner, keys};
use ipam_core::pools::block_of;
use ipam_core::quarantine::{QuarantineEntry, quarantine_of};
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::{parse_go_string, rfc3339};
use ipam_operator::events::AddressHolder;
use ipnet::IpNet;
use kv::{Deadline, Pages, Range, Revision, Store, StoreExt};
use serde::Serialize;
use time::OffsetDateTime;

use super::Query;
use crate::http::PageContext;
use crate::http::answer::{HttpError, HttpResponse, json};

/// Maximum number of blocks in an answer.
const MAX_BLOCKS: usize = 10_000;

/// A compact list of blocks, as the web page receives it.
#[derive(Serialize)]
struct BlockList<'a> {
    revision: i64,
    from: usize,
    total: usize,
    /// The owners of the blocks. Each block refers to its owner by the owner's index in `owners`.
    owners: Vec<String>,
    /// The columns of a block's row: the block's CIDR, the index of its owner or -1, and the numbers of used, borrowed,
    /// cooling-down, reserved and free addresses.
    blocks: Vec<(&'a IpNet, i64, usize, usize, usize, usize, usize)>,
}

/// Lists up to [`MAX_BLOCKS`] blocks of a pool. Without the parameter `pool`, lists the blocks outside of all pools.
pub(super) async fn list_blocks(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let from = if query.get("from").is_some() { query.parsed::<usize>("from")? } else { 0 };
    let census = page.cache.census(page.operator.ipam()).await?;
    let all = match query.get("pool") {
        None => &census.orphaned,
        Some(name) => {
            let found = census.pools.iter().find(|pool| pool.pool.name() == name);
            let missing = || HttpError { status: StatusCode::NOT_FOUND, text: format!("there is no pool {name}") };
            &found.ok_or_else(missing)?.blocks
        }
    };
    let mut owners: BTreeMap<&Owner, i64> = BTreeMap::new();
    let mut names = Vec::new();
    let mut reported = Vec::new();
    for block in all.iter().skip(from).take(MAX_BLOCKS) {
        let owner = match &block.owner {
            None => -1,
            Some(owner) => *owners.entry(owner).or_insert_with(|| {
                names.push(owner.to_string());
                // The conversion cannot fail, because an answer never has more owners than blocks.
                i64::try_from(names.len()).unwrap_or_default() - 1
            }),
        };
        let BlockCensus { cidr, .. } = block;
        let count = |wanted| block.count(wanted);
        let (used, borrowed, resting) =
            (count(AddressUse::Used), count(AddressUse::Borrowed), count(AddressUse::InCooldown));
        reported.push((cidr, owner, used, borrowed, resting, count(AddressUse::Reserved), count(AddressUse::Free)));
    }
    let answer = BlockList { revision: census.revision.get(), from, total: all.len(), owners: names, blocks: reported };
    Ok(json(StatusCode::OK, &answer))
}

#[derive(Serialize)]
struct BlockDetails {
    cidr: String,
    pool: Option<String>,
    owner: Option<String>,
    exists: bool,
    addresses: Vec<AddressRow>,
}

pub(super) async fn show_block(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let cidr: IpNet = query.parsed::<IpNet>("cidr")?.trunc();
    let deadline = Deadline::after(page.limits.answer);
    let inventory = page.operator.ipam().inventory(deadline).await?;
    let pool = inventory.pools.iter().find(|pool| pool.cidr().contains(&cidr)).map(|pool| pool.name().to_owned());
    let mut answer = BlockDetails { cidr: cidr.to_string(), pool, owner: None, exists: false, addresses: Vec::new() };
    if let Some(kv) = page.store.get(keys::block(cidr)).await? {
        let rules = AddressRules::read(page).await?;
        let damaged = |error| HttpError { status: StatusCode::INTERNAL_SERVER_ERROR, text: format!("{error}") };
        let mut block = Block::decode(&kv.key, kv.value.as_bytes()).map_err(damaged)?;
        rules.apply(&mut block);
        answer.exists = true;
        answer.owner = block.owner().map(|owner| owner.to_string());
        answer.addresses = block.addresses().map(|ip| AddressRow::of(&block, ip, &rules.reservations)).collect();
    }
    Ok(json(StatusCode::OK, &answer))
}

#[derive(Serialize)]
struct AddressDetails {
    #[serde(flatten)]
    address: AddressRow,
    reserved: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<QuarantineEntry>,
    pool: Option<String>,
    /// The CIDR of the block that contains the address, if that block exists.
    block: Option<String>,
    owner: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alternate: BTreeMap<String, String>,
}

pub(super) async fn show_address(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let ip: IpAddr = query.parsed("ip")?;
    let deadline = || Deadline::after(page.limits.answer);
    let inventory = page.operator.ipam().inventory(deadline()).await?;
    let pools = &inventory.pools;
    let rules = AddressRules::read(page).await?;
    let pool = pools.iter().find(|pool| pool.cidr().contains(&ip));
    let unit = pool.map_or_else(|| ip.into(), |pool| pool.unit_of(ip));
    let reserved = rules.reservations.touches(unit);
    let used = if reserved { AddressUsage::Reserved } else { AddressUsage::Free };
    let mut reported = AddressDetails {
        address: AddressRow { ip, used, holder: None, since: None },
        reserved,
        quarantined: quarantine_of(&inventory.reservations).remove(&ip),
        pool: pool.map(|pool| pool.name().to_owned()),
        block: None,
        owner: None,
        attributes: BTreeMap::new(),
        alternate: BTreeMap::new(),
    };
    if let Some(mut block) = read_block(page, pool.and_then(|pool| block_of(pool, ip))).await? {
        rules.apply(&mut block);
        reported.address = AddressRow::of(&block, ip, &rules.reservations);
        reported.block = Some(block.cidr().to_string());
        reported.owner = block.owner().map(|owner| owner.to_string());
        if let Some(entry) = block.attributes_of(ip) {
            reported.attributes(entry);
        }
    } else if let Holding::Held(entry) = page.operator.ipam().holding(ip, deadline()).await? {
        // The address is in a block that still exists, but the block's pool does not.
        reported.address.used = AddressUsage::Used;
        reported.address.holder = Some(AddressHolder::of(&entry));
        reported.attributes(&entry);
    }
    Ok(json(StatusCode::OK, &reported))
}

impl AddressDetails {
    fn attributes(&mut self, entry: &Attribute) {
        self.attributes = entry.attributes_with_network();
        self.alternate = entry.alternate_attributes().clone();
    }
}

/// Reads the block with the given CIDR, or returns `None` if this block does not exist.
async fn read_block(page: &PageContext, cidr: Option<IpNet>) -> Result<Option<Block>, HttpError> {
    let Some(cidr) = cidr else { return Ok(None) };
    let Some(kv) = page.store.get(keys::block(cidr)).await? else { return Ok(None) };
    let damaged = |error| HttpError { status: StatusCode::INTERNAL_SERVER_ERROR, text: format!("{error}") };
    Ok(Some(Block::decode(&kv.key, kv.value.as_bytes()).map_err(damaged)?))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum AddressUsage {
    Used,
    Borrowed,
    #[serde(rename = "resting")]
    InCooldown,
    Reserved,
    Free,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct AddressRow {
    pub(super) ip: IpAddr,
    #[serde(rename = "use")]
    pub(super) used: AddressUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holder: Option<AddressHolder>,
    /// The time at which the address was assigned or released.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<String>,
}

impl AddressRow {
    /// Returns the row that describes an address on the web page. The caller must already have applied the cooldown to
    /// the block.
    pub(super) fn of(block: &Block, ip: IpAddr, reservations: &Reservations) -> Self {
        let free = |used| Self { ip, used, holder: None, since: None };
        match block.lookup(ip) {
            AddressState::Assigned(entry) => {
                let owner = block.owner();
                let host = owner.as_ref().and_then(Owner::node);
                let is_borrowed = host.zip(entry.node()).is_some_and(|(host, node)| host != node);
                let used = if is_borrowed { AddressUsage::Borrowed } else { AddressUsage::Used };
                let since = entry.get(TIMESTAMP).and_then(parse_go_string).map(rfc3339);
                Self { ip, used, holder: Some(AddressHolder::of(entry)), since }
            }
            AddressState::CoolingDown(since) => Self { since: Some(rfc3339(since)), ..free(AddressUsage::InCooldown) },
            _ if block.is_reserved(ip, reservations) => free(AddressUsage::Reserved),
            _ => free(AddressUsage::Free),
        }
    }
}

/// Calls `see` for each well-formed block of the revision `at`, until `see` returns a break. If `at` is less than 1,
/// visits the blocks of the newest revision. Returns the revision whose blocks were visited.
pub(super) async fn visit_blocks(
    store: &dyn Store,
    at: Revision,
    mut see: impl FnMut(Block) -> ControlFlow<()> + Send,
) -> kv::Result<Revision> {
    let mut pages = Pages::new(Range::Prefix(keys::blocks_prefix(None)), at);
    while let Some(page) = pages.next(store).await? {
        for kv in page {
            // The loop skips damaged blocks, because `margay ipam check` reports them.
            let Ok(block) = Block::decode(&kv.key, kv.value.as_bytes()) else { continue };
            if see(block).is_break() {
                return Ok(pages.revision());
            }
        }
    }
    Ok(pages.revision())
}

/// The settings that, together with the block, determine the state of an address: reservations and cooldown.
pub(super) struct AddressRules {
    pub(super) reservations: Reservations,
    cooldown: i64,
}

impl AddressRules {
    pub(super) async fn read(page: &PageContext) -> Result<Self, HttpError> {
        let ipam = page.operator.ipam();
        let deadline = || Deadline::after(page.limits.answer);
        let inventory = ipam.inventory(deadline()).await?;
        let (reservations, _) = Reservations::from_documents(&inventory.reservations);
        Ok(Self { reservations, cooldown: ipam.config(deadline()).await?.cooldown_seconds() })
    }

    /// Frees those addresses of a block for which the cooldown is over.
    pub(super) fn apply(&self, block: &mut Block) {
        _ = block.apply_cooldown(OffsetDateTime::now_utc(), self.cooldown);
    }
}
