//! Carries out the ADD of a Kubernetes pod.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use agent::{CniError, Result};
use ipam_core::model::{EndpointFacts, EndpointPort, Labels, Orchestrator, ReleaseRequest, check_endpoint, handle_id};
use ipnet::IpNet;
use kv::Deadline;

use super::add::{self, AddOperation};
use super::ipam::{IpamCall, IpamPlugin};
use super::setup::{MainContext, Workload};
use crate::dataplane_grpc::Dataplane;
use crate::env::CniVerb;
use crate::kubernetes::{AllowedAnnotations, HostLocal, KubePort, PodFacts};
use crate::policy_wait::PolicyWait;
use crate::result::AddResult;

/// The facts about a pod that an ADD has read before it changes anything.
struct PodRequest {
    facts: PodFacts,
    routes: Vec<IpNet>,
    /// The configuration that the IPAM plugin gets; `None` if it equals the main plugin's configuration.
    changed: Option<Vec<u8>>,
}

/// Carries out the ADD of a pod, always with new addresses and new interfaces, even if a WorkloadEndpoint of the pod is
/// stored.
///
/// # Errors
/// If the ADD fails, undoes all its changes and returns an error with Calico's message.
pub(super) fn add(add: &mut AddOperation<'_, '_>) -> Result<String> {
    let setup = add.setup;
    setup.dataplane()?;
    let policy = PolicyWait::new(setup.conf.policy_timeout, &setup.conf.status_folder)?;
    let wanted = read(add)?;
    let interface = add.found.as_ref().map_or(setup.call.interface.as_str(), |(found, _)| found.endpoint());
    let name = setup.workload.endpoint(interface)?;
    let mut facts = endpoint_facts(setup, &wanted.facts, interface, add.host_interface());
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    let assigned = assign(add, &plugin, &wanted)?;
    let wired = wire(add, &mut facts, &wanted, &assigned, &name);
    wired.inspect_err(|_| add.release(&plugin, &assigned))?;
    if let Some(policy) = policy {
        add.pause();
        let Workload { namespace, id, .. } = &setup.workload;
        add.run(async |_| {
            policy.wait(namespace, id, &facts.endpoint, Duration::MAX).await;
            Ok(())
        })?;
    }
    add.answer(assigned, &facts.interface, &facts.mac)
}

/// Creates the pod's interfaces and stores its WorkloadEndpoint.
fn wire(
    add: &mut AddOperation<'_, '_>,
    facts: &mut EndpointFacts,
    wanted: &PodRequest,
    assigned: &AddResult,
    name: &str,
) -> Result<()> {
    facts.addresses = assigned.addresses();
    facts.nats = nats(&wanted.facts, &facts.addresses)?;
    check_endpoint(name, facts).map_err(CniError::internal)?;
    let mut plan = add.setup.plan(facts.interface.clone(), &facts.addresses);
    plan.routes.clone_from(&wanted.routes);
    plan.prefixes.clone_from(&assigned.prefixes);
    plan.mac = wanted.facts.mac.as_ref().map(|mac| mac.bytes.clone());
    add::make_interfaces(add, plan, assigned, &wanted.facts.annotations, name, facts)?;
    if let (Some(mac), Ok(Dataplane::Linux)) = (&wanted.facts.mac, add.setup.dataplane()) {
        // As in Calico, the WorkloadEndpoint records the whole hardware address, although the interface has only its
        // first six bytes.
        facts.mac.clone_from(&mac.text);
    }
    add.store(name, facts).inspect_err(|_| add::remove_interfaces(add))
}

/// Reads the pod and its namespace from the Kubernetes API. If the configuration has placeholders for pod ranges, this
/// function also reads the node.
fn read(add: &mut AddOperation<'_, '_>) -> Result<PodRequest> {
    let (setup, conf) = (add.setup, &add.setup.conf);
    let mut client = setup.kubernetes.client();
    // Calico's plugin requires the Kubernetes API for every pod. On a machine with its own store, there may be no
    // Kubernetes API, and the network may not need the API.
    if !setup.is_alone() {
        client = Ok(client?);
    }
    // Let other processes open the store during the requests to the Kubernetes API.
    add.pause();
    let until = Instant::now() + setup.store.patience;
    let left = |deadline: Deadline| deadline.remaining().min(until.saturating_duration_since(Instant::now()));
    let routes = setup.routes()?;
    let mut changed = None;
    if conf.ipam_type == "host-local" {
        let mut host_local = HostLocal::new(&setup.json)?;
        if host_local.wants_pod_cidrs() {
            let node = if conf.kubernetes_node.is_empty() { &setup.workload.node } else { &conf.kubernetes_node };
            let client = client.as_mut().map_err(|error| error.clone())?;
            let cidrs = add.run(async |deadline| client.node_pod_cidrs(node, left(deadline)).await)?;
            host_local = host_local.with_pod_cidrs(node, &cidrs)?;
        }
        changed = Some(host_local.conf().to_string().into_bytes());
    }
    let facts = if conf.net.policy.kind == "k8s" {
        let Workload { namespace, id, .. } = &setup.workload;
        let client = client.as_mut().map_err(|error| error.clone())?;
        let namespace_of_pod = add.run(async |deadline| client.namespace(namespace, left(deadline)).await)?;
        let pod = add.run(async |deadline| client.pod(namespace, id, left(deadline)).await)?;
        let allowed = AllowedAnnotations {
            ipam: &conf.ipam_type,
            ip_addrs_no_ipam: conf.feature_ip_addrs_no_ipam,
            floating_ips: conf.feature_floating_ips,
        };
        PodFacts::new(&namespace_of_pod, pod, &allowed)?
    } else {
        PodFacts::of_network(&conf.net.name)
    };
    if let Some(conf) = facts.ipam_conf(&setup.json)? {
        changed = Some(conf.to_string().into_bytes());
    }
    Ok(PodRequest { facts, routes, changed })
}

fn endpoint_facts(setup: &MainContext<'_>, pod: &PodFacts, endpoint: &str, interface: String) -> EndpointFacts {
    EndpointFacts {
        node: setup.workload.node.clone(),
        orchestrator: Orchestrator::K8s,
        container: setup.call.container.clone(),
        pod: setup.workload.id.clone(),
        endpoint: endpoint.to_owned(),
        service_account: pod.service_account.clone(),
        generate_name: pod.generate_name.clone(),
        labels: pod.labels.clone().into_iter().collect::<Labels>(),
        addresses: Vec::new(),
        nats: Vec::new(),
        profiles: pod.profiles.clone(),
        interface,
        mac: String::new(),
        ports: pod.ports.iter().map(endpoint_port).collect(),
        allowed_sources: pod.allowed_source_prefixes.clone(),
    }
}

fn endpoint_port(port: &KubePort) -> EndpointPort {
    EndpointPort {
        name: port.name.clone(),
        protocol: port.protocol.to_owned(),
        port: port.port,
        host_port: port.host_port,
        host_ip: port.host_ip.clone(),
    }
}

fn nats(pod: &PodFacts, addresses: &[IpAddr]) -> Result<Vec<(IpAddr, IpAddr)>> {
    let parse = |(internal, external): (IpAddr, String)| {
        let wrong = |_| CniError::internal(format!("the floating IP {external} is no address"));
        external.parse().map(|external| (internal, external)).map_err(wrong)
    };
    pod.nats(addresses)?.into_iter().map(parse).collect()
}

/// Returns the pod's addresses, which are chosen by IPAM, requested from IPAM by an annotation, or set by an annotation
/// without IPAM.
fn assign(add: &mut AddOperation<'_, '_>, plugin: &IpamPlugin, wanted: &PodRequest) -> Result<AddResult> {
    if let Some(addresses) = &wanted.facts.ip_addrs_no_ipam {
        return Ok(AddResult::of_addresses(addresses));
    }
    if let Some(addresses) = &wanted.facts.ip_addrs {
        release_found(add)?;
        add.release_store(plugin);
        return assign_these(add, plugin, addresses);
    }
    add.release_store(plugin);
    let setup = add.setup;
    let call = IpamCall { changed: wanted.changed.as_deref(), ..setup.ipam_call(CniVerb::Add) };
    let assigned = add.assign(plugin, &call)?;
    if assigned.ips.is_empty() {
        return Err(CniError::internal("IPAM plugin returned missing IP config"));
    }
    Ok(assigned)
}

/// Releases the addresses in the pod's stored WorkloadEndpoint, if the sandbox that the WorkloadEndpoint names still
/// holds these addresses. An earlier sandbox of the pod may hold the addresses that the annotation requests.
fn release_found(add: &mut AddOperation<'_, '_>) -> Result<()> {
    let Some((found, _)) = add.found.clone() else { return Ok(()) };
    let handle = handle_id(&add.setup.conf.net.name, found.container());
    for address in found.addresses() {
        add.release_address(&ReleaseRequest::new(address).with_handle(&handle))?;
    }
    Ok(())
}

/// Assigns the addresses that an annotation requests, one after another. If a requested address cannot be assigned, the
/// requested addresses that were already assigned are released.
fn assign_these(add: &mut AddOperation<'_, '_>, plugin: &IpamPlugin, addresses: &[IpAddr]) -> Result<AddResult> {
    let mut all = AddResult::default();
    for address in addresses {
        let args = format!("{};IP={address}", add.setup.args);
        let call = IpamCall { args: &args, ..add.setup.ipam_call(CniVerb::Add) };
        let assigned = add.assign(plugin, &call).and_then(|assigned| match assigned.ips.is_empty() {
            true => Err(CniError::internal("IPAM plugin returned missing IP config")),
            false => Ok(assigned),
        });
        match assigned {
            Ok(assigned) => {
                all.ips.extend(assigned.ips);
                all.prefixes.extend(assigned.prefixes);
            }
            Err(error) => {
                add.release(plugin, &all);
                let message = format!("error getting IP from IPAM: {}", error.message());
                return Err(CniError::new(error.code(), message).with_details(error.details()));
            }
        }
    }
    Ok(all)
}
