//! Assigns a prefix to a node as a whole, for example a /80 from which another program on the node assigns addresses.

use std::collections::BTreeMap;

use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::attachment::OWN_NODE;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Owner, PoolUse, node_prefix_handle};
use ipam_core::net::Family;
use ipam_core::{Error, ErrorSubject, Nodes, Result};
use ipnet::IpNet;
use kv::{Deadline, StoreExt};

use crate::Operator;

/// A prefix that is assigned to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePrefix {
    /// The prefix that is assigned to the node.
    pub prefix: IpNet,
    /// The handle under which the prefix is held.
    pub handle: String,
    /// False if the node already had the prefix before the call.
    pub is_new: bool,
}

impl Operator {
    /// Assigns a prefix of a pool to a node. If the node already has a prefix of this pool, the function returns that
    /// prefix. The node keeps the prefix until the prefix's handle is released.
    ///
    /// The assignment has the guards of [`ipam_core::Ipam::assign_to_handle`], which this function calls.
    ///
    /// # Errors
    /// `NotFound` if the pool does not exist. `UnknownNode` if the store has registered nodes, but not this node.
    /// `Invalid` for a pool of single addresses. Any error of [`ipam_core::Ipam::assign_to_handle`].
    pub async fn assign_node_prefix(&self, pool: &str, node: &str, deadline: Deadline) -> Result<NodePrefix> {
        let pools = self.ipam().inventory(deadline).await?.pools;
        let found = pools.iter().find(|one| one.name() == pool);
        let found = found.ok_or_else(|| ErrorSubject::Pool.not_found(pool))?;
        if found.prefix_length().is_none() {
            return Err(Error::Invalid(format!(
                "pool {pool} has addresses and no prefixes; see which pools have some with: margay pool list"
            )));
        }
        let is_known = self.ipam().nodes() == Nodes::FirstSeen
            || self.ipam().store().get(keys::resource(ResourceKind::Node, node)).await?.is_some();
        if !is_known {
            return Err(Error::UnknownNode(node.to_owned()));
        }
        let handle = node_prefix_handle(pool, node);
        let wanted = match found.family() {
            Family::V4 => RequestedAddresses::any(1, 0),
            Family::V6 => RequestedAddresses::any(0, 1),
        };
        // The block gets a secondary owner, so that Calico's routing does not treat the block as a block of the node's
        // pods.
        let request = HandleRequest::new(handle.as_str(), Owner::secondary(node), wanted)
            .with_pools(found.family(), [pool])
            .with_most_per_family(1)
            .with_usage(PoolUse::Workload)
            .with_attributes(BTreeMap::from([(OWN_NODE.to_owned(), node.to_owned())]));
        let (held, is_new) = match self.ipam().assign_to_handle(&request, deadline).await {
            Ok(assigned) => (assigned.into_iter().map(|one| one.ip).collect(), true),
            Err(Error::HandleLimit { .. }) => (self.ipam().addresses_of_handle(&handle, deadline).await?, false),
            Err(error) => return Err(error),
        };
        let prefix = held.into_iter().find(|ip| found.cidr().contains(ip)).map(|ip| found.unit_of(ip));
        let prefix = prefix.ok_or_else(|| ErrorSubject::Handle.not_found(&handle))?;
        Ok(NodePrefix { prefix, handle, is_new })
    }
}
