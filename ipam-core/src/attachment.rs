//! Defines attachments, and the attributes by which a block records the holder of an address.
//!
//! A handle consists of the names of a network and a container. A handle does not identify an attachment, because a
//! container can have several interfaces in one network, and two nodes of a cluster can use the same container id.
//! Margay also records its own attributes with each allocation, because a handle does not identify an attachment. When
//! Calico rewrites a block, it keeps Margay's attributes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::Attribute;

/// The allocation attribute that contains the network's name.
pub const NETWORK: &str = "margay.io/net";
/// The allocation attribute that contains the name of the container's interface.
pub const INTERFACE: &str = "margay.io/ifname";
/// The allocation attribute that identifies the boot of the host in which the address was assigned. The attribute's
/// value is the first 8 characters of the boot id.
///
/// The first 8 characters of a boot id are 32 random bits, which are compared only with the boot id of the node's
/// current boot. If an earlier boot's id starts with the same 8 characters as the current boot id, addresses of the
/// earlier boot count as addresses of the current boot. After two boot ids have collided, the addresses of the earlier
/// boot are kept until the next boot, or until other evidence shows that they are unused. The probability that two boot
/// ids start with the same 8 characters is 1 in 4,294,967,296. An address of a running container never counts as an
/// address of an earlier boot, because the boot id does not change during a boot.
pub const BOOT: &str = "margay.io/boot";
/// The allocation attribute that identifies the container's network namespace as `DEVICE:INODE`, for example
/// `4:4026532201`. As long as the recorded network namespace exists, the attachment is regarded as live. If the plugin
/// runs in a process id namespace of its own, a slash and the inode of the process id namespace are appended. After a
/// reboot of the machine, the recorded device and inode are meaningless.
pub const NETNS: &str = "margay.io/netns";
/// Margay's attribute for the node's name, in allocations of networks that are not Calico's.
pub const OWN_NODE: &str = "margay.io/node";
/// Margay's attribute for the pod's name, in allocations of networks that are not Calico's.
pub const OWN_POD: &str = "margay.io/pod";
/// Margay's attribute for the pod's namespace, in allocations of networks that are not Calico's.
pub const OWN_NAMESPACE: &str = "margay.io/namespace";
/// Calico's attribute for the node's name. Only allocations of Calico's networks have this attribute; see
/// [`AttributeNames`].
pub const NODE: &str = "node";
/// Calico's attribute for the pod's name. Only allocations of Calico's networks have this attribute; see
/// [`AttributeNames`].
pub const POD: &str = "pod";
/// Calico's attribute for the pod's namespace. Only allocations of Calico's networks have this attribute; see
/// [`AttributeNames`].
pub const NAMESPACE: &str = "namespace";
/// Calico's attribute for the time at which an address was assigned. Margay records the time of the holder's last
/// request for the address.
pub const TIMESTAMP: &str = "timestamp";

/// The attribute names under which an allocation records its node, pod and namespace.
///
/// Calico's kube-controllers releases an allocation with Calico's attribute names if the status of the pod does not
/// list the address. A pod's status never lists an address of a secondary network. The addresses of secondary networks
/// are recorded under Margay's names, because kube-controllers ignores allocations without Calico's `node` attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeNames {
    /// The allocation has Calico's attribute names, because it belongs to a network of Calico.
    Calicos,
    /// The allocation has Margay's attribute names, because it belongs to a network that is not Calico's.
    Own,
}

/// Calico's and Margay's names of the same attributes.
const NAME_PAIRS: [(&str, &str); 3] = [(NODE, OWN_NODE), (POD, OWN_POD), (NAMESPACE, OWN_NAMESPACE)];

/// Returns Calico's name of an attribute for Margay's name of the same attribute, and any other name unchanged.
pub fn common_name(name: &str) -> &str {
    NAME_PAIRS.iter().find(|(_, own)| *own == name).map_or(name, |(calicos, _)| calicos)
}

/// Replaces Calico's attribute names in an allocation with Margay's. Returns false if the allocation has no attribute
/// with a Calico name.
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

/// Returns the node that an allocation records, under Calico's or Margay's attribute name.
pub fn node_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_NODE, NODE)
}

/// Returns the pod that an allocation records, under Calico's or Margay's attribute name.
pub fn pod_of(attributes: &BTreeMap<String, String>) -> Option<&str> {
    either(attributes, OWN_POD, POD)
}

/// Returns the namespace that an allocation records, under Calico's or Margay's attribute name.
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
    /// The name of the interface inside the container.
    pub interface: String,
    /// The node's name.
    pub node: String,
    /// The first 8 characters of the host's boot id, if known.
    pub boot: Option<String>,
}

/// Whether an allocation under an attachment's handle belongs to this attachment, according to the allocation's
/// attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    Own,
    /// The holder is known only by the handle: the allocation has no attributes of Margay, and does not name another
    /// node.
    Unmarked,
    Foreign,
}

impl Attachment {
    /// Returns the id of the handle that holds the attachment's addresses. The handle is `<network>.<container id>`, as
    /// in Calico.
    pub fn handle(&self) -> String {
        crate::model::handle_id(&self.network, &self.container)
    }

    /// Returns the attributes for a new allocation: the attributes in `attributes`, and the attributes that describe
    /// the attachment. `names` selects whether the attributes get Calico's or Margay's names.
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

    /// True if the container's id has 64 hexadecimal digits. Container runtimes generate container ids of 64 digits at
    /// random, so no two containers have equal ids.
    pub(crate) fn has_unique_id(&self) -> bool {
        self.container.len() == 64 && self.container.bytes().all(|digit| digit.is_ascii_hexdigit())
    }

    /// If an allocation under the attachment's handle names a node other than the attachment's, returns that node.
    /// Returns `None` if the recorded network or interface shows that the allocation belongs to another attachment.
    pub(crate) fn other_node<'a>(&self, allocation: &'a Attribute) -> Option<&'a str> {
        let node = allocation.node().filter(|node| *node != self.node)?;
        let is_alike = match (allocation.network(), allocation.get(INTERFACE)) {
            (None, None) => true,
            (Some(network), Some(interface)) => network == self.network && interface == self.interface,
            _ => false,
        };
        is_alike.then_some(node)
    }

    /// Decides from the attributes whether an allocation under the attachment's handle belongs to the attachment.
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
