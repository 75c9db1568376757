//! CHECK compares interface, addresses, routes, sysctls, endpoint and allocation of a container with the work of its ADD.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use agent::{Allocator, CniError, Code, Result, Served, Session};
use ipam_core::endpoints::{EndpointQuery, Pools};
use ipam_core::model::{Orchestrator, WorkloadEndpoint};
use kv::Purpose;

use super::ipam::IpamPlugin;
use super::setup::Setup;
use super::{WIRING, told};
use crate::dataplane_grpc::Dataplane;
use crate::env::Verb;
use crate::kubernetes::Mac;
use crate::prev_result;

/// CHECK. Calico's plugin prints `OK` at once; ours prints it after a comparison.
///
/// # Errors
/// Each difference, in the details; those of the store and of the IPAM plugin.
pub(super) fn check(setup: &Setup<'_>) -> Result<String> {
    let addresses = prev_result::addresses(setup.conf.net.prev_result.as_ref())?;
    let mut wrong = Vec::new();
    let (endpoint, allocation) = read(setup)?;
    match &endpoint {
        None => wrong.push(format!("no endpoint is stored for {}", setup.workload.prefix()?)),
        Some(endpoint) => compare(setup, endpoint, &addresses, &mut wrong),
    }
    if let Err(error) = allocation {
        // A store that does not answer says nothing of the container.
        if error.code() == Code::TryAgain {
            return Err(error);
        }
        // Of addresses that no IPAM plugin assigned to a pod, none knows anything.
        if !(setup.conf.feature_ip_addrs_no_ipam && setup.workload.orchestrator == Orchestrator::K8s) {
            wrong.push(format!("IPAM: {}", error.message()));
        }
    }
    if let Some(endpoint) = &endpoint
        && let Dataplane::Linux = setup.dataplane()?
    {
        let mut plan = setup.plan(endpoint.interface().to_owned(), &endpoint.addresses());
        endpoint.endpoint().clone_into(&mut plan.interface);
        plan.routes = setup.routes()?;
        plan.prefixes = prev_result::prefixes(setup.conf.net.prev_result.as_ref());
        plan.mac = Mac::read(endpoint.mac()).ok().map(|mac| mac.bytes);
        wrong.extend(wiring::inspect(&setup.netns(), &plan, Instant::now() + WIRING).map_err(told)?);
    }
    if wrong.is_empty() {
        return Ok("OK\n".to_owned());
    }
    let call = &setup.call;
    let network = &setup.conf.net.name;
    let text = format!(
        "container {} has lost what it had on interface {} in network {network}",
        call.container, call.interface
    );
    wrong.push("start the container anew".to_owned());
    Err(CniError::internal(text).with_details(wrong.join("; ")))
}

/// The stored endpoint, and the IPAM plugin's answer about the allocation.
fn read(setup: &Setup<'_>) -> Result<(Option<WorkloadEndpoint>, Result<()>)> {
    let session = Arc::new(Session::open(&setup.store, Purpose::Any)?);
    let query = EndpointQuery {
        namespace: setup.workload.namespace.clone(),
        prefix: Some(setup.workload.prefix()?),
        profile: None,
        pools: Pools::Skipped,
    };
    let (pending, before) = setup.begin(&session, query)?;
    drop(pending);
    let endpoint = before.endpoints.into_iter().map(|(endpoint, _)| endpoint).find(|found| setup.workload.has(found));
    if endpoint.as_ref().is_some_and(|endpoint| has_joined(setup, endpoint)) {
        finish(session);
        return Ok((endpoint, Ok(())));
    }
    let plugin = setup.ipam_plugin()?;
    // Another program may need the store.
    let session = match plugin {
        IpamPlugin::Own(_) => Some(session),
        IpamPlugin::Other(_) => {
            finish(session);
            None
        }
    };
    let allocator =
        session.as_ref().map_or_else(|| Box::new(Served::default()) as Box<dyn Allocator>, Setup::allocator);
    let allocation = setup.call_later(&plugin, Verb::Check, &*allocator);
    drop(allocator);
    session.into_iter().for_each(finish);
    Ok((endpoint, allocation))
}

/// True if the container joined this network after another one, whose addresses it has: IPAM assigned nothing here.
fn has_joined(setup: &Setup<'_>, endpoint: &WorkloadEndpoint) -> bool {
    let (profiles, network) = (endpoint.profiles(), &setup.conf.net.name);
    setup.workload.orchestrator == Orchestrator::Cni
        && profiles.iter().position(|one| one == network).is_some_and(|at| at > 0)
}

pub(super) fn finish(session: Arc<Session>) {
    if let Ok(session) = Arc::try_unwrap(session) {
        session.close();
    }
}

/// Compares the endpoint with the call and with the result that the runtime has.
fn compare(setup: &Setup<'_>, endpoint: &WorkloadEndpoint, addresses: &[IpAddr], wrong: &mut Vec<String>) {
    let name = endpoint.name();
    if endpoint.container() != setup.call.container {
        wrong.push(format!("endpoint {name} belongs to container {:?}", endpoint.container()));
    }
    if endpoint.node() != setup.workload.node {
        wrong.push(format!("endpoint {name} is on node {:?}", endpoint.node()));
    }
    let network = &setup.conf.net.name;
    let has_profile = setup.workload.orchestrator == Orchestrator::Cni && setup.conf.net.policy.kind.is_empty();
    if has_profile && !endpoint.profiles().contains(network) {
        wrong.push(format!("endpoint {name} lacks the profile {network}"));
    }
    let stored = endpoint.addresses();
    for address in addresses.iter().filter(|address| !stored.contains(address)) {
        wrong.push(format!("endpoint {name} lacks the address {address}"));
    }
}
