//! The workload endpoints that go with what is freed.
//!
//! An endpoint goes on the evidence by which its addresses go, and in the same commit: that fails or passes the address over
//! if the container has asked for it again, so no endpoint of a live container is deleted.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kv::{Deadline, Key};

use super::{Allocation, Evidence, Hold, Holdings};
use crate::endpoints::{EndpointOf, EndpointOwner};
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, Orchestrator, WorkloadEndpoint, split_endpoint_name};

/// How many endpoints are deleted in a commit at most: each is a key, and a commit touches 120.
pub const MOST_ENDPOINTS: usize = 64;

/// How many endpoints are handed to another node in a commit at most: each is a key that goes and one that comes.
pub const MOST_ENDPOINTS_MOVED: usize = 32;

/// The workload endpoint of a container or a pod on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEndpoint {
    /// The node.
    pub node: String,
    /// The endpoint's namespace.
    pub namespace: String,
    /// The endpoint's name.
    pub name: String,
    /// The container's id; empty if the endpoint names none.
    pub container: String,
    /// The interface in the container that the endpoint is named after.
    pub interface: String,
    /// The addresses.
    pub addresses: Vec<IpAddr>,
}

impl NodeEndpoint {
    /// An endpoint that the CNI plugin has stored; `None` for any other, and for one whose name and document name two nodes.
    fn of(endpoint: &WorkloadEndpoint) -> Option<Self> {
        let [node, orchestrator, ..] = split_endpoint_name(endpoint.name())?;
        let is_of_plugin = [Orchestrator::Cni, Orchestrator::K8s].iter().any(|known| known.as_str() == orchestrator);
        let is_of_node = endpoint.node().is_empty() || endpoint.node() == node;
        (is_of_plugin && is_of_node).then(|| Self {
            node,
            namespace: endpoint.namespace().to_owned(),
            name: endpoint.name().to_owned(),
            container: endpoint.container().to_owned(),
            interface: endpoint.endpoint().to_owned(),
            addresses: endpoint.addresses(),
        })
    }

    fn key(&self) -> Key {
        keys::workload_endpoint(&self.namespace, &self.name)
    }

    /// True if it is the endpoint of an attachment: of its interface, or of its address.
    fn is_of(&self, one: &Allocation) -> bool {
        self.container == one.container
            && (self.interface == one.interface || self.addresses.iter().any(|ip| one.unit.contains(ip)))
    }
}

/// The allocations to be freed, each with the endpoint that goes with it.
///
/// An endpoint stays if the node holds another address for its container that is not freed, or if an interface of the machine
/// has an address of the endpoint.
pub fn with_endpoints(
    freed: &[Allocation],
    holdings: &Holdings,
    endpoints: &[NodeEndpoint],
    evidence: &Evidence,
) -> Vec<Hold> {
    let addresses: HashSet<IpAddr> = freed.iter().map(|one| one.address).collect();
    let others = holdings.allocations.iter().filter(|one| !addresses.contains(&one.address));
    let kept: HashSet<&str> = others.map(|one| one.container.as_str()).collect();
    let is_live = |endpoint: &NodeEndpoint| endpoint.addresses.iter().any(|ip| evidence.live.contains(ip));
    let mut going: HashMap<&str, Vec<&NodeEndpoint>> = HashMap::new();
    for endpoint in endpoints.iter().filter(|one| !kept.contains(one.container.as_str()) && !is_live(one)) {
        going.entry(&endpoint.container).or_default().push(endpoint);
    }
    let with_endpoint = |one: &Allocation| {
        let endpoint = going.get(one.container.as_str()).and_then(|of| of.iter().find(|endpoint| endpoint.is_of(one)));
        let endpoint = endpoint.map(|endpoint| EndpointOf {
            namespace: endpoint.namespace.clone(),
            name: endpoint.name.clone(),
            owner: EndpointOwner::Container(one.container.clone()),
        });
        Hold::from(one).with_endpoint(endpoint)
    };
    freed.iter().map(with_endpoint).collect()
}

impl Ipam {
    /// The workload endpoints of some nodes that the CNI plugin has stored, in any namespace. Damaged ones are left out. It
    /// takes the names of the cluster's endpoints, and the documents of those nodes'.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn node_endpoints(
        &self,
        is_wanted: impl Fn(&str) -> bool + Send + Sync,
        deadline: Deadline,
    ) -> Result<Vec<NodeEndpoint>> {
        let endpoints = self.endpoints_of_nodes(is_wanted, deadline).await?;
        Ok(endpoints.iter().filter_map(NodeEndpoint::of).collect())
    }

    /// Deletes endpoints of a node that is gone, at most [`MOST_ENDPOINTS`], in one commit, and returns those that were there.
    ///
    /// # Errors
    /// `Invalid` if the node is registered; those of the store.
    pub async fn delete_endpoints_of_gone<'e>(
        &self,
        node: &str,
        endpoints: &'e [NodeEndpoint],
        deadline: Deadline,
    ) -> Result<Vec<&'e NodeEndpoint>> {
        let deleted = transact!(self, deadline, |tx| {
            let registered = keys::resource(ResourceKind::Node, node);
            tx.prefetch(endpoints.iter().map(NodeEndpoint::key).chain([registered]).collect(), Vec::new()).await?;
            self.require_gone(tx, node).await?;
            let mut deleted = Vec::new();
            for endpoint in endpoints.iter().filter(|endpoint| endpoint.node == node) {
                let key = endpoint.key();
                if tx.get(&key).await?.is_some() {
                    tx.delete(&key)?;
                    deleted.push(endpoint);
                }
            }
            Ok(deleted)
        })?;
        for NodeEndpoint { namespace, name, .. } in &deleted {
            tracing::info!(namespace, name, node, "deleted the workload endpoint of a node that is gone");
        }
        Ok(deleted)
    }

    /// Makes endpoints of the node `from` the node `to`'s, at most [`MOST_ENDPOINTS_MOVED`], in one commit, and returns each that
    /// was there with its new name. One that the other node has already under that name stays as it is, and so does the old one.
    ///
    /// # Errors
    /// Those of [`hand_over`](Self::hand_over); damaged endpoints.
    pub async fn hand_over_endpoints<'e>(
        &self,
        from: &str,
        to: &str,
        endpoints: &'e [NodeEndpoint],
        deadline: Deadline,
    ) -> Result<Vec<(&'e NodeEndpoint, String)>> {
        transact!(self, deadline, |tx| {
            let nodes = [from, to].map(|node| keys::resource(ResourceKind::Node, node));
            tx.prefetch(endpoints.iter().map(NodeEndpoint::key).chain(nodes).collect(), Vec::new()).await?;
            self.require_gone(tx, from).await?;
            self.require_known(tx, to).await?;
            let mut moved = Vec::new();
            for endpoint in endpoints.iter().filter(|endpoint| endpoint.node == from) {
                let key = endpoint.key();
                let Some(value) = tx.get(&key).await? else { continue };
                let Some(new) = WorkloadEndpoint::decode(&key, value.as_bytes())?.on_node(to) else { continue };
                if tx.get(&new.key()).await?.is_none() {
                    tx.put(&new.key(), new.encode()?)?;
                    tx.delete(&key)?;
                    moved.push((endpoint, new.name().to_owned()));
                }
            }
            Ok(moved)
        })
    }
}
