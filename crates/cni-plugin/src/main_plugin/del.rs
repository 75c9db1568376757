//! Carries out the verbs DEL and GC of the main plugin. DEL removes the interface, addresses and WorkloadEndpoint of a
//! container. GC removes the interface, addresses and WorkloadEndpoint of every attachment that the runtime does not
//! list.
//!
//! A WorkloadEndpoint does not name the network that it belongs to. GC attributes a WorkloadEndpoint to a network if
//! the endpoint's first profile is the network's name, or if an address of the endpoint is assigned to its container in
//! this network. A container's WorkloadEndpoint belongs to the container's first network; a GC of its second network
//! does not remove it. GC also keeps a WorkloadEndpoint if the WorkloadEndpoint or one of its addresses is younger than
//! a minute. A WorkloadEndpoint or an address that is younger than a minute may be newer than the runtime's list of
//! attachments.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use agent::{
    Allocator, Answer, CniError, Code, DaemonAllocator, Del, NetworkRules, Result, Session, StoreAccess, VerbFailure,
    explain, is_no_store,
};
use ipam_core::endpoints::{EndpointOwner, EndpointToDelete, WorkloadQuery};
use ipam_core::gc::Allocation;
use ipam_core::model::{Orchestrator, WorkloadEndpoint, handle_id};
use ipam_core::timestamps::{age, parse_rfc3339};
use kv::Purpose;
use time::Duration;
use tokio::runtime::Builder;

use super::check::{UNKNOWN_VERB, close_session};
use super::ipam::IpamPlugin;
use super::setup::MainContext;
use super::wiring_error;
use crate::dataplane_grpc::Dataplane;
use crate::env::{self, CniVerb};
use crate::invocation;
use crate::verbs::valid_attachments;

/// An allocator whose DEL also deletes the WorkloadEndpoint, in the same commit.
struct EndpointAllocator<'e> {
    inner: Box<dyn Allocator>,
    endpoint: &'e EndpointToDelete,
}

impl Allocator for EndpointAllocator<'_> {
    fn call(&self, at: &StoreAccess, verb: &agent::Verb) -> Result<Answer> {
        let agent::Verb::Del(del) = verb else { return self.inner.call(at, verb) };
        self.inner.call(at, &agent::Verb::Del(Del { endpoint: Some(self.endpoint.clone()), ..del.clone() }))
    }
}

/// Carries out DEL, which removes the interface, the addresses and the WorkloadEndpoint of a container. If a step of
/// DEL fails, the remaining steps still run, and the first error is returned. As in Calico's plugin, DEL fails
/// immediately if the datastore is not ready.
///
/// Unlike in Calico's plugin, DEL succeeds for a container whose ADD failed because the cluster or the node was not set
/// up. In a cluster without ClusterInformation, DEL removes what is there, usually nothing. Without the node name file,
/// DEL does not know the names under which this node stores addresses, so it only succeeds if no node has stored
/// anything for the container.
///
/// # Errors
/// An error with Calico's message for the first failed step.
pub(super) fn del(setup: &MainContext<'_>) -> Result<String> {
    let session = match Session::open(&setup.store, Purpose::Release) {
        Ok(session) => Arc::new(session),
        // If the store does not exist, there is no WorkloadEndpoint and no address to remove.
        Err(VerbFailure::Store(error)) if is_no_store(&error, &setup.store.location) => {
            tracing::warn!(%error, "the store does not exist, so there is no workload endpoint to delete");
            return del_unstored(setup);
        }
        Err(error) => return Err(without_store(setup, error.into())),
    };
    match setup.check_not_locked(&session) {
        Err(error) if error.code() == Code::TryAgain => return Err(without_store(setup, error)),
        ready => ready?,
    }
    if let Err(error) = &setup.nodename {
        let is_known = knows_workload(setup, &session);
        close_session(session);
        return if is_known? { Err(error.clone()) } else { del_unstored(setup) };
    }
    let endpoint = EndpointToDelete {
        namespace: setup.workload.namespace.clone(),
        name: setup.workload.endpoint(&setup.call.interface)?,
        owner: match setup.workload.orchestrator {
            Orchestrator::Cni => EndpointOwner::Any,
            Orchestrator::K8s => EndpointOwner::Container(setup.call.container.clone()),
        },
    };
    // Remove the interface first, because its address must not be assigned to another container while the interface
    // exists. The kernel finishes removing the interface while the plugin writes to the store.
    let unwired = unwire(setup, Some(&session));
    let released = release(setup, session, &endpoint);
    unwired.and(released)?;
    if setup.is_own_netns() { Err(env::own_netns_error()) } else { Ok(String::new()) }
}

/// Carries out the DEL of a container for which the store has no address and no WorkloadEndpoint.
fn del_unstored(setup: &MainContext<'_>) -> Result<String> {
    let unwired = unwire(setup, None);
    let released = match setup.ipam_plugin() {
        // An IPAM plugin that is another program has its own records, so its DEL must still be called.
        Ok(plugin) if plugin.is_other() => setup.call_later(&plugin, CniVerb::Del, &DaemonAllocator::default()),
        _ => Ok(()),
    };
    unwired.and(released).map(|()| String::new())
}

/// True if the store has an address or a WorkloadEndpoint of the container, whatever node it is recorded for.
fn knows_workload(setup: &MainContext<'_>, session: &Session) -> Result<bool> {
    let (workload, container) = (&setup.workload, &setup.call.container);
    let old_handle = match workload.orchestrator {
        Orchestrator::K8s => format!("{}.{}", workload.namespace, workload.id),
        Orchestrator::Cni => container.clone(),
    };
    let query = WorkloadQuery {
        handles: vec![handle_id(&setup.conf.net.name, container), old_handle],
        namespace: workload.namespace.clone(),
        orchestrator: workload.orchestrator,
        id: workload.id.clone(),
    };
    let known = session.run(session.ipam().knows_workload(&query, session.deadline()));
    known.map_err(|error| explain(error, NetworkRules::Calico).into())
}

/// Removes the container's interface in a DEL that cannot use the store, and returns the store's error.
fn without_store(setup: &MainContext<'_>, error: CniError) -> CniError {
    if let Err(error) = unwire(setup, None) {
        tracing::warn!(
            %error,
            "cannot use the store, and cannot remove the container's interface; the interface stays until the next DEL"
        );
    }
    error
}

/// Releases the addresses of the container and deletes its WorkloadEndpoint. If the IPAM plugin is this program, one
/// commit releases the addresses and deletes the WorkloadEndpoint.
fn release(setup: &MainContext<'_>, session: Arc<Session>, endpoint: &EndpointToDelete) -> Result<()> {
    let plugin = setup.ipam_plugin();
    let released = match &plugin {
        Ok(plugin @ IpamPlugin::Own(_)) => {
            let inner = MainContext::allocator(&session);
            let done = plugin.call(&setup.ipam_call(CniVerb::Del), &EndpointAllocator { inner, endpoint });
            if done.is_ok() {
                close_session(session);
                return Ok(());
            }
            done.map(drop)
        }
        Ok(plugin) => {
            let deleted = delete(session, endpoint);
            return setup.call_later(plugin, CniVerb::Del, &DaemonAllocator::default()).and(deleted);
        }
        Err(error) => Err(error.clone()),
    };
    // Delete the WorkloadEndpoint even if releasing the addresses failed.
    released.and(delete(session, endpoint))
}

fn delete(session: Arc<Session>, endpoint: &EndpointToDelete) -> Result<()> {
    let deleted = session.run(session.ipam().delete_endpoint(endpoint, session.deadline()));
    close_session(session);
    match deleted {
        Ok(_) => Ok(()),
        Err(error) => {
            let error = CniError::from(explain(error, NetworkRules::Calico));
            let message = format!("error deleting endpoint: {}", error.message());
            Err(CniError::new(error.code(), message).with_details(error.details()))
        }
    }
}

/// Removes the container's interface, unless the interface is in the plugin's own network namespace.
fn unwire(setup: &MainContext<'_>, session: Option<&Arc<Session>>) -> Result<()> {
    if setup.is_own_netns() {
        return Ok(());
    }
    let (netns, interface) = (setup.netns(), &setup.call.interface);
    let Dataplane::Grpc(program) = setup.dataplane()? else {
        return wiring::disconnect(
            &netns,
            interface,
            Instant::now() + super::WIRING_TIMEOUT,
            invocation::start_remover,
        )
        .map_err(wiring_error);
    };
    let netns = netns.to_string_lossy();
    let removal = |left| program.del(interface, &netns, left);
    match session {
        Some(session) => session.run(removal(session.deadline().remaining())),
        None => {
            let runtime = Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
            runtime.block_on(removal(setup.store.patience))
        }
    }
}

/// Minimum age of a WorkloadEndpoint that GC removes.
const MIN_ENDPOINT_AGE: Duration = Duration::MINUTE;

/// Carries out GC. If one part of GC fails, the remaining parts still run, and the first error is returned.
///
/// # Errors
/// An error if the list of valid attachments is missing, and any error of the store or of the IPAM plugin.
pub(super) fn gc(setup: &MainContext<'_>) -> Result<String> {
    let valid = valid_attachments(&setup.json)?;
    let endpoints = match Session::open(&setup.store, Purpose::Release) {
        Ok(session) => {
            setup.check_ready(&session)?;
            let removed = remove_endpoints(setup, &session, &valid);
            session.close();
            removed
        }
        Err(VerbFailure::Store(error)) if is_no_store(&error, &setup.store.location) => {
            tracing::warn!(%error, "the store does not exist, so there are no workload endpoints to delete");
            Ok(())
        }
        Err(error) => Err(error.into()),
    };
    endpoints.and(collect_addresses(setup))?;
    Ok(String::new())
}

fn collect_addresses(setup: &MainContext<'_>) -> Result<()> {
    let plugin = setup.ipam_plugin()?;
    match setup.call_later(&plugin, CniVerb::Gc, &DaemonAllocator::default()) {
        Err(error) if matches!(plugin, IpamPlugin::Other(_)) && UNKNOWN_VERB.contains(&error.code().number()) => {
            tracing::info!(%error, "the IPAM plugin does not support GC, so unused addresses stay assigned");
            Ok(())
        }
        done => done,
    }
}

fn remove_endpoints(setup: &MainContext<'_>, session: &Session, valid: &BTreeSet<(String, String)>) -> Result<()> {
    let failed = |error| explain(error, NetworkRules::Calico).into();
    let (ipam, deadline, node) = (session.ipam(), session.deadline(), setup.workload.node.as_str());
    // List the host's interfaces before reading the WorkloadEndpoints. GC identifies interfaces by index, so it keeps
    // an interface that an ADD creates later under the name of an interface in this list.
    let interfaces = wiring::host_interfaces().map_err(wiring_error)?;
    let endpoints = session.run(ipam.endpoints_of_node(node, deadline)).map_err(failed)?;
    let holdings = session.run(ipam.holdings_within(node, &ipam.read_scope_of(node), deadline)).map_err(failed)?.0;
    let in_use: BTreeSet<&str> =
        endpoints.iter().filter(|endpoint| is_valid(endpoint, valid)).map(WorkloadEndpoint::interface).collect();
    let mut first_error = Ok(());
    for endpoint in endpoints.iter().filter(|endpoint| is_stale(setup, endpoint, valid, &holdings.allocations)) {
        let of = EndpointToDelete {
            namespace: endpoint.namespace().to_owned(),
            name: endpoint.name().to_owned(),
            owner: EndpointOwner::Container(endpoint.container().to_owned()),
        };
        let deleted = session.run(ipam.delete_endpoint(&of, deadline)).map_err(failed);
        let name = endpoint.interface();
        let interface = interfaces.iter().find(|one| one.name == name && !in_use.contains(name));
        let removed = match (&deleted, interface) {
            (Ok(true), Some(interface)) => wiring::remove_host_interface(interface).map_err(wiring_error),
            _ => Ok(()),
        };
        tracing::info!(
            endpoint = endpoint.name(),
            interface = name,
            ?deleted,
            "deleting the workload endpoint and the interface of a container that the runtime no longer lists"
        );
        first_error = first_error.and(deleted.map(drop)).and(removed);
    }
    first_error
}

fn is_valid(endpoint: &WorkloadEndpoint, valid: &BTreeSet<(String, String)>) -> bool {
    // Compare only the container ids, because only one interface of a container has a WorkloadEndpoint.
    valid.iter().any(|(container, _)| container == endpoint.container())
}

fn is_stale(
    setup: &MainContext<'_>,
    endpoint: &WorkloadEndpoint,
    valid: &BTreeSet<(String, String)>,
    held: &[Allocation],
) -> bool {
    let (network, container) = (&setup.conf.net.name, endpoint.container());
    let addresses = endpoint.addresses();
    // If a prefix is assigned to the container, its WorkloadEndpoint lists an address inside the prefix.
    let is_its = |one: &&Allocation| {
        one.network == *network && one.container == container && addresses.iter().any(|ip| one.unit.contains(ip))
    };
    let allocations: Vec<&Allocation> = held.iter().filter(is_its).collect();
    let is_ours = endpoint.profiles().first() == Some(network) || !allocations.is_empty();
    let is_old = |since| age(setup.invocation.host.now, since) >= MIN_ENDPOINT_AGE;
    // When a pod restarts, its WorkloadEndpoint keeps the old creation time, so GC also checks when the pod's addresses
    // were assigned.
    let are_old = allocations.iter().all(|one| one.assigned_at().is_none_or(is_old))
        && parse_rfc3339(endpoint.created()).is_some_and(is_old);
    is_ours && are_old && !container.is_empty() && !is_valid(endpoint, valid)
}
