//! Checks workload endpoints: compares their addresses with the blocks, and their nodes with the registered nodes.
//!
//! Only endpoints that a CNI plugin wrote (orchestrators `cni` and `k8s`) are checked, because other orchestrators such
//! as OpenStack may assign addresses without Calico's blocks. An inspection reads the endpoints before the blocks, so
//! that it need not keep the entries of all blocks in memory.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipam_core::Result;
use ipam_core::attachment::{NAMESPACE, NODE, OWN_NODE, POD, TIMESTAMP};
use ipam_core::gc::TYPE;
use ipam_core::model::{
    Attribute, Document, Orchestrator, Owner, WorkloadEndpoint, handle_id, keys, split_endpoint_name,
};
use ipam_core::timestamps::parse_go_string;
use ipam_core::vm::is_vms;
use ipnet::IpNet;
use kv::{Kv, Transaction};
use time::{Duration, OffsetDateTime};

use super::cluster_documents::ClusterDocuments;
use super::finding::{Code, Finding, Inspection, Subject};
use super::mend::{RepairResult, is_newer};
use crate::Operator;

/// Minimum age of an address that is reported because its container has no endpoint. An address assigned less than this
/// time ago may belong to an unfinished ADD: the CNI plugin stores the endpoint after it assigns the address.
const MIN_ENDPOINT_AGE: Duration = Duration::MINUTE;

/// Facts about the workload endpoints of a store.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    notes: Vec<EndpointNote>,
    /// Map from (address, index of the endpoint in `notes`) to the state of that address according to the blocks.
    standings: BTreeMap<(IpAddr, usize), EndpointStanding>,
    /// The ids of the containers that have an endpoint.
    containers: HashSet<String>,
    /// The pods whose endpoints have no container id, as `NAMESPACE/NAME`.
    pods: HashSet<String>,
    /// Findings about containers without an endpoint, each with the name of the container's network if the block
    /// records it.
    lacking: Vec<(Finding, Option<String>)>,
    /// Names of the CNI networks that are known not to be Calico's.
    bridged: HashSet<String>,
}

/// An endpoint with a container id.
#[derive(Debug)]
struct EndpointNote {
    namespace: String,
    name: String,
    container: String,
    pod: String,
}

/// The state of an endpoint's address, according to the blocks. If several blocks contain the address, the greatest of
/// their states is used; a variant is greater than the variants above it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EndpointStanding {
    /// The address is not assigned in any block.
    Free,
    /// The holder of the address released it, and the address is in cooldown.
    InCooldown,
    /// The handle of a different container, which holds the endpoint's address.
    Other(String),
    /// The endpoint's own container holds the address. An address with an unknown holder counts as held by the
    /// endpoint's own container.
    Own,
}

impl Endpoints {
    /// Adds an endpoint. Returns false if the key does not start with the common prefix of all endpoint keys. The
    /// caller must have added all nodes to the cluster documents `around`.
    pub(super) fn add(&mut self, kv: &Kv, around: &ClusterDocuments, done: &mut Inspection) -> bool {
        let Some((namespace, name)) = keys::parse_workload_endpoint(&kv.key) else {
            return kv.key.as_bytes().starts_with(keys::workload_endpoints_prefix().as_bytes());
        };
        done.counts.endpoints += 1;
        match WorkloadEndpoint::decode(&kv.key, kv.value.as_bytes()) {
            Ok(endpoint) => done.findings.extend(self.inspect(&endpoint, around)),
            Err(error) => {
                self.note_name(namespace, name);
                let subject = Subject::Endpoint(namespace.to_owned(), name.to_owned());
                done.findings.push(Finding::new(Code::UnreadableEndpoint, subject, error.reason()));
            }
        }
        true
    }

    /// Records the container id or the pod name that is part of an unreadable endpoint's name.
    fn note_name(&mut self, namespace: &str, name: &str) {
        match split_endpoint_name(name) {
            Some([_, kind, id, _]) if kind == Orchestrator::Cni.as_str() => drop(self.containers.insert(id)),
            Some([_, kind, id, _]) if kind == Orchestrator::K8s.as_str() => {
                self.pods.insert(format!("{namespace}/{id}"));
            }
            _ => {}
        }
    }

    fn inspect(&mut self, endpoint: &WorkloadEndpoint, around: &ClusterDocuments) -> Option<Finding> {
        if !is_of_plugin(endpoint) {
            return None;
        }
        let (namespace, name) = (endpoint.namespace(), endpoint.name());
        let (container, pod) = (endpoint.container(), endpoint.pod());
        if !container.is_empty() {
            self.containers.insert(container.to_owned());
        } else if !pod.is_empty() {
            self.pods.insert(format!("{namespace}/{pod}"));
        }
        let nodes = nodes_of(endpoint);
        if !nodes.is_empty() && nodes.iter().all(|node| around.is_gone(node)) {
            let what = format!("node {} is not registered", nodes.join(", "));
            let subject = Subject::Endpoint(namespace.to_owned(), name.to_owned());
            return Some(Finding::new(Code::EndpointOfGoneNode, subject, what).mendable(true));
        }
        if !container.is_empty() {
            let note = self.notes.len();
            self.standings.extend(endpoint.addresses().into_iter().map(|ip| ((ip, note), EndpointStanding::Free)));
            let [namespace, name, container, pod] = [namespace, name, container, pod].map(str::to_owned);
            self.notes.push(EndpointNote { namespace, name, container, pod });
        }
        None
    }

    /// Compares a block's entry for an address or prefix with every endpoint that lists an address from that entry.
    pub(super) fn see(&mut self, unit: IpNet, entry: &Attribute) {
        let inside = (unit.network(), 0)..=(unit.broadcast(), usize::MAX);
        for ((_, note), standing) in self.standings.range_mut(inside) {
            if let Some(note) = self.notes.get(*note) {
                let seen = note.standing(entry);
                if seen > *standing {
                    *standing = seen;
                }
            }
        }
    }

    /// Reports an address of a Calico network if the container that holds it has no workload endpoint. Addresses held
    /// for a departed node are not reported as lacking an endpoint. If the store has no workload endpoints at all, the
    /// CNI plugin keeps them in Kubernetes, so no address is reported as lacking an endpoint.
    pub(super) fn find_lack(&mut self, ip: IpAddr, entry: &Attribute, now: OffsetDateTime) {
        if self.containers.is_empty() && self.pods.is_empty() {
            return;
        }
        let network = entry.network();
        if let Some(network) =
            network.filter(|network| entry.get(OWN_NODE).is_some() && !self.bridged.contains(*network))
        {
            self.bridged.insert(network.to_owned());
        }
        let (Some(node), Some(handle)) = (entry.get(NODE), entry.handle()) else { return };
        let pod = entry.get(NAMESPACE).zip(entry.get(POD)).map(|(namespace, pod)| format!("{namespace}/{pod}"));
        let is_workloads = entry.get(TYPE).is_none() && !is_vms(entry) && (network.is_some() || pod.is_some());
        let given = entry.get(TIMESTAMP).and_then(parse_go_string);
        if !is_workloads || given.is_none_or(|given| now - given < MIN_ENDPOINT_AGE) {
            return;
        }
        let container = match network {
            Some(network) => handle.strip_prefix(&handle_id(network, "")),
            // Container ids contain no dot, so the text after the handle's last dot is the id.
            None => handle.rsplit_once('.').map(|(_, container)| container),
        };
        let Some(container) = container else { return };
        if self.containers.contains(container) || pod.as_ref().is_some_and(|pod| self.pods.contains(pod)) {
            return;
        }
        let of_pod = pod.map(|pod| format!(", for pod {pod}")).unwrap_or_default();
        let what = format!("handle {handle} on node {node}{of_pod}");
        self.lacking.push((Finding::new(Code::NoEndpoint, Subject::Address(ip), what), network.map(str::to_owned)));
    }

    /// Reports the findings about endpoints, after the caller has passed the entries of all blocks to [`Self::see`].
    pub(super) fn finish(self, around: &ClusterDocuments, findings: &mut Vec<Finding>) {
        let Self { notes, standings, lacking, bridged, .. } = self;
        for ((ip, note), standing) in standings {
            let is_given_out_here = || around.pools.iter().any(|pool| pool.cidr().contains(&ip));
            let what = match standing {
                EndpointStanding::Free if is_given_out_here() => format!("{ip} is free"),
                EndpointStanding::InCooldown if is_given_out_here() => {
                    format!("{ip} is free: it is in cooldown since it was released")
                }
                EndpointStanding::Other(handle) => format!("{ip} is held under handle {handle}"),
                EndpointStanding::Free | EndpointStanding::InCooldown | EndpointStanding::Own => continue,
            };
            if let Some(EndpointNote { namespace, name, .. }) = notes.get(note) {
                let subject = Subject::Endpoint(namespace.clone(), name.clone());
                findings.push(Finding::new(Code::EndpointAddress, subject, what));
            }
        }
        let is_bridged = |network: &Option<String>| network.as_ref().is_some_and(|network| bridged.contains(network));
        findings.extend(lacking.into_iter().filter(|(_, network)| !is_bridged(network)).map(|(finding, _)| finding));
    }
}

impl EndpointNote {
    /// Returns the state of an address that the endpoint lists, from the address's entry in a block.
    fn standing(&self, entry: &Attribute) -> EndpointStanding {
        if entry.released_at().is_some() {
            return EndpointStanding::InCooldown;
        }
        // An address without a handle has no known holder, and an address of a virtual machine moves from pod to pod.
        let Some(handle) = entry.handle().filter(|_| !is_vms(entry)) else { return EndpointStanding::Own };
        let network = handle.strip_suffix(&self.container).and_then(|rest| rest.strip_suffix('.'));
        let is_own = network.is_some_and(|network| !network.is_empty()) || handle == self.old_handle();
        if is_own { EndpointStanding::Own } else { EndpointStanding::Other(handle.to_owned()) }
    }

    /// The handle under which older versions of Calico held the addresses of the endpoint's container.
    fn old_handle(&self) -> String {
        if self.pod.is_empty() { self.container.clone() } else { format!("{}.{}", self.namespace, self.pod) }
    }
}

/// True if a CNI plugin has stored the endpoint.
fn is_of_plugin(endpoint: &WorkloadEndpoint) -> bool {
    [Orchestrator::Cni, Orchestrator::K8s].iter().any(|known| known.as_str() == endpoint.orchestrator())
}

/// The node in the endpoint's name and the node in the endpoint's document, which may be two different nodes.
fn nodes_of(endpoint: &WorkloadEndpoint) -> Vec<String> {
    let mut nodes: Vec<String> = split_endpoint_name(endpoint.name()).into_iter().map(|[node, ..]| node).collect();
    if !endpoint.node().is_empty() && !nodes.iter().any(|node| node == endpoint.node()) {
        nodes.push(endpoint.node().to_owned());
    }
    nodes
}

impl Operator {
    /// Deletes an endpoint of a node that is gone, unless it was written after `at`; the commit guards the Node
    /// document's absence.
    pub(super) async fn mend_endpoint(
        &self,
        tx: &mut Transaction,
        (namespace, name): (&str, &str),
        at: kv::Revision,
    ) -> Result<RepairResult> {
        let key = keys::workload_endpoint(namespace, name);
        let Some(value) = tx.get(&key).await? else { return Ok(RepairResult::Changed) };
        if is_newer(tx, &key, at) {
            return Ok(RepairResult::Changed);
        }
        let endpoint = WorkloadEndpoint::decode(&key, value.as_bytes())?;
        for node in nodes_of(&endpoint) {
            if !self.is_gone(tx, Some(Owner::Host(node))).await? {
                return Ok(RepairResult::Changed);
            }
        }
        tx.delete(&key)?;
        Ok(RepairResult::Done)
    }
}
