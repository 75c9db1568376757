//! GC: what the runtime does not know any more goes: endpoint, interface and address.
//!
//! An endpoint does not name its network. It is a network's if one of its profiles has the network's name, or if its container
//! holds one of its addresses in this network. Endpoints that are younger than a minute stay: the runtime's list may be older.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipam_core::endpoints::{EndpointOf, EndpointOwner, EndpointQuery, Pools};
use ipam_core::model::WorkloadEndpoint;
use ipam_core::timestamps::{age, parse_rfc3339};
use time::Duration;

use super::check::finish;
use super::ipam::IpamPlugin;
use super::setup::Setup;
use super::status::UNKNOWN_VERB;
use crate::allocator::failure::explain;
use crate::error::Result;
use crate::gc::valid_attachments;
use crate::run::Rules;
use crate::served::Served;
use crate::session::{Purpose, Session};

/// A younger endpoint stays.
const YOUNG: Duration = Duration::MINUTE;

/// GC. Each part is tried whatever becomes of the others, and the first error is the answer.
///
/// # Errors
/// No list of attachments; those of the store and of the IPAM plugin.
pub(super) fn gc(setup: &Setup<'_>) -> Result<String> {
    let valid = valid_attachments(&setup.json)?;
    let session = Arc::new(Session::open(&setup.store, Purpose::Release)?);
    let query = EndpointQuery { namespace: String::new(), prefix: None, profile: None, pools: Pools::Skipped };
    let (pending, _) = setup.begin(&session, query)?;
    drop(pending);
    let endpoints = remove_endpoints(setup, &session, &valid);
    finish(session);
    endpoints.and(collect_addresses(setup))?;
    Ok(String::new())
}

fn collect_addresses(setup: &Setup<'_>) -> Result<()> {
    let plugin = setup.ipam_plugin()?;
    match plugin.call(&setup.ipam_call("GC"), &Served::default()) {
        Err(error) if matches!(plugin, IpamPlugin::Other(_)) && UNKNOWN_VERB.contains(&error.code().number()) => {
            tracing::info!(%error, "the IPAM plugin knows no GC, so its addresses stay");
            Ok(())
        }
        done => done.map(drop),
    }
}

fn remove_endpoints(setup: &Setup<'_>, session: &Session, valid: &BTreeSet<(String, String)>) -> Result<()> {
    let failed = |error| explain(error, Rules::Calico).into();
    let (ipam, deadline, node) = (session.ipam(), session.deadline(), setup.workload.node.as_str());
    let endpoints = session.run(ipam.endpoints_of_node(node, deadline)).map_err(failed)?;
    let holdings = session.run(ipam.holdings_within(node, &ipam.reach_of(node), deadline)).map_err(failed)?.0;
    let held: BTreeMap<IpAddr, (&str, &str)> = holdings
        .allocations
        .iter()
        .map(|allocation| (allocation.address, (allocation.network.as_str(), allocation.container.as_str())))
        .collect();
    let interfaces: BTreeSet<&str> =
        endpoints.iter().filter(|endpoint| is_valid(endpoint, valid)).map(WorkloadEndpoint::interface).collect();
    let mut first_error = Ok(());
    for endpoint in endpoints.iter().filter(|endpoint| is_stale(setup, endpoint, valid, &held)) {
        let of = EndpointOf {
            namespace: endpoint.namespace().to_owned(),
            name: endpoint.name().to_owned(),
            owner: EndpointOwner::Container(endpoint.container().to_owned()),
        };
        let deleted = session.run(ipam.delete_endpoint(&of, deadline)).map_err(failed);
        let interface = endpoint.interface();
        let removed = match interface.is_empty() || interfaces.contains(interface) {
            true => Ok(()),
            false => wiring::remove_host_interface(interface).map_err(Into::into),
        };
        tracing::info!(endpoint = endpoint.name(), interface, "the runtime does not know the container any more");
        first_error = first_error.and(deleted.map(drop)).and(removed);
    }
    first_error
}

fn is_valid(endpoint: &WorkloadEndpoint, valid: &BTreeSet<(String, String)>) -> bool {
    // A second interface of a container has no endpoint of its own.
    valid.iter().any(|(container, _)| container == endpoint.container())
}

fn is_stale(
    setup: &Setup<'_>,
    endpoint: &WorkloadEndpoint,
    valid: &BTreeSet<(String, String)>,
    held: &BTreeMap<IpAddr, (&str, &str)>,
) -> bool {
    let network = &setup.conf.net.name;
    let holder = (network.as_str(), endpoint.container());
    let profiles = endpoint.profiles();
    let is_ours = profiles.iter().any(|profile| profile == network)
        || endpoint.addresses().iter().any(|address| held.get(address) == Some(&holder));
    // The container joined other networks, too, and one of them may know it.
    let is_shared = profiles.len() > 1 && profiles.iter().any(|profile| profile == network);
    let created = parse_rfc3339(endpoint.created());
    let is_old = created.is_some_and(|created| age(setup.invocation.host.now, created) >= YOUNG);
    is_ours && !is_shared && is_old && !endpoint.container().is_empty() && !is_valid(endpoint, valid)
}
