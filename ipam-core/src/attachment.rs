//! Who an address belongs to.
//!
//! Calico's handle names a network and a container. An attachment is more than that: a container can have several
//! interfaces in one network, and in a cluster the same container id can turn up on two nodes. So allocations also carry
//! attributes of ours, which Calico keeps when it rewrites a block.

use std::collections::BTreeMap;

use crate::model::Attribute;

/// The attribute that names the network.
pub const NETWORK: &str = "margay.io/net";
/// The attribute that names the interface in the container.
pub const INTERFACE: &str = "margay.io/ifname";
/// The attribute that says in which boot of the host the address was given: the first 8 characters of the boot id.
pub const BOOT: &str = "margay.io/boot";
/// Calico's attribute that names the node.
pub const NODE: &str = "node";
/// Calico's attribute that says when the address was given; for us, when it was last asked for.
pub const TIMESTAMP: &str = "timestamp";

/// One interface of one container in one network on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the container.
    pub interface: String,
    /// The node's name.
    pub node: String,
    /// The first 8 characters of the host's boot id, where it is known.
    pub boot: Option<String>,
}

/// What the attributes of an allocation under a handle say about an attachment with that handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// It is the attachment's.
    Own,
    /// It carries no attributes of ours, and is not recorded as another node's: the handle is all there is to go by.
    Unmarked,
    /// It is another attachment's.
    Foreign,
}

impl Attachment {
    /// The id of the handle under which Calico and we keep the attachment's addresses.
    pub fn handle(&self) -> String {
        crate::model::handle_id(&self.network, &self.container)
    }

    /// The attributes that an allocation for the attachment carries besides those given.
    pub(crate) fn mark(&self, attributes: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut marked = attributes.clone();
        let own = [(NODE, Some(&self.node)), (NETWORK, Some(&self.network)), (INTERFACE, Some(&self.interface))];
        for (name, value) in own.into_iter().chain([(BOOT, self.boot.as_ref())]) {
            if let Some(value) = value {
                marked.insert(name.to_owned(), value.clone());
            }
        }
        marked
    }

    /// Whose an allocation under the attachment's handle is.
    pub(crate) fn claim(&self, allocation: &Attribute) -> Claim {
        let same_node = allocation.get(NODE).is_none_or(|node| node == self.node);
        match (allocation.get(NETWORK), allocation.get(INTERFACE)) {
            (None, None) if same_node => Claim::Unmarked,
            (Some(network), Some(interface)) if same_node && network == self.network && interface == self.interface => {
                Claim::Own
            }
            _ => Claim::Foreign,
        }
    }
}
