//! ADD of a plain container: no orchestrator names a pod for it.

use std::collections::BTreeMap;

use agent::{CniError, Result};
use ipam_core::model::{EndpointFacts, Labels, Orchestrator, WorkloadEndpoint, check_endpoint};
use kv::Revision;

use super::interfaces;
use super::ongoing::Add;
use crate::env::Verb;
use crate::result::AddResult;

/// ADD of a plain container.
///
/// # Errors
/// Calico's texts. Nothing that this call made is left then.
pub(super) fn add(add: &mut Add<'_, '_>) -> Result<String> {
    if add.setup.conf.feature_ip_addrs_no_ipam {
        let text = "requested feature is not supported for this runtime: ip_addrs_no_ipam";
        return Err(CniError::internal(text));
    }
    add.setup.dataplane()?;
    let network = &add.setup.conf.net.name;
    let Some((mut found, revision)) = add.found.clone() else { return wire(add, vec![network.clone()]) };
    found.add_profile(network);
    let has_lost_it = found.endpoint() == add.setup.call.interface && !add.has_interface(found.endpoint())?;
    if has_lost_it { wire(add, found.profiles()) } else { join(add, &found, revision) }
}

/// The container has an endpoint and its interface: this stores the endpoint with another network's profile, and nothing else.
fn join(add: &mut Add<'_, '_>, endpoint: &WorkloadEndpoint, revision: Revision) -> Result<String> {
    let assigned = AddResult::of_addresses(&endpoint.addresses());
    add.store_document(endpoint, Some(revision))?;
    add.answer(assigned, endpoint.interface(), endpoint.mac())
}

/// The facts of a container's endpoint before it has addresses.
fn facts(add: &Add<'_, '_>, interface: String, profiles: Vec<String>) -> EndpointFacts {
    let setup = add.setup;
    EndpointFacts {
        node: setup.workload.node.clone(),
        orchestrator: Orchestrator::Cni,
        container: setup.call.container.clone(),
        pod: String::new(),
        endpoint: setup.call.interface.clone(),
        service_account: String::new(),
        generate_name: String::new(),
        labels: endpoint_labels(setup.labels.clone()),
        addresses: Vec::new(),
        nats: Vec::new(),
        profiles,
        interface,
        mac: String::new(),
        ports: Vec::new(),
        allowed_sources: Vec::new(),
    }
}

/// Wires the container, whose endpoint gets these profiles. If it has an endpoint, it lost its interface together with
/// its network namespace. IPAM then decides anew which addresses it has, since somebody may have released the old ones.
fn wire(add: &mut Add<'_, '_>, profiles: Vec<String>) -> Result<String> {
    let setup = add.setup;
    let name = setup.workload.endpoint(&setup.call.interface)?;
    let mut facts = facts(add, add.host_interface(), profiles);
    // Calico checks the names after all the work.
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    add.make_way(&plugin);
    if add.found.is_some() && plugin.is_other() {
        // Not every IPAM plugin takes a second ADD of the same attachment.
        add.release_all(&plugin);
    }
    let mut assigned = plugin.call(&setup.ipam_call(Verb::Add), &*add.allocator())?;
    if assigned.ips.is_empty() {
        add.release_all(&plugin);
        return Err(CniError::internal("IPAM plugin returned no IP addresses in result"));
    }
    facts.addresses = assigned.addresses();
    let mut plan = setup.plan(facts.interface.clone(), &facts.addresses);
    plan.prefixes.clone_from(&assigned.prefixes);
    let made = interfaces::make(add, plan, &assigned, &BTreeMap::new(), &name, &mut facts);
    let stored = made.and_then(|()| add.store(&name, &facts).inspect_err(|_| interfaces::unmake(add)));
    stored.inspect_err(|_| add.release(&plugin, &assigned))?;
    if add.found.is_some() {
        // A repeated ADD answers with the addresses alone, as Calico's.
        let prefixes = assigned.prefixes;
        assigned = AddResult { prefixes, ..AddResult::of_addresses(&facts.addresses) };
    }
    add.answer(assigned, &facts.interface, &facts.mac)
}

/// The labels of an endpoint without the one that names its namespace, which Calico sets by itself.
fn endpoint_labels(mut labels: Labels) -> Labels {
    labels.remove("projectcalico.org.namespace");
    labels
}
