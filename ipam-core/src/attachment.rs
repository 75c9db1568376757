//! Attachments and the attributes that identify the holder of an address.
//!
//! Calico's handle contains a network and a container. Calico's handle does not identify an attachment, because a
//! container can have several interfaces in one network, and the same container id can occur on two nodes of a cluster.
//! Allocations therefore also carry Margay's own attributes. Calico keeps these attributes when it rewrites a block.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::Attribute;

/// The allocation attribute with the network's name.
pub const NETWORK: &str = "margay.io/net";
/// The allocation attribute with the interface's name in the container.
pub const INTERFACE: &str = "margay.io/ifname";
/// The allocation attribute that records in which boot of the host the address was assigned: the first 8 characters of
/// the boot id.
///
/// The 8 characters are 32 random bits, compared only with the bits of the node's current boot. If an earlier boot has
/// the same bits (a chance of 1 in 4,294,967,296 at each boot), addresses of the earlier boot count as addresses of the
/// current boot. The addresses of an earlier boot with equal bits are kept until the next boot, or until other evidence
/// shows that they are unused. The bits of the current boot are always exact, so an address of a running container
/// never counts as an address of another boot.
pub const BOOT: &str = "margay.io/boot";
/// The allocation attribute with the container's network namespace: `DEVICE:INODE`, for example `4:4026532201`. An
/// existing namespace is evidence that the attachment lives. If the plugin runs in a process id namespace of its own, a
/// slash and the inode of the process id namespace follow. After a reboot the value is meaningless.
pub const NETNS: &str = "margay.io/netns";
/// Margay's attribute with the node's name, on networks that are not Calico's.
pub const OWN_NODE: &str = "margay.io/node";
/// Margay's attribute with the pod's name, on networks that are not Calico's.
pub const OWN_POD: &str = "margay.io/pod";
/// Margay's attribute with the pod's namespace, on networks that are not Calico's.
pub const OWN_NAMESPACE: &str = "margay.io/namespace";
/// Calico's attribute with the node's name. Only addresses of Calico's networks carry this attribute; see
/// [`AttributeNames`].
pub const NODE: &str = "node";
/// Calico's attribute with the pod's name. Only addresses of Calico's networks carry this attribute; see
/// [`AttributeNames`].
pub const POD: &str = "pod";
/// Calico's attribute with the pod's namespace. Only addresses of Calico's networks carry this attribute; see
/// [`AttributeNames`].
pub const NAMESPACE: &str = "namespace";
/// Calico's attribute with the time of the assignment. Margay records the time of the last request for the address.
pub const TIMESTAMP: &str = "timestamp";

/// The names under which an allocation records its node, pod and namespace.
///
/// If an allocation has Calico's names, Calico's kube-controllers searches the status of the pod for the address, and
/// releases an address that is missing there. An address of a secondary network is never in a pod's status.
/// kube-controllers ignores an allocation without Calico's `node` attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeNames {
    /// Calico's attribute names, for Calico's networks.
    Calicos,
    /// Margay's attribute names, for all other networks.
    Own,
}

/// Pairs of Calico's and Margay's attribute names.
const NAME_PAIRS: [(&str, &str); 3] = [(NODE, OWN_NODE), (POD, OWN_POD), (NAMESPACE, OWN_NAMESPACE)];

/// Returns Calico's attribute name for a Margay attribute name, and any other name unchanged.
pub fn common_name(name: &str) -> &str {
    NAME_PAIRS.iter().find(|(_, own)| *own == name).map_or(name, |(calicos, _)| calicos)
}

/// Replaces Calico's attribute names in an allocation with Margay's. Returns false if there was no name to replace.
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

/// Returns the node in the attributes of an allocation, under Calico's or Margay's name.
pub fn node_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_NODE, NODE)
}

/// Returns the pod in the attributes of an allocation, under Calico's or Margay's name.
pub fn pod_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_POD, POD)
}

/// Returns the namespace in the attributes of an allocation, under Calico's or Margay's name.
pub fn namespace_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_NAMESPACE, NAMESPACE)
}

fn either<'a>(attributes: &'a BTreeMap<String, String>, own: &str, calicos: &str) -> Option<&'a str> {
    attributes.get(own).or_else(|| attributes.get(calicos)).map(String::as_str)
}

/// An attachment: one interface of one container in one network on one node.
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
    /// The attachment holds the allocation.
    Own,
    /// The allocation has no attributes of Margay and is not recorded for another node, so only the handle identifies
    /// the holder.
    Unmarked,
    /// Another attachment holds the allocation.
    Foreign,
}

impl Attachment {
    /// Returns the id of the handle that holds the attachment's addresses. Calico uses the same handle id.
    pub fn handle(&self) -> String {
        crate::model::handle_id(&self.network, &self.container)
    }

    /// Returns the attributes of an allocation for the attachment: the given attributes and the attachment's own
    /// attributes, under the given attribute names.
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

    /// Returns the other node for which an allocation under the attachment's handle is recorded. Returns `None` if an
    /// attribute shows that the allocation belongs to another attachment.
    pub(crate) fn other_node<'a>(&self, allocation: &'a Attribute) -> Option<&'a str> {
        let node = allocation.node().filter(|node| *node != self.node)?;
        let is_alike = match (allocation.network(), allocation.get(INTERFACE)) {
            (None, None) => true,
            (Some(network), Some(interface)) => network == self.network && interface == self.interface,
            _ => false,
        };
        is_alike.then_some(node)
    }

    /// Decides whether an allocation under the attachment's handle belongs to the attachment.
    pub(crate) fn claim(&self, allocation: &Attribute) -> Ownership {
        let same_node = allocation.node().is_none_or(|node| node == self.node);
        match (allocation.network(), allocation.get(INTERFACE)) {
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
