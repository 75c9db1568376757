//! Who has an address.

use std::net::IpAddr;

use ipam_core::model::{AddressState, Block, Document, keys};
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::rfc3339;
use ipam_core::{Error, Holding, Inventory, Ipam};
use kv::{Content, Deadline, Range, Revision, StoreExt};

use crate::answer::Answer;
use crate::error::Result;
use crate::holder::{AddressReport, Holder, Status};

/// Looks an address up. Unlike Calico's command this finds it in disabled pools and outside all pools too.
pub(super) async fn show(ipam: &Ipam, ip: IpAddr, deadline: Deadline) -> Result<Answer> {
    let Inventory { pools, reservations } = ipam.inventory(deadline).await?;
    let pool = pools.iter().find(|pool| pool.cidr().contains(&ip));
    let status = match pool {
        Some(_) => status(ipam.holding(ip, deadline).await?),
        None => outside_pools(ipam, ip).await?,
    };
    let reserved_by = reservations
        .iter()
        .filter(|reservation| Reservations::from_documents([*reservation]).0.contains(ip))
        .map(|reservation| reservation.name().to_owned())
        .collect();
    AddressReport { ip, pool: pool.map(|pool| pool.name().to_owned()), reserved_by, status }.answer()
}

fn status(holding: Holding) -> Status {
    match holding {
        Holding::Free => Status::Free,
        Holding::Resting(entry) => Status::CoolingDown { released_at: entry.released_at().map(rfc3339) },
        Holding::Held(entry) => Status::Held(Holder {
            handle: entry.handle().map(str::to_owned),
            attributes: entry.attributes().clone(),
            alternate_attributes: entry.alternate_attributes().clone(),
        }),
    }
}

/// The pool is gone, but a block may be left, and an address in it held.
async fn outside_pools(ipam: &Ipam, ip: IpAddr) -> Result<Status> {
    let blocks = Range::Prefix(keys::blocks_prefix(None));
    let listed = ipam.store().list_at(blocks, Revision::UNSET, Content::KeysOnly).await?;
    let has_it = |cidr: Option<ipnet::IpNet>| cidr.is_some_and(|cidr| cidr.contains(&ip));
    let Some(key) = listed.kvs.into_iter().map(|kv| kv.key).find(|key| has_it(keys::parse_block(key))) else {
        return Ok(Status::Free);
    };
    let Some(stored) = ipam.store().get(key.clone()).await? else { return Ok(Status::Free) };
    let block = Block::decode(&key, stored.value.as_bytes()).map_err(Error::from)?;
    Ok(match block.lookup(ip) {
        AddressState::Assigned(entry) => status(Holding::Held(entry.clone())),
        AddressState::CoolingDown(at) => Status::CoolingDown { released_at: Some(rfc3339(at)) },
        AddressState::Free | AddressState::Outside => Status::Free,
    })
}
