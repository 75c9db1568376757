//! Holders, addresses and events, as the page gets them.

use std::net::IpAddr;

use ipam_core::attachment::TIMESTAMP;
use ipam_core::model::{AddressState, Attribute, Block, Owner};
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::{parse_go_string, rfc3339};
use ipam_operator::events::{Happening, Holder, What};
use kv::Revision;
use serde::Serialize;
use time::OffsetDateTime;

/// The holder of an address.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Whose {
    #[serde(skip_serializing_if = "Option::is_none")]
    handle: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
}

impl Whose {
    pub(super) fn of(entry: &Attribute) -> Self {
        let Holder { handle, node, network, container, interface, pod, namespace } = Holder::of(entry);
        let [handle, node, network, container, interface, pod, namespace] =
            [handle, node, network, container, interface, pod, namespace].map(|text| text.map(str::to_owned));
        Self { handle, node, network, container, interface, namespace, pod }
    }
}

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
    pub(super) holder: Option<Whose>,
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
                Self { ip, used, holder: Some(Whose::of(entry)), since }
            }
            AddressState::CoolingDown(since) => Self { since: Some(rfc3339(since)), ..free(Use::InCooldown) },
            _ if block.is_reserved(ip, reservations) => free(Use::Reserved),
            _ => free(Use::Free),
        }
    }
}

/// An event, or a part of the state at the beginning.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    revision: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_length: Option<u8>,
    block: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Whose>,
    /// The former holder of an address that moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Whose>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    former_owner: Option<String>,
    /// The state of an affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
}

impl Row {
    /// An event.
    pub(super) fn happened(revision: Revision, time: Option<OffsetDateTime>, happening: &Happening) -> Self {
        Self::new(revision, time, happening.what.word(), happening)
    }

    /// A part of the state at a revision.
    pub(super) fn listed(revision: Revision, happening: &Happening) -> Self {
        Self::new(revision, happening.what.recorded_at(), happening.what.standing_word(), happening)
    }

    fn new(revision: Revision, time: Option<OffsetDateTime>, event: &'static str, happening: &Happening) -> Self {
        let Happening { block, what, .. } = happening;
        let (from, former_owner) = match what {
            What::Moved { from, .. } => (Some(Whose::of(from)), None),
            What::Claimed { former, .. } => (None, former.as_ref().map(Owner::to_string)),
            _ => (None, None),
        };
        Self {
            revision: revision.get(),
            time: time.map(rfc3339),
            event,
            address: what.address(),
            prefix_length: happening.prefix_length,
            block: block.to_string(),
            holder: what.holder().map(Whose::of),
            from,
            owner: what.owner().map(Owner::to_string),
            former_owner,
            state: what.state_word(),
        }
    }
}
