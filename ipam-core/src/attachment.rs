//! Attachments and the attributes that identify the holder of an address.
//!
//! Calico's handle contains a network and a container. That does not identify an attachment, because a container can
//! have several interfaces in one network, and in a cluster the same container id can occur on two nodes. So
//! allocations also carry our own attributes, which Calico keeps when it rewrites a block.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::Attribute;

/// The attribute with the network's name.
pub const NETWORK: &str = "margay.io/net";
/// The attribute with the interface's name in the container.
pub const INTERFACE: &str = "margay.io/ifname";
/// The attribute with the boot of the host in which the address was assigned: the first 8 characters of the boot id.
///
/// These are 32 random bits, which are only compared with those of the node's current boot. If an earlier boot has the
/// same bits (a chance of 1 in 4,294,967,296 at each boot), its addresses count as addresses of the current boot. They
/// are then kept until the next boot, or until other evidence shows that they are unused. The current boot always has
/// its own bits, so an address of a running container never counts as one of another boot.
pub const BOOT: &str = "margay.io/boot";
/// The attribute with the container's network namespace, which is evidence that the attachment lives: `DEVICE:INODE`,
/// for example `4:4026532201`. If the plugin runs in a process id namespace of its own, a slash and the inode of that
/// namespace follow. The name is meaningless in another boot.
pub const NETNS: &str = "margay.io/netns";
/// Our attribute with the node's name, on networks that are not Calico's.
pub const OWN_NODE: &str = "margay.io/node";
/// Our attribute with the pod's name, on networks that are not Calico's.
pub const OWN_POD: &str = "margay.io/pod";
/// Our attribute with the pod's namespace, on networks that are not Calico's.
pub const OWN_NAMESPACE: &str = "margay.io/namespace";
/// Calico's attribute with the node's name. Only addresses of Calico's networks carry it; see [`AttributeNames`].
pub const NODE: &str = "node";
/// Calico's attribute with the pod's name. Only addresses of Calico's networks carry it; see [`AttributeNames`].
pub const POD: &str = "pod";
/// Calico's attribute with the pod's namespace. Only addresses of Calico's networks carry it; see [`AttributeNames`].
pub const NAMESPACE: &str = "namespace";
/// Calico's attribute with the time of the assignment. We record the time of the last request.
pub const TIMESTAMP: &str = "timestamp";

/// The names under which an allocation records its node, pod and namespace.
///
/// For every allocation with Calico's names, Calico's kube-controllers searches the status of the pod for the address,
/// and releases the address if it is missing there. An address of a secondary network is always missing there.
/// kube-controllers ignores an allocation without Calico's `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeNames {
    /// Calico's names, for Calico's networks.
    Calicos,
    /// Our names, for all other networks.
    Own,
}

/// Pairs of Calico's name and ours.
const NAME_PAIRS: [(&str, &str); 3] = [(NODE, OWN_NODE), (POD, OWN_POD), (NAMESPACE, OWN_NAMESPACE)];

/// Returns Calico's name for one of our names, and any other name unchanged.
pub fn common_name(name: &str) -> &str {
    NAME_PAIRS.iter().find(|(_, own)| *own == name).map_or(name, |(calicos, _)| calicos)
}

/// Replaces Calico's names in the attributes of an allocation with ours. Returns false if there was nothing to replace.
pub(crate) fn use_own_names(attributes: &mut BTreeMap<String, String>) -> bool {
    let mut changed = false;
    for (calicos, own) in NAME_PAIRS {
        if let Some(value) = attributes.remove(calicos) {
            attributes.entry(own.to_owned()).or_insert(value);
            changed = true;
        }
    }
    changed
}

/// The node in the attributes of an allocation, under either name.
pub fn node_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_NODE, NODE)
}

/// The pod in the attributes of an allocation, under either name.
pub fn pod_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_POD, POD)
}

/// The namespace in the attributes of an allocation, under either name.
pub fn namespace_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_NAMESPACE, NAMESPACE)
}

fn either<'a>(attributes: &'a BTreeMap<String, String>, own: &str, calicos: &str) -> Option<&'a str> {
    attributes.get(own).or_else(|| attributes.get(calicos)).map(String::as_str)
}

/// One interface of one container in one network on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the container.
    pub interface: String,
    /// The node's name.
    pub node: String,
    /// The first 8 characters of the host's boot id, if known.
    pub boot: Option<String>,
}

/// Whether an allocation under an attachment's handle belongs to the attachment, according to the attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// The attachment holds it.
    Own,
    /// No attributes of ours, and not recorded for another node. Only the handle identifies the holder.
    Unmarked,
    /// Another attachment holds it.
    Foreign,
}

impl Attachment {
    /// The id of the handle that holds the attachment's addresses, the same as Calico's.
    pub fn handle(&self) -> String {
        crate::model::handle_id(&self.network, &self.container)
    }

    /// The attributes of an allocation for the attachment: the given ones and the attachment's own, under these names.
    pub(crate) fn mark(
        &self,
        attributes: &BTreeMap<String, String>,
        names: AttributeNames,
    ) -> BTreeMap<String, String> {
        let mut marked = attributes.clone();
        let own = [(NODE, Some(&self.node)), (NETWORK, Some(&self.network)), (INTERFACE, Some(&self.interface))];
        for (name, value) in own.into_iter().chain([(BOOT, self.boot.as_ref())]) {
            if let Some(value) = value {
                marked.insert(name.to_owned(), value.clone());
            }
        }
        if names == AttributeNames::Own {
            marked.remove(OWN_NODE);
            use_own_names(&mut marked);
        }
        marked
    }

    /// True if the container's id is one that runtimes generate: 64 hexadecimal digits, which no two containers share.
    pub(crate) fn has_unique_id(&self) -> bool {
        self.container.len() == 64 && self.container.bytes().all(|digit| digit.is_ascii_hexdigit())
    }

    /// The other node for which an allocation under the attachment's handle is recorded, unless an attribute shows that
    /// the allocation belongs to another attachment.
    pub(crate) fn other_node<'a>(&self, allocation: &'a Attribute) -> Option<&'a str> {
        let node = allocation.node().filter(|node| *node != self.node)?;
        let is_alike = match (allocation.get(NETWORK), allocation.get(INTERFACE)) {
            (None, None) => true,
            (Some(network), Some(interface)) => network == self.network && interface == self.interface,
            _ => false,
        };
        is_alike.then_some(node)
    }

    /// Decides whether an allocation under the attachment's handle belongs to the attachment.
    pub(crate) fn claim(&self, allocation: &Attribute) -> Ownership {
        let same_node = allocation.node().is_none_or(|node| node == self.node);
        match (allocation.get(NETWORK), allocation.get(INTERFACE)) {
            (None, None) if same_node => Ownership::Unmarked,
            (Some(network), Some(interface)) if same_node && network == self.network && interface == self.interface => {
                Ownership::Own
            }
            _ => Ownership::Foreign,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(attributes: &[(&str, &str)]) -> Attribute {
        Attribute::new(Some("net.c1"), attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn attachment_names_are_read_with_own_first() {
        let reported = |entry: &Attribute| {
            [entry.node(), entry.namespace(), entry.pod()].map(|text| text.unwrap_or_default().to_owned())
        };
        assert_eq!(reported(&entry(&[(NODE, "a"), (NAMESPACE, "shop"), (POD, "web")])), ["a", "shop", "web"]);
        assert_eq!(
            reported(&entry(&[(OWN_NODE, "a"), (OWN_NAMESPACE, "shop"), (OWN_POD, "web")])),
            ["a", "shop", "web"]
        );
        assert_eq!(reported(&entry(&[(OWN_NODE, "a"), (NODE, "b"), (POD, "web")])), ["a", "", "web"]);
    }

    #[test]
    fn attachment_claim_reads_node_under_both_names() {
        let own = Attachment {
            network: "net".into(),
            container: "c1".into(),
            interface: "eth0".into(),
            node: "a".into(),
            boot: None,
        };
        for name in [NODE, OWN_NODE] {
            let of = |node: &str| own.claim(&entry(&[(NETWORK, "net"), (INTERFACE, "eth0"), (name, node)]));
            assert_eq!((of("a"), of("b")), (Ownership::Own, Ownership::Foreign), "{name}");
        }
    }

    #[test]
    fn attachment_marks_have_calico_names_only_on_its_networks() {
        let own = Attachment {
            network: "net".into(),
            container: "c1".into(),
            interface: "eth0".into(),
            node: "a".into(),
            boot: None,
        };
        let given = BTreeMap::from([(POD.to_owned(), "web".to_owned()), (OWN_NODE.to_owned(), "x".to_owned())]);
        let marked = own.mark(&given, AttributeNames::Own);
        assert_eq!(marked.keys().collect::<Vec<_>>(), [INTERFACE, NETWORK, OWN_NODE, OWN_POD]);
        assert_eq!(marked[OWN_NODE], "a");
        assert_eq!(own.mark(&given, AttributeNames::Calicos)[POD], "web");
    }
}
