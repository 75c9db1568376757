//! Addresses, as the page gets them.

use std::net::IpAddr;

use ipam_core::attachment::TIMESTAMP;
use ipam_core::model::{AddressState, Block, Owner};
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::{parse_go_string, rfc3339};
use ipam_operator::events::AddressHolder;
use serde::Serialize;

/// The state of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Use {
    Used,
    Borrowed,
    #[serde(rename = "resting")]
    InCooldown,
    Reserved,
    Free,
}

/// An address of a block.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Address {
    pub(super) ip: IpAddr,
    #[serde(rename = "use")]
    pub(super) used: Use,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holder: Option<AddressHolder>,
    /// The time since which it is held, or rests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<String>,
}

impl Address {
    /// An address of a block, after the block's cooldown was applied.
    pub(super) fn of(block: &Block, ip: IpAddr, reservations: &Reservations) -> Self {
        let free = |used| Self { ip, used, holder: None, since: None };
        match block.lookup(ip) {
            AddressState::Assigned(entry) => {
                let owner = block.owner();
                let host = owner.as_ref().and_then(Owner::node);
                let is_borrowed = host.zip(entry.node()).is_some_and(|(host, node)| host != node);
                let used = if is_borrowed { Use::Borrowed } else { Use::Used };
                let since = entry.get(TIMESTAMP).and_then(parse_go_string).map(rfc3339);
                Self { ip, used, holder: Some(AddressHolder::of(entry)), since }
            }
            AddressState::CoolingDown(since) => Self { since: Some(rfc3339(since)), ..free(Use::InCooldown) },
            _ if block.is_reserved(ip, reservations) => free(Use::Reserved),
            _ => free(Use::Free),
        }
    }
}
