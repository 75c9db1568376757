//! CHECK: whether the container still has what ADD gave it: interface, addresses, routes, sysctls, endpoint and allocation.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipam_core::endpoints::{EndpointQuery, Pools};
use ipam_core::model::WorkloadEndpoint;

use super::WIRING;
use super::ipam::IpamPlugin;
use super::setup::Setup;
use crate::error::{CniError, Code, Result};
use crate::prev_result;
use crate::request::Allocator;
use crate::served::Served;
use crate::session::{Purpose, Session};

/// CHECK. Calico's plugin prints `OK` without a look; ours prints it after one.
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
        wrong.push(format!("IPAM: {}", error.message()));
    }
    if let Some(endpoint) = &endpoint {
        let plan = setup.plan(endpoint.interface().to_owned(), &endpoint.addresses());
        wrong.extend(wiring::inspect(&setup.netns(), &plan, Instant::now() + WIRING)?);
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

/// The stored endpoint, and what the IPAM plugin says of the allocation.
fn read(setup: &Setup<'_>) -> Result<(Option<WorkloadEndpoint>, Result<()>)> {
    let session = Arc::new(Session::open(&setup.store, Purpose::Assign)?);
    let query = EndpointQuery {
        namespace: setup.workload.namespace.clone(),
        prefix: Some(setup.workload.prefix()?),
        profile: None,
        pools: Pools::Skipped,
    };
    let (pending, before) = setup.begin(&session, query)?;
    drop(pending);
    let endpoint = before.endpoints.into_iter().map(|(endpoint, _)| endpoint).find(|found| setup.workload.has(found));
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
    let allocation = plugin.call(&setup.ipam_call("CHECK"), &*allocator).map(drop);
    drop(allocator);
    session.into_iter().for_each(finish);
    Ok((endpoint, allocation))
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
    let stored = endpoint.addresses();
    for address in addresses.iter().filter(|address| !stored.contains(address)) {
        wrong.push(format!("endpoint {name} lacks the address {address}"));
    }
}
