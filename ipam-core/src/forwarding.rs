//! Decides which program forwards and masquerades the packets of containers on this node: Margay's plugin, or Calico's
//! agent Felix. The main plugin and the command `margay` use the same decision.

use std::path::PathBuf;

use crate::model::ClusterInformation;

/// The machines that use the store of a network.
#[derive(Clone, Copy, Debug)]
pub enum StoreScope<'a> {
    /// The store belongs to one machine, so Felix cannot read it.
    Machine,
    /// The store is a cluster's, with this ClusterInformation document; `None` if the document is missing.
    Cluster(Option<&'a ClusterInformation>),
}

/// The program that forwards and masquerades the packets of a store's containers on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardingOwner {
    /// Margay's main plugin, in each ADD.
    Plugin,
    /// Felix, because Calico's node agent has started in the cluster, or the cluster was not set up by Margay.
    FelixOfCluster,
    /// Felix, because this machine has this file of Calico's node agent. The agent may belong to another cluster.
    FelixOfMachine(PathBuf),
}

impl ForwardingOwner {
    /// Decides which program forwards and masquerades. `felix_file` is a file of Calico's node agent on this machine,
    /// if there is one.
    pub fn decide(scope: StoreScope<'_>, felix_file: Option<PathBuf>) -> Self {
        match (scope, felix_file) {
            (StoreScope::Cluster(cluster), _) if !cluster.is_some_and(ClusterInformation::is_margay_alone) => {
                Self::FelixOfCluster
            }
            (_, Some(file)) => Self::FelixOfMachine(file),
            (_, None) => Self::Plugin,
        }
    }

    /// True if Margay's plugin forwards and masquerades.
    pub fn is_plugin(&self) -> bool {
        *self == Self::Plugin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarding_is_left_to_felix_where_it_may_run() {
        let cluster = |text: &str| ClusterInformation::decode_or_empty(text.as_bytes());
        let margay = cluster(r#"{"spec":{"clusterType":"margay"}}"#);
        let calico = cluster(r#"{"spec":{"clusterType":"margay,k8s","calicoVersion":"v3.30.0"}}"#);
        let file = || Some(PathBuf::from("/var/lib/calico/mtu"));
        for (scope, felix_file, owner) in [
            (StoreScope::Machine, None, ForwardingOwner::Plugin),
            (StoreScope::Machine, file(), ForwardingOwner::FelixOfMachine("/var/lib/calico/mtu".into())),
            (StoreScope::Cluster(Some(&margay)), None, ForwardingOwner::Plugin),
            (StoreScope::Cluster(Some(&margay)), file(), ForwardingOwner::FelixOfMachine("/var/lib/calico/mtu".into())),
            (StoreScope::Cluster(Some(&calico)), None, ForwardingOwner::FelixOfCluster),
            (StoreScope::Cluster(None), None, ForwardingOwner::FelixOfCluster),
        ] {
            assert_eq!(ForwardingOwner::decide(scope, felix_file), owner, "{scope:?}");
        }
    }
}
