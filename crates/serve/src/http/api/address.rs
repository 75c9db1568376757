//! One address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use hyper::StatusCode;
use ipam_core::Holding;
use ipam_core::model::{Attribute, Block, Document, keys};
use ipam_core::pools::block_of;
use ipam_core::quarantine::{Quarantined, quarantine_of};
use ipam_operator::events::AddressHolder;
use ipnet::IpNet;
use kv::{Deadline, StoreExt};
use serde::Serialize;

use super::super::Shown;
use super::super::answer::{Answer, Failure, json};
use super::Query;
use super::row::{Address, Use};
use super::scan::Rules;

#[derive(Serialize)]
struct Reported {
    #[serde(flatten)]
    address: Address,
    reserved: bool,
    /// Why it is in quarantine, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<Quarantined>,
    pool: Option<String>,
    /// The block, if it is there.
    block: Option<String>,
    owner: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alternate: BTreeMap<String, String>,
}

pub(super) async fn answer(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let ip: IpAddr = query.parsed("ip")?;
    let deadline = || Deadline::after(shown.limits.answer);
    let inventory = shown.operator.ipam().inventory(deadline()).await?;
    let pools = &inventory.pools;
    let rules = Rules::read(shown).await?;
    let pool = pools.iter().find(|pool| pool.cidr().contains(&ip));
    let unit = pool.map_or_else(|| ip.into(), |pool| pool.unit_of(ip));
    let reserved = rules.reservations.touches(unit);
    let used = if reserved { Use::Reserved } else { Use::Free };
    let mut reported = Reported {
        address: Address { ip, used, holder: None, since: None },
        reserved,
        quarantined: quarantine_of(&inventory.reservations).remove(&ip),
        pool: pool.map(|pool| pool.name().to_owned()),
        block: None,
        owner: None,
        attributes: BTreeMap::new(),
        alternate: BTreeMap::new(),
    };
    if let Some(mut block) = block(shown, pool.and_then(|pool| block_of(pool, ip))).await? {
        rules.apply(&mut block);
        reported.address = Address::of(&block, ip, &rules.reservations);
        reported.block = Some(block.cidr().to_string());
        reported.owner = block.owner().map(|owner| owner.to_string());
        if let Some(entry) = block.attributes_of(ip) {
            reported.attributes(entry);
        }
    } else if let Holding::Held(entry) = shown.operator.ipam().holding(ip, deadline()).await? {
        // The block has outlived its pool.
        reported.address.used = Use::Used;
        reported.address.holder = Some(AddressHolder::of(&entry));
        reported.attributes(&entry);
    }
    Ok(json(StatusCode::OK, &reported))
}

impl Reported {
    fn attributes(&mut self, entry: &Attribute) {
        self.attributes = entry.attributes().clone();
        self.alternate = entry.alternate_attributes().clone();
    }
}

/// The block of a network, if it is there.
async fn block(shown: &Shown, cidr: Option<IpNet>) -> Result<Option<Block>, Failure> {
    let Some(cidr) = cidr else { return Ok(None) };
    let Some(kv) = shown.store.get(keys::block(cidr)).await? else { return Ok(None) };
    let damaged = |error| Failure { status: StatusCode::INTERNAL_SERVER_ERROR, text: format!("{error}") };
    Ok(Some(Block::decode(&kv.key, kv.value.as_bytes()).map_err(damaged)?))
}
