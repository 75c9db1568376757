//! Addresses that a node has of a block that is not its own.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::Deadline;
use serde::Serialize;

use crate::boxed;
use crate::error::Result;
use crate::ipam::Ipam;
use crate::model::{Attribute, Block, Owner};

/// The borrowed addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Borrowed {
    /// The addresses, block by block.
    pub addresses: Vec<BorrowedAddress>,
    /// The number of addresses that do not name their node, so that nobody knows whether they are borrowed.
    pub without_node: usize,
}

/// An address that is borrowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BorrowedAddress {
    /// The address.
    pub ip: IpAddr,
    /// The node that has it.
    pub node: String,
    /// The block that it is of.
    #[serde(serialize_with = "as_text")]
    pub block: IpNet,
    /// The owner of that block; empty if it has none.
    pub block_owner: String,
    /// The kind of its holder: `pod`, a kind of tunnel, or empty where that is not recorded.
    pub kind: String,
    /// The holder: namespace and name, or the handle.
    pub allocated_to: String,
}

impl Ipam {
    /// The addresses that are borrowed, as of one revision. Those that rest are nobody's.
    ///
    /// # Errors
    /// Those of the store; `Timeout` after the deadline.
    #[boxed]
    pub async fn borrowed(&self, deadline: Deadline) -> Result<Borrowed> {
        Ok(borrowed(&self.all_blocks(deadline).await?))
    }
}

/// Looks through blocks.
fn borrowed(blocks: &[Block]) -> Borrowed {
    let mut found = Borrowed::default();
    for block in blocks {
        let block_owner = match block.owner() {
            Some(owner) if owner.node().is_some() => owner.node().unwrap_or_default().to_owned(),
            Some(Owner::Host(name) | Owner::Virtual(name) | Owner::Other(name)) => name,
            None => String::new(),
        };
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            match entry.node() {
                None => found.without_node += 1,
                Some(node) if node == block_owner => {}
                Some(node) => {
                    let (kind, allocated_to) = holder(entry);
                    found.addresses.push(BorrowedAddress {
                        ip,
                        node: node.to_owned(),
                        block: block.cidr(),
                        block_owner: block_owner.clone(),
                        kind,
                        allocated_to,
                    });
                }
            }
        }
    }
    found
}

fn holder(entry: &Attribute) -> (String, String) {
    match entry.pod() {
        Some(name) => ("pod".to_owned(), format!("{}/{name}", entry.namespace().unwrap_or_default())),
        None => (entry.get("type").unwrap_or_default().to_owned(), entry.handle().unwrap_or_default().to_owned()),
    }
}

fn as_text<S: serde::Serializer>(net: &IpNet, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(net)
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn what_another_node_has_is_borrowed() {
        let now = datetime!(2026-01-01 0:00 UTC);
        let mut block = Block::new("10.0.0.0/28".parse().unwrap(), Some(&Owner::host("a")), now, None).unwrap();
        let mut give = |last: u8, attributes: &[(&str, &str)]| {
            let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let ip = IpAddr::from([10, 0, 0, last]);
            block.assign_specific(ip, &Attribute::new(Some(&format!("h{last}")), attributes)).unwrap();
        };
        give(1, &[("node", "a"), ("pod", "own")]);
        give(2, &[("node", "b"), ("pod", "web"), ("namespace", "default")]);
        give(4, &[("node", "c"), ("type", "ipipTunnelAddress")]);
        give(5, &[]);
        let mut orphan = Block::new("10.0.0.16/28".parse().unwrap(), None, now, None).unwrap();
        let node = [("node".to_owned(), "a".to_owned())].into();
        orphan.assign_specific("10.0.0.17".parse().unwrap(), &Attribute::new(Some("h"), node)).unwrap();
        let found = borrowed(&[block, orphan]);
        let rows: Vec<String> = found
            .addresses
            .iter()
            .map(|a| format!("{} {} {} '{}' '{}' {}", a.ip, a.node, a.block, a.block_owner, a.kind, a.allocated_to))
            .collect();
        assert_eq!(
            rows,
            [
                "10.0.0.2 b 10.0.0.0/28 'a' 'pod' default/web",
                "10.0.0.4 c 10.0.0.0/28 'a' 'ipipTunnelAddress' h4",
                "10.0.0.17 a 10.0.0.16/28 '' '' h",
            ]
        );
        assert_eq!(found.without_node, 1);
    }
}
