//! Events as rows: the JSON of `margay watch`, of `margay ipam history` and of the daemon's page.

use std::net::IpAddr;

use ipam_core::model::{Attribute, Owner};
use ipam_core::timestamps::rfc3339;
use ipnet::IpNet;
use kv::Revision;
use serde::Serialize;
use time::OffsetDateTime;

use super::{Happening, Holder, What};

/// An event, or a fact of the state at which the report begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventRow {
    /// The revision of the event or of the state.
    pub revision: i64,
    /// The time; null if it is unknown.
    #[serde(serialize_with = "utc")]
    pub time: Option<OffsetDateTime>,
    /// The kind of event.
    pub event: &'static str,
    /// The address; absent if the event is about the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The length of the prefix that the address stands for; absent if it is an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// The block.
    pub block: IpNet,
    /// The holder of the address, or the former one.
    #[serde(flatten)]
    pub holder: Option<AddressHolder>,
    /// The former holder of an address that moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<AddressHolder>,
    /// The owner of the block or the affinity, or the former one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The former owner of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub former_owner: Option<String>,
    /// The state of the affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
}

/// The holder of an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AddressHolder {
    /// The handle; null if there is none. An event has this member if and only if it has a holder: the page asks for it.
    pub handle: Option<String>,
    /// The node; null if it is unknown.
    pub node: Option<String>,
    /// The network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The container's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The interface in the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The pod's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl AddressHolder {
    /// The holder that an entry of a block records.
    pub fn of(entry: &Attribute) -> Self {
        let Holder { handle, node, network, container, interface, pod, namespace } = Holder::of(entry);
        let [handle, node, network, container, interface, pod, namespace] =
            [handle, node, network, container, interface, pod, namespace].map(|text| text.map(str::to_owned));
        Self { handle, node, network, container, interface, namespace, pod }
    }
}

impl EventRow {
    /// The row of an event.
    pub fn happened(revision: Revision, time: Option<OffsetDateTime>, happening: &Happening) -> Self {
        Self::new(revision, time, happening.what.word(), happening)
    }

    /// The row of a fact of the state at a revision.
    pub fn listed(revision: Revision, happening: &Happening) -> Self {
        Self::new(revision, happening.what.recorded_at(), happening.what.standing_word(), happening)
    }

    fn new(revision: Revision, time: Option<OffsetDateTime>, event: &'static str, happening: &Happening) -> Self {
        let Happening { block, what, .. } = happening;
        let text = |owner: &Owner| owner.to_string();
        let (from, former_owner) = match what {
            What::Moved { from, .. } => (Some(AddressHolder::of(from)), None),
            What::Claimed { former, .. } => (None, former.as_ref().map(text)),
            _ => (None, None),
        };
        Self {
            revision: revision.get(),
            time,
            event,
            address: what.address(),
            prefix_length: happening.prefix_length,
            block: *block,
            holder: what.holder().map(AddressHolder::of),
            from,
            owner: what.owner().map(text),
            former_owner,
            state: what.state_word(),
        }
    }
}

fn utc<S: serde::Serializer>(time: &Option<OffsetDateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(rfc3339).serialize(serializer)
}
