//! GC removes endpoint, interface and address of every attachment that the runtime does not list.
//!
//! An endpoint does not name its network. It is a network's if the network's name is its first profile, or if its
//! container holds one of its addresses in this network: the networks that a container joined later leave it alone. An
//! endpoint stays if it, or one of its addresses, is younger than a minute: the runtime's list may be older.

use std::collections::BTreeSet;

use agent::{Failure, Result, Rules, Served, Session, explain, is_no_store};
use ipam_core::endpoints::{EndpointOf, EndpointOwner};
use ipam_core::gc::Allocation;
use ipam_core::model::WorkloadEndpoint;
use ipam_core::timestamps::{age, parse_rfc3339};
use kv::Purpose;
use time::Duration;

use super::ipam::IpamPlugin;
use super::setup::Setup;
use super::status::UNKNOWN_VERB;
use super::told;
use crate::env::Verb;
use crate::gc::valid_attachments;

/// A younger endpoint stays.
const YOUNG: Duration = Duration::MINUTE;

/// GC. Each part is tried whatever becomes of the others, and the first error is the answer.
///
/// # Errors
/// No list of attachments; those of the store and of the IPAM plugin.
pub(super) fn gc(setup: &Setup<'_>) -> Result<String> {
    let valid = valid_attachments(&setup.json)?;
    let endpoints = match Session::open(&setup.store, Purpose::Release) {
        Ok(session) => {
            setup.check_ready(&session)?;
            let removed = remove_endpoints(setup, &session, &valid);
            session.close();
            removed
        }
        Err(Failure::Store(error)) if is_no_store(&error, &setup.store.location) => {
            tracing::warn!(%error, "there are no endpoints");
            Ok(())
        }
        Err(error) => Err(error.into()),
    };
    endpoints.and(collect_addresses(setup))?;
    Ok(String::new())
}

fn collect_addresses(setup: &Setup<'_>) -> Result<()> {
    let plugin = setup.ipam_plugin()?;
    match setup.call_later(&plugin, Verb::Gc, &Served::default()) {
        Err(error) if matches!(plugin, IpamPlugin::Other(_)) && UNKNOWN_VERB.contains(&error.code().number()) => {
            tracing::info!(%error, "the IPAM plugin knows no GC, so its addresses stay");
            Ok(())
        }
        done => done,
    }
}

fn remove_endpoints(setup: &Setup<'_>, session: &Session, valid: &BTreeSet<(String, String)>) -> Result<()> {
    let failed = |error| explain(error, Rules::Calico).into();
    let (ipam, deadline, node) = (session.ipam(), session.deadline(), setup.workload.node.as_str());
    // These numbers come before the endpoints: an interface of a later ADD has another one, and stays.
    let interfaces = wiring::host_interfaces().map_err(told)?;
    let endpoints = session.run(ipam.endpoints_of_node(node, deadline)).map_err(failed)?;
    let holdings = session.run(ipam.holdings_within(node, &ipam.reach_of(node), deadline)).map_err(failed)?.0;
    let in_use: BTreeSet<&str> =
        endpoints.iter().filter(|endpoint| is_valid(endpoint, valid)).map(WorkloadEndpoint::interface).collect();
    let mut first_error = Ok(());
    for endpoint in endpoints.iter().filter(|endpoint| is_stale(setup, endpoint, valid, &holdings.allocations)) {
        let of = EndpointOf {
            namespace: endpoint.namespace().to_owned(),
            name: endpoint.name().to_owned(),
            owner: EndpointOwner::Container(endpoint.container().to_owned()),
        };
        let deleted = session.run(ipam.delete_endpoint(&of, deadline)).map_err(failed);
        let name = endpoint.interface();
        let interface = interfaces.iter().find(|one| one.name == name && !in_use.contains(name));
        let removed = match (&deleted, interface) {
            (Ok(true), Some(interface)) => wiring::remove_host_interface(interface).map_err(told),
            _ => Ok(()),
        };
        tracing::info!(
            endpoint = endpoint.name(),
            interface = name,
            ?deleted,
            "the runtime does not list the container"
        );
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
    held: &[Allocation],
) -> bool {
    let (network, container) = (&setup.conf.net.name, endpoint.container());
    let addresses = endpoint.addresses();
    // The endpoint of a prefix has an address inside of it.
    let is_its = |one: &&Allocation| {
        one.network == *network && one.container == container && addresses.iter().any(|ip| one.unit.contains(ip))
    };
    let allocations: Vec<&Allocation> = held.iter().filter(is_its).collect();
    let is_ours = endpoint.profiles().first() == Some(network) || !allocations.is_empty();
    let is_old = |since| age(setup.invocation.host.now, since) >= YOUNG;
    // A pod that is started again keeps its endpoint with the old time.
    let are_old = allocations.iter().all(|one| one.assigned_at().is_none_or(is_old))
        && parse_rfc3339(endpoint.created()).is_some_and(is_old);
    is_ours && are_old && !container.is_empty() && !is_valid(endpoint, valid)
}
