//! An event of an address or a block, as a row of a table, a line, and an object of JSON.

use std::net::IpAddr;

use ipam_core::model::{Attribute, Owner};
use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{Happening, Holder, What};
use ipnet::IpNet;
use kv::Revision;
use serde::Serialize;
use time::OffsetDateTime;

use crate::output::{as_text, printable};

/// An event, or a fact of the state at which the report begins.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The revision of the event or of the state.
    pub(crate) revision: i64,
    /// The time; absent if it is unknown.
    #[serde(serialize_with = "utc")]
    pub(crate) time: Option<OffsetDateTime>,
    /// The kind of event.
    pub(crate) event: &'static str,
    /// The address; absent if the event is about the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<IpAddr>,
    /// The length of the prefix that the address stands for; absent if it is an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prefix_length: Option<u8>,
    /// The block.
    #[serde(serialize_with = "as_text")]
    pub(crate) block: IpNet,
    /// The holder of the address, or the former one.
    #[serde(flatten)]
    holder: Option<Whose>,
    /// The former owner of an address that moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Whose>,
    /// The owner of the block or the affinity, or the former one.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    /// The former owner of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    former_owner: Option<String>,
    /// The state of the affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
}

/// The holder of an address.
#[derive(Clone, Debug, Serialize)]
struct Whose {
    handle: Option<String>,
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
    fn of(entry: &Attribute) -> Self {
        let Holder { handle, node, network, container, interface, pod, namespace } = Holder::of(entry);
        let [handle, node, network, container, interface, pod, namespace] =
            [handle, node, network, container, interface, pod, namespace].map(|text| text.map(str::to_owned));
        Self { handle, node, network, container, interface, namespace, pod }
    }

    fn text(&self) -> String {
        let handle = self.handle.as_deref().unwrap_or("no handle");
        let interface = self.interface.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        let pod = match (&self.namespace, &self.pod) {
            (Some(namespace), Some(pod)) => format!(" (pod {namespace}/{pod})"),
            (None, Some(pod)) => format!(" (pod {pod})"),
            _ => String::new(),
        };
        printable(&format!("{handle}{interface}{pod}"))
    }
}

impl Row {
    /// The row of an event.
    pub(crate) fn happened(revision: Revision, time: Option<OffsetDateTime>, happening: &Happening) -> Self {
        Self::new(revision, time, happening.what.word(), happening)
    }

    /// The row of a fact of the state at a revision.
    pub(crate) fn listed(revision: Revision, happening: &Happening) -> Self {
        Self::new(revision, happening.what.recorded_at(), happening.what.standing_word(), happening)
    }

    fn new(revision: Revision, time: Option<OffsetDateTime>, event: &'static str, happening: &Happening) -> Self {
        let Happening { block, what, .. } = happening;
        let text = |owner: &Owner| owner.to_string();
        let (from, former_owner) = match what {
            What::Moved { from, .. } => (Some(Whose::of(from)), None),
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
            holder: what.holder().map(Whose::of),
            from,
            owner: what.owner().map(text),
            former_owner,
            state: what.state_word(),
        }
    }

    /// True if the address has a holder, or the block an owner, after this event.
    pub(crate) fn is_standing(&self) -> bool {
        ["assigned", "held", "renewed", "moved", "claimed", "owned"].contains(&self.event)
    }

    /// The holder or the owner, with the former one, for people.
    pub(crate) fn who(&self) -> String {
        match (&self.holder, &self.from, &self.owner, &self.former_owner, self.state) {
            (Some(to), Some(from), ..) => format!("{}, before {}", to.text(), from.text()),
            (Some(holder), ..) => holder.text(),
            (None, _, Some(owner), _, Some(state)) => format!("{} {state}", printable(owner)),
            (None, _, Some(owner), Some(former), None) => format!("{}, before {}", printable(owner), printable(former)),
            (None, _, Some(owner), ..) => printable(owner),
            _ => String::new(),
        }
    }

    /// The node of the holder.
    pub(crate) fn node(&self) -> String {
        self.holder.as_ref().and_then(|holder| holder.node.as_deref()).map(printable).unwrap_or_default()
    }

    /// The address, or else the block.
    pub(crate) fn place(&self) -> String {
        match (self.address, self.prefix_length) {
            (Some(address), Some(length)) => format!("{address}/{length}"),
            (Some(address), None) => address.to_string(),
            (None, _) => self.block.to_string(),
        }
    }

    /// The event in one line.
    pub(crate) fn line(&self) -> String {
        let time = self.time.map_or_else(|| format!("revision {}", self.revision), rfc3339);
        let (place, who, node) = (self.place(), self.who(), self.node());
        let node = if node.is_empty() { node } else { format!("  on {node}") };
        format!("{time:<20}  {:<8}  {place:<18}  {who}{node}", self.event).trim_end().to_owned()
    }
}

fn utc<S: serde::Serializer>(time: &Option<OffsetDateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(rfc3339).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ipam_core::model::Block;
    use serde_json::json;
    use time::macros::datetime;

    use super::*;

    fn happenings(pod: &str) -> Vec<Happening> {
        let attributes = [
            ("node", "node1"),
            ("margay.io/net", "net"),
            ("margay.io/ifname", "eth0"),
            ("namespace", "shop"),
            ("pod", pod),
        ];
        let attributes: BTreeMap<_, _> = attributes.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let at = datetime!(2026-11-21 10:00 UTC);
        let cidr = "10.0.0.0/30".parse().unwrap();
        let mut block = Block::new(cidr, Some(&Owner::host("node1")), at, None).unwrap();
        block.assign_specific("10.0.0.1".parse().unwrap(), &Attribute::new(Some("net.c1"), attributes)).unwrap();
        ipam_operator::events::of_block(cidr, None, Some(&block))
    }

    #[test]
    fn a_line_and_json_of_an_assignment_and_a_claim() {
        let found = happenings("web");
        let at = datetime!(2026-11-21 10:00:00.7 UTC);
        let rows: Vec<Row> = found.iter().map(|one| Row::happened(Revision::new(7), Some(at), one)).collect();
        assert_eq!(rows[0].line(), "2026-11-21T10:00:00Z  claimed   10.0.0.0/30         host:node1");
        let line = "2026-11-21T10:00:00Z  assigned  10.0.0.1            net.c1 eth0 (pod shop/web)  on node1";
        assert_eq!(rows[1].line(), line);
        let expected = json!({
            "revision": 7, "time": "2026-11-21T10:00:00Z", "event": "assigned", "address": "10.0.0.1",
            "block": "10.0.0.0/30", "handle": "net.c1", "node": "node1", "network": "net", "container": "c1",
            "interface": "eth0", "namespace": "shop", "pod": "web",
        });
        assert_eq!(serde_json::to_value(&rows[1]).unwrap(), expected);
        let expected =
            json!({"revision": 7, "time": null, "event": "owned", "block": "10.0.0.0/30", "owner": "host:node1"});
        let mut listed = serde_json::to_value(Row::listed(Revision::new(7), &found[0])).unwrap();
        assert_eq!(listed["time"].take(), json!("2026-11-21T10:00:00Z"), "as the block records it");
        assert_eq!(listed, expected);
    }

    #[test]
    fn what_is_stored_does_not_reach_the_terminal_as_it_is() {
        let row = Row::listed(Revision::new(7), &happenings("\u{1b}[2J")[1]);
        assert_eq!(
            row.line(),
            "revision 7            held      10.0.0.1            net.c1 eth0 (pod shop/\\u{1b}[2J)  on node1"
        );
    }
}
