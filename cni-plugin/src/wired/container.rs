//! ADD of a plain container: one that no orchestrator names a pod for.

use ipam_core::model::{EndpointFacts, Labels, Orchestrator, check_endpoint};

use std::collections::BTreeMap;

use super::add::Add;
use super::interfaces;
use super::ipam_result::IpamResult;
use crate::error::{CniError, Result};

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
    if add.found.is_some() { join(add) } else { wire(add) }
}

/// The container has an endpoint: another network's profile is added to it, and nothing else changes. A container whose
/// network namespace is another one than before is wired anew, with the same addresses.
fn join(add: &mut Add<'_, '_>) -> Result<String> {
    let Some((mut endpoint, revision)) = add.found.clone() else { return wire(add) };
    let assigned = IpamResult::of_addresses(&endpoint.addresses());
    let setup = add.setup;
    if endpoint.endpoint() == setup.call.interface && !add.has_interface(endpoint.endpoint())? {
        let plan = setup.plan(endpoint.interface().to_owned(), &endpoint.addresses());
        let mut facts = facts(add, endpoint.interface().to_owned());
        interfaces::make(add, &plan, &assigned, &BTreeMap::new(), endpoint.name(), &mut facts)?;
        endpoint.set_mac(&facts.mac);
    }
    endpoint.add_profile(&setup.conf.net.name);
    add.store_document(&endpoint, Some(revision))?;
    add.answer(&assigned, endpoint.interface(), endpoint.mac())
}

/// What the endpoint of a container records before it has addresses.
fn facts(add: &Add<'_, '_>, interface: String) -> EndpointFacts {
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
        profiles: vec![setup.conf.net.name.clone()],
        interface,
        mac: String::new(),
        ports: Vec::new(),
        allowed_sources: Vec::new(),
    }
}

fn wire(add: &mut Add<'_, '_>) -> Result<String> {
    let setup = add.setup;
    let name = setup.workload.endpoint(&setup.call.interface)?;
    let mut facts = facts(add, add.host_interface());
    // Calico looks at the names when all the work is done.
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    add.make_way(&plugin)?;
    let assigned = plugin.add(&setup.ipam_call("ADD"), &*add.allocator())?;
    if assigned.ips.is_empty() {
        add.release_all(&plugin);
        return Err(CniError::internal("IPAM plugin returned no IP addresses in result"));
    }
    facts.addresses = assigned.addresses();
    let undo = |add: &Add<'_, '_>, error: CniError| {
        add.release(&plugin, &assigned);
        error
    };
    let plan = setup.plan(facts.interface.clone(), &facts.addresses);
    let made = interfaces::make(add, &plan, &assigned, &BTreeMap::new(), &name, &mut facts);
    made.map_err(|error| undo(add, error))?;
    if let Err(error) = add.store(&name, &facts) {
        interfaces::unmake(add, &facts.interface);
        return Err(undo(add, error));
    }
    add.answer(&assigned, &facts.interface, &facts.mac)
}

/// The labels of an endpoint without the one that names its namespace, which Calico sets by itself.
fn endpoint_labels(mut labels: Labels) -> Labels {
    labels.remove("projectcalico.org.namespace");
    labels
}
