//! The holder of an address.

use std::net::IpAddr;

use ipam_core::quarantine::quarantine_of;
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::rfc3339;
use ipam_core::{Holding, Inventory};
use ipam_operator::Operator;
use kv::Deadline;

use crate::answer::Answer;
use crate::error::Result;
use crate::holder::{AddressReport, Holder, Status};

/// Reports the status of an address. Unlike Calico's command this finds it in disabled pools and outside all pools too.
pub(super) async fn show(operator: &Operator, ip: IpAddr, deadline: Deadline) -> Result<Answer> {
    let Inventory { pools, reservations } = operator.ipam().inventory(deadline).await?;
    let pool = pools.iter().find(|pool| pool.cidr().contains(&ip));
    let prefix = pool.filter(|pool| pool.prefix_length().is_some()).map(|pool| pool.unit_of(ip));
    let status = status(operator.ipam().holding(ip, deadline).await?);
    let reserved_by = reservations
        .iter()
        .filter(|reservation| {
            Reservations::from_documents([*reservation]).0.touches(prefix.unwrap_or_else(|| ip.into()))
        })
        .map(|reservation| reservation.name().to_owned())
        .collect();
    let quarantined = quarantine_of(&reservations).remove(&ip);
    let pool = pool.map(|pool| pool.name().to_owned());
    AddressReport { ip, prefix, pool, reserved_by, quarantined, status }.answer()
}

fn status(holding: Holding) -> Status {
    match holding {
        Holding::Free => Status::Free,
        Holding::InCooldown(entry) => Status::CoolingDown { released_at: entry.released_at().map(rfc3339) },
        Holding::Held(entry) => Status::Held(Holder {
            handle: entry.handle().map(str::to_owned),
            attributes: entry.attributes().clone(),
            alternate_attributes: entry.alternate_attributes().clone(),
        }),
    }
}
