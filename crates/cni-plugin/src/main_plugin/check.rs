//! Carries out CHECK and STATUS of the main plugin, and the option `-t`.
//!
//! CHECK compares the current state with what the container's ADD created: the interface, addresses, routes, sysctls,
//! WorkloadEndpoint and allocation. STATUS reports whether an ADD with the same configuration would succeed now. The
//! option `-t` reports whether the datastore of the configuration answers.

use std::io::Read;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Allocator, CniError, Code, DaemonAllocator, Result, Session, WriteRights};
use ipam_core::endpoints::{EndpointQuery, PoolsToRead};
use ipam_core::model::{Orchestrator, WorkloadEndpoint, keys};
use kv::Purpose;

use super::ipam::IpamPlugin;
use super::setup::MainContext;
use super::{WIRING_TIMEOUT, wiring_error};
use crate::dataplane_grpc::Dataplane;
use crate::env::{CniCall, CniVerb, OwnNetns};
use crate::gojson::GoJson;
use crate::invocation::Invocation;
use crate::kubernetes::HardwareAddress;
use crate::result;
use crate::run::read;

/// Carries out CHECK. Calico's plugin prints `OK` without checking anything; Margay prints `OK` if it finds no
/// difference.
///
/// # Errors
/// An error whose details list each difference that CHECK found, and any error of the store or of the IPAM plugin.
pub(super) fn check(setup: &MainContext<'_>) -> Result<String> {
    let addresses = result::previous_addresses(setup.conf.net.prev_result.as_ref())?;
    let mut wrong = Vec::new();
    let (endpoint, allocation) = read_endpoint(setup)?;
    match &endpoint {
        None => wrong.push(format!("no endpoint is stored for {}", setup.workload.prefix()?)),
        Some(endpoint) => compare(setup, endpoint, &addresses, &mut wrong),
    }
    if let Err(error) = allocation {
        // If the store does not answer, CHECK cannot know the state of the container.
        if error.code() == Code::TryAgain {
            return Err(error);
        }
        // The IPAM plugin's CHECK proves nothing if addresses may have been assigned without an IPAM plugin.
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
        plan.prefixes = result::previous_prefixes(setup.conf.net.prev_result.as_ref());
        plan.mac = HardwareAddress::read(endpoint.mac()).ok().map(|mac| mac.bytes);
        wrong.extend(wiring::inspect(&setup.netns(), &plan, Instant::now() + WIRING_TIMEOUT).map_err(wiring_error)?);
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

/// Reads the stored WorkloadEndpoint, and calls the IPAM plugin's CHECK.
fn read_endpoint(setup: &MainContext<'_>) -> Result<(Option<WorkloadEndpoint>, Result<()>)> {
    let session = Arc::new(Session::open(&setup.store, Purpose::Any)?);
    let query = EndpointQuery {
        namespace: setup.workload.namespace.clone(),
        prefix: Some(setup.workload.prefix()?),
        profile: None,
        pools: PoolsToRead::Skipped,
    };
    let (pending, before) = setup.begin(&session, query)?;
    drop(pending);
    let endpoint = before.endpoints.into_iter().map(|(endpoint, _)| endpoint).find(|found| setup.workload.has(found));
    if endpoint.as_ref().is_some_and(|endpoint| has_joined(setup, endpoint)) {
        close_session(session);
        return Ok((endpoint, Ok(())));
    }
    let plugin = setup.ipam_plugin()?;
    // Close the store, because an IPAM plugin that is another program may have to open the same store.
    let session = match plugin {
        IpamPlugin::Own(_) => Some(session),
        IpamPlugin::Other(_) => {
            close_session(session);
            None
        }
    };
    let allocator = session
        .as_ref()
        .map_or_else(|| Box::new(DaemonAllocator::default()) as Box<dyn Allocator>, MainContext::allocator);
    let allocation = setup.call_later(&plugin, CniVerb::Check, &*allocator);
    drop(allocator);
    session.into_iter().for_each(close_session);
    Ok((endpoint, allocation))
}

/// True if the container was already in another network when it joined this network. A container that joins a second
/// network keeps the addresses of its first network, so the IPAM plugin assigns no address in the second network.
fn has_joined(setup: &MainContext<'_>, endpoint: &WorkloadEndpoint) -> bool {
    let (profiles, network) = (endpoint.profiles(), &setup.conf.net.name);
    setup.workload.orchestrator == Orchestrator::Cni
        && profiles.iter().position(|one| one == network).is_some_and(|at| at > 0)
}

pub(super) fn close_session(session: Arc<Session>) {
    if let Ok(session) = Arc::try_unwrap(session) {
        session.close();
    }
}

/// Compares the stored WorkloadEndpoint with the plugin call and with the runtime's `prevResult`, and adds each
/// difference to `wrong`.
fn compare(setup: &MainContext<'_>, endpoint: &WorkloadEndpoint, addresses: &[IpAddr], wrong: &mut Vec<String>) {
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

/// Time limit for the datastore to answer the requests of STATUS.
const STATUS_TIMEOUT: Duration = Duration::from_millis(900);
/// The error codes with which an IPAM plugin that is another program refuses a CNI verb that it does not support.
pub(super) const UNKNOWN_VERB: [u32; 2] = [1, 4];

/// Carries out STATUS. STATUS of the main plugin only queries an etcd store, because the IPAM plugin's STATUS checks an
/// embedded store. STATUS does not fail if other processes have the embedded store open.
///
/// # Errors
/// CNI error code 50 with the reason why an ADD would fail.
pub(super) fn status(setup: &MainContext<'_>) -> Result<String> {
    ready(setup).map_err(|error| error.with_code(Code::Unavailable))
}

fn ready(setup: &MainContext<'_>) -> Result<String> {
    if setup.store.location.is_shared() {
        let mut at = setup.store.clone();
        at.patience = at.patience.min(STATUS_TIMEOUT);
        let session = Session::open(&at, Purpose::Any)?;
        let ready = setup.check_ready(&session).and_then(|()| check_rights(setup, &session));
        session.close();
        ready?;
    } else {
        tracing::info!("Felix cannot use a single-node store, so network policies have no effect");
    }
    let plugin = setup.ipam_plugin()?;
    match plugin.call(&setup.ipam_call(CniVerb::Status), &DaemonAllocator::default()) {
        Err(error) if matches!(plugin, IpamPlugin::Other(_)) && UNKNOWN_VERB.contains(&error.code().number()) => {
            tracing::debug!(%error, "the IPAM plugin does not support STATUS; treating the IPAM plugin as ready");
            Ok(String::new())
        }
        done => done.map(|_| String::new()),
    }
}

/// Checks that the plugin's etcd user may write the WorkloadEndpoint of a container.
fn check_rights(setup: &MainContext<'_>, session: &Session) -> Result<()> {
    let results = format!("endpoints of {}", setup.conf.net.name);
    let Some(rights) = WriteRights::of(&setup.store.location, &results, &setup.workload.node) else { return Ok(()) };
    let key = keys::workload_endpoint("default", "status");
    Ok(session.run(rights.check(&*session.store(), vec![key]))?)
}

/// Time limit for the datastore's answer to the test with the option `-t`.
const DATASTORE_TIMEOUT: Duration = Duration::from_secs(2);

/// Tests whether the datastore of a configuration answers (option `-t`). If the datastore answers, the returned output
/// is empty.
///
/// # Errors
/// CNI error code 100, with the cause in the error's details.
pub(super) fn test_datastore(invocation: &Invocation, stdin: &mut dyn Read) -> Result<String> {
    let failed = |error: CniError| {
        CniError::new(Code::Unreachable, "data store connection failed").with_details(error.message())
    };
    check_datastore(invocation, &read(stdin)?).map_err(failed)?;
    Ok(String::new())
}

fn check_datastore(invocation: &Invocation, text: &[u8]) -> Result<()> {
    let wrong = |reason| CniError::internal(format!("failed to load netconf: {reason}"));
    let json = GoJson::parse(text).map_err(wrong)?;
    let call = CniCall {
        verb: CniVerb::Status,
        command: String::new(),
        container: "test".to_owned(),
        netns: None,
        interface: "eth0".to_owned(),
        args: String::new(),
        own_netns: OwnNetns::Accepted,
    };
    let mut setup = MainContext::new(invocation, call, json, text.to_vec())?;
    setup.store.patience = DATASTORE_TIMEOUT;
    let unreachable = |error: CniError| match error.code() {
        Code::TryAgain => CniError::internal("error getting ClusterInformation: context deadline exceeded"),
        _ => error,
    };
    let session = Session::open(&setup.store, Purpose::Any).map_err(|error| unreachable(error.into()))?;
    let read = setup.check_ready(&session).map_err(unreachable);
    let read = read.and_then(|()| kubernetes_answers(&setup, &session));
    session.close();
    read
}

/// Tests whether the Kubernetes API answers, if the configuration names a kubeconfig.
fn kubernetes_answers(setup: &MainContext<'_>, session: &Session) -> Result<()> {
    if setup.conf.net.store.kubeconfig.is_empty() {
        return Ok(());
    }
    let failed = |what: &'static str| move |error: CniError| CniError::internal(format!("{what}: {}", error.message()));
    let mut client = setup.kubernetes.client().map_err(failed("error building K8s client config"))?;
    session.run(client.version(DATASTORE_TIMEOUT)).map_err(failed("unable to connect to K8s server"))
}
