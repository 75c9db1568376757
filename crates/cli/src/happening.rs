//! An event of an address or a block, for people.

use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{AddressHolder, EventRow};

use crate::output::printable;

/// The words for an event.
pub(crate) trait InWords {
    /// True if the address has a holder, or the block an owner, after this event.
    fn is_standing(&self) -> bool;
    /// The holder or the owner, with the former one, for people.
    fn who(&self) -> String;
    /// The node of the holder.
    fn node(&self) -> String;
    /// The address, or else the block.
    fn place(&self) -> String;
    /// The event in one line.
    fn line(&self) -> String;
}

impl InWords for EventRow {
    fn is_standing(&self) -> bool {
        ["assigned", "held", "renewed", "moved", "claimed", "owned"].contains(&self.event)
    }

    fn who(&self) -> String {
        match (&self.holder, &self.from, &self.owner, &self.former_owner, self.state) {
            (Some(to), Some(from), ..) => format!("{}, before {}", text(to), text(from)),
            (Some(holder), ..) => text(holder),
            (None, _, Some(owner), _, Some(state)) => format!("{} {state}", printable(owner)),
            (None, _, Some(owner), Some(former), None) => format!("{}, before {}", printable(owner), printable(former)),
            (None, _, Some(owner), ..) => printable(owner),
            _ => String::new(),
        }
    }

    fn node(&self) -> String {
        self.holder.as_ref().and_then(|holder| holder.node.as_deref()).map(printable).unwrap_or_default()
    }

    fn place(&self) -> String {
        match (self.address, self.prefix_length) {
            (Some(address), Some(length)) => format!("{address}/{length}"),
            (Some(address), None) => address.to_string(),
            (None, _) => self.block.to_string(),
        }
    }

    fn line(&self) -> String {
        let time = self.time.map_or_else(|| format!("revision {}", self.revision), rfc3339);
        let (place, who, node) = (self.place(), self.who(), self.node());
        let node = if node.is_empty() { node } else { format!("  on {node}") };
        format!("{time:<20}  {:<8}  {place:<18}  {who}{node}", self.event).trim_end().to_owned()
    }
}

/// The holder of an address.
fn text(holder: &AddressHolder) -> String {
    let handle = holder.handle.as_deref().unwrap_or("no handle");
    let interface = holder.interface.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
    let pod = match (&holder.namespace, &holder.pod) {
        (Some(namespace), Some(pod)) => format!(" (pod {namespace}/{pod})"),
        (None, Some(pod)) => format!(" (pod {pod})"),
        _ => String::new(),
    };
    printable(&format!("{handle}{interface}{pod}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ipam_core::model::{Attribute, Block, Owner};
    use ipam_operator::events::Happening;
    use kv::Revision;
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
        let rows: Vec<EventRow> = found.iter().map(|one| EventRow::happened(Revision::new(7), Some(at), one)).collect();
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
        let mut listed = serde_json::to_value(EventRow::listed(Revision::new(7), &found[0])).unwrap();
        assert_eq!(listed["time"].take(), json!("2026-11-21T10:00:00Z"), "as the block records it");
        assert_eq!(listed, expected);
    }

    #[test]
    fn what_is_stored_does_not_reach_the_terminal_as_it_is() {
        let row = EventRow::listed(Revision::new(7), &happenings("\u{1b}[2J")[1]);
        assert_eq!(
            row.line(),
            "revision 7            held      10.0.0.1            net.c1 eth0 (pod shop/\\u{1b}[2J)  on node1"
        );
    }
}
