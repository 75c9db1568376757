//! Carries out ADD of the main plugin. This module contains the steps of an ADD, how to undo them, and the ADD of a
//! plain container, which belongs to no pod.
//!
//! The kernel or an external data plane creates the interfaces of a container. Where no Felix runs, the plugin enables
//! forwarding on the host, and masquerades addresses of pools with `natOutgoing`. [`ForwardingOwner`] decides whether a
//! Felix runs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Allocator, CniError, NetworkRules, Result, Session, explain};
use datastore::served;
use ipam_core::Error;
use ipam_core::endpoints::{EndpointContext, EndpointQuery, PendingEndpoint, PoolsToRead};
use ipam_core::forwarding::{ForwardingOwner, StoreScope};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    ClusterInformation, EndpointFacts, Labels, Orchestrator, Pool, ReleaseRequest, WorkloadEndpoint, check_endpoint,
};
use ipnet::IpNet;
use kv::{Deadline, Purpose, Revision, StoreExt};
use wiring::{ConnectResult, NextHop, Plan, ensure_forwarding, masquerade};

use super::ipam::{IpamCall, IpamPlugin};
use super::setup::MainContext;
use super::{WIRING_TIMEOUT, pod, wiring_error};
use crate::dataplane_grpc::{AddRequest, ContainerSettings, Dataplane, GrpcPort, IpConfig, WorkloadIds};
use crate::env::{self, CniVerb};
use crate::invocation;
use crate::kubernetes::gates;
use crate::result::{AddResult, ResultInterface};

/// Carries out an ADD of the main plugin.
///
/// # Errors
/// If the ADD fails, undoes all its changes and returns an error with Calico's message.
pub(super) fn add(setup: &MainContext<'_>) -> Result<String> {
    // Calico detects a wrong network namespace only after making all changes of the ADD, and does not undo the changes.
    if setup.is_own_netns() {
        return Err(env::own_netns_error());
    }
    pass_gates(setup)?;
    let session = Arc::new(Session::open(&setup.store, Purpose::Any)?);
    let mut add = AddOperation::begin(setup, session)?;
    let answer = match setup.workload.orchestrator {
        Orchestrator::Cni => add_container(&mut add),
        Orchestrator::K8s => pod::add(&mut add),
    };
    add.close();
    answer
}

/// Waits until the datastore is ready, and then for the readiness gates of the configuration. The time limit of the
/// plugin call starts only after the readiness gates have opened.
fn pass_gates(setup: &MainContext<'_>) -> Result<()> {
    let gates = &setup.conf.readiness_gates;
    if gates.is_empty() {
        return Ok(());
    }
    let session = Session::open(&setup.store, Purpose::Any)?;
    let ready = setup.check_ready(&session);
    session.pause();
    let passed = ready.and_then(|()| session.run(gates::wait(gates, Duration::MAX)));
    session.close();
    passed
}

/// A running ADD, with the data that the ADD has read from the store.
pub(super) struct AddOperation<'s, 'a> {
    pub(super) setup: &'s MainContext<'a>,
    session: Arc<Session>,
    pending: PendingEndpoint,
    /// The stored WorkloadEndpoint of the container or pod, and its revision.
    pub(super) found: Option<(WorkloadEndpoint, Revision)>,
    outgoing: OutgoingRules,
}

impl<'s, 'a> AddOperation<'s, 'a> {
    /// Reads the WorkloadEndpoints of the container or pod and, for masquerading, the pools.
    ///
    /// # Errors
    /// Any store error, or an error if the workload's name is not allowed in the name of a WorkloadEndpoint.
    pub(super) fn begin(setup: &'s MainContext<'a>, session: Arc<Session>) -> Result<Self> {
        let workload = &setup.workload;
        let prefix = workload.prefix();
        // Look for Felix's files even if this network has an embedded store: calico-node may run on this machine for
        // other networks.
        let felix_file = host::felix_file();
        let query = EndpointQuery {
            namespace: workload.namespace.clone(),
            prefix: prefix.clone().ok(),
            profile: setup.conf.net.policy.kind.is_empty().then(|| setup.conf.net.name.clone()),
            pools: match felix_file {
                Some(_) => PoolsToRead::Skipped,
                None if setup.is_alone() => PoolsToRead::Read,
                None => PoolsToRead::IfMargayAlone,
            },
        };
        let (pending, before) = setup.begin(&session, query)?;
        prefix?;
        let outgoing = OutgoingRules::of(setup, &before, felix_file);
        let found = before.endpoints.into_iter().find(|(found, _)| workload.has(found));
        Ok(Self { setup, session, pending, found, outgoing })
    }

    /// Returns the name of the container's interface on the host.
    pub(super) fn host_interface(&self) -> String {
        let felix = self.setup.invocation.environment.text("FELIX_INTERFACEPREFIX");
        self.setup.workload.host_interface(&felix)
    }

    /// Creates the container's interface. If another container's host interface already has the planned name, this
    /// function puts an alternative name into the plan. Names of host interfaces collide if the ids of two containers
    /// start with the same characters.
    ///
    /// # Errors
    /// An error with the message of [`wiring::Error`]. After an error, the ADD has left no interface in the container.
    pub(super) fn connect(&self, plan: &mut Plan) -> Result<ConnectResult> {
        let (netns, deadline) = (self.setup.netns(), Instant::now() + WIRING_TIMEOUT);
        if self.outgoing.is_kept() {
            // Without Felix, the host may have no route to the next hop, so its proxy ARP may not answer.
            plan.next_hop = NextHop::Known;
        }
        let wired = match wiring::connect(&netns, plan, deadline) {
            Err(wiring::Error::Taken(_)) => {
                plan.host_interface = self.setup.workload.other_host_interface();
                wiring::connect(&netns, plan, deadline)
            }
            done => done,
        };
        let wired = wired.map_err(wiring_error)?;
        // Change the host's settings last, because an ADD whose interface cannot be created must not change the host's
        // settings.
        self.outgoing.ensure(&plan.addresses).inspect_err(|_| self.disconnect())?;
        Ok(wired)
    }

    /// True if the container has an interface with this name.
    ///
    /// # Errors
    /// An error with the message of [`wiring::Error`].
    fn has_interface(&self, name: &str) -> Result<bool> {
        wiring::has_interface(&self.setup.netns(), name, Instant::now() + WIRING_TIMEOUT).map_err(wiring_error)
    }

    /// Removes the container's interface after a failed ADD. The veth pair is removed through its end in the container,
    /// because a newer ADD of the same pod may already use the name of the host's end. A failure to remove the
    /// interface is only logged, because the runtime also calls DEL after a failed ADD.
    pub(super) fn disconnect(&self) {
        let (netns, interface) = (self.setup.netns(), &self.setup.call.interface);
        if let Err(error) =
            wiring::disconnect(&netns, interface, Instant::now() + WIRING_TIMEOUT, invocation::start_remover)
        {
            tracing::warn!(
                %error,
                interface,
                "cannot remove the container's interface after a failed ADD; the interface stays until DEL"
            );
        }
    }

    /// Returns the allocator for the IPAM plugin that is part of this program.
    pub(super) fn allocator(&self) -> Box<dyn Allocator> {
        MainContext::allocator(&self.session)
    }

    /// Calls the IPAM plugin's ADD. If the IPAM plugin of this program refuses a node that is not registered, the
    /// returned error's details say how to register it; the IPAM plugin itself prints Calico's error without details.
    ///
    /// # Errors
    /// Any error of the IPAM plugin.
    pub(super) fn assign(&self, plugin: &IpamPlugin, call: &IpamCall<'_>) -> Result<AddResult> {
        let assigned = plugin.call(call, &*self.allocator());
        assigned.map_err(|error| {
            let is_explained = plugin.is_other() || self.setup.is_alone() || !error.details().is_empty();
            if is_explained || self.is_registered() {
                return error;
            }
            error.with_details("this node is not registered in the store; register it with: margay node register")
        })
    }

    /// True if the store has the document of this node, or cannot be read.
    fn is_registered(&self) -> bool {
        let key = keys::resource(ResourceKind::Node, &self.setup.workload.node);
        let stored = self.run(async |_| Ok(self.session.store().get(key).await?));
        !matches!(stored, Ok(None))
    }

    /// Releases the store if the IPAM plugin is another program, which may have to open the same store.
    pub(super) fn release_store(&self, plugin: &IpamPlugin) {
        if plugin.is_other() {
            self.pause();
        }
    }

    /// Lets other processes open the store until this plugin call needs the store again.
    pub(super) fn pause(&self) {
        self.session.pause();
    }

    /// Runs an async closure to completion, with the deadline of the plugin call as the closure's argument.
    ///
    /// # Errors
    /// Any error that the async closure returns.
    pub(super) fn run<T>(&self, future: impl AsyncFnOnce(Deadline) -> Result<T>) -> Result<T> {
        self.session.run(future(self.session.deadline()))
    }

    /// Stores a new WorkloadEndpoint with these facts, or updates the WorkloadEndpoint that is already stored.
    ///
    /// If another plugin call has written the WorkloadEndpoint since this ADD read the store, the WorkloadEndpoint is
    /// read again and stored once more, unless it belongs to a container that this ADD did not know. So an ADD of a pod
    /// succeeds although the DEL of the pod's previous container deletes the WorkloadEndpoint meanwhile.
    ///
    /// # Errors
    /// An error if another container of the pod has stored its WorkloadEndpoint, or any other store error.
    pub(super) fn store(&mut self, name: &str, facts: &EndpointFacts) -> Result<()> {
        let error = match self.try_store(name, facts) {
            Err(error @ (Error::EndpointExists(_) | Error::EndpointChanged(_))) => error,
            done => return done.map_err(explained),
        };
        let known = self.found.as_ref().map(|(found, _)| found.container().to_owned());
        let EndpointContext { endpoints, .. } = self.session.run(self.pending.read_again()).map_err(explained)?;
        self.found = endpoints.into_iter().find(|(found, _)| self.setup.workload.has(found));
        if let Some((found, _)) = &self.found {
            let other = found.container();
            if other != self.setup.call.container && Some(other) != known.as_deref() {
                let text = format!("container {other} of the same workload has stored its endpoint during this ADD");
                return Err(explained(error).with_details(text));
            }
        }
        self.try_store(name, facts).map_err(explained)
    }

    fn try_store(&mut self, name: &str, facts: &EndpointFacts) -> ipam_core::Result<()> {
        let (endpoint, replaced) = match &self.found {
            Some((found, revision)) => {
                let mut endpoint = found.clone();
                endpoint.update(facts);
                (endpoint, Some(*revision))
            }
            None => (self.pending.new_endpoint(name, facts), None),
        };
        self.store_document(&endpoint, replaced)
    }

    /// Stores the document of a WorkloadEndpoint unchanged.
    fn store_document(&mut self, endpoint: &WorkloadEndpoint, replaced: Option<Revision>) -> ipam_core::Result<()> {
        let orchestrator = self.setup.workload.orchestrator;
        self.session.run(self.pending.store(endpoint, replaced, orchestrator))
    }

    /// Releases the addresses of a failed ADD. Nothing is released if the container already had one of the addresses
    /// before the ADD, because a release always includes all addresses of the container. A failure to release the
    /// addresses is only logged, because the runtime also calls DEL after a failed ADD.
    pub(super) fn release(&mut self, plugin: &IpamPlugin, assigned: &AddResult) {
        let had = self.found.as_ref().filter(|(found, _)| found.container() == self.setup.call.container);
        let had = had.map(|(found, _)| found.addresses()).unwrap_or_default();
        if assigned.ips.is_empty() || assigned.addresses().iter().any(|address| had.contains(address)) {
            return;
        }
        self.release_all(plugin);
    }

    /// Calls the IPAM plugin to release all addresses of the container, and only logs a failure.
    fn release_all(&mut self, plugin: &IpamPlugin) {
        self.release_store(plugin);
        if let Err(error) = self.setup.call_later(plugin, CniVerb::Del, &*self.allocator()) {
            tracing::warn!(
                %error,
                "cannot release the container's addresses after a failed ADD; the addresses stay assigned until DEL"
            );
        }
    }

    /// Releases an address, unless the address is now assigned to another container.
    ///
    /// # Errors
    /// Any store error.
    pub(super) fn release_address(&mut self, request: &ReleaseRequest) -> Result<()> {
        let session = &self.session;
        match session.run(session.ipam().release_ips(std::slice::from_ref(request), session.deadline())) {
            Ok(_) | Err(Error::ReleaseConflict(_)) => Ok(()),
            Err(error) => Err(explained(error)),
        }
    }

    /// Returns the CNI result that ADD prints.
    ///
    /// # Errors
    /// An error if the result has no address and the CNI version is before 0.3.0.
    pub(super) fn answer(&self, assigned: AddResult, host_interface: &str, mac: &str) -> Result<String> {
        let setup = self.setup;
        let outside = ResultInterface { name: host_interface.to_owned(), ..ResultInterface::default() };
        let inside = ResultInterface {
            name: setup.call.interface.clone(),
            mac: Some(mac.to_owned()),
            mtu: Some(setup.mtu).filter(|mtu| *mtu > 0),
            sandbox: Some(setup.netns().to_string_lossy().into_owned()),
        };
        // As in Calico, the result is in CNI version 0.2.0 if the configuration names no version.
        let version = setup.json.text_member("cniVersion").unwrap_or("");
        assigned.on([outside, inside]).to_json(if version.is_empty() { "0.2.0" } else { version })
    }

    pub(super) fn close(self) {
        let Self { session, pending, .. } = self;
        drop(pending);
        if let Ok(session) = Arc::try_unwrap(session) {
            session.close();
        }
    }
}

/// Returns the CNI error for an error of the allocator, with Calico's message.
fn explained(error: Error) -> CniError {
    explain(error, NetworkRules::Calico).into()
}

/// Creates the container's interfaces, and records the host interface's name and the container's MAC address in
/// `facts`.
///
/// # Errors
/// An error with the message of [`wiring::Error`], or with the unchanged message of the external data plane. After an
/// error, the container has no interface.
pub(super) fn make_interfaces(
    add: &AddOperation<'_, '_>,
    mut plan: Plan,
    assigned: &AddResult,
    annotations: &BTreeMap<String, String>,
    name: &str,
    facts: &mut EndpointFacts,
) -> Result<()> {
    match add.setup.dataplane()? {
        Dataplane::Linux => {
            facts.mac = add.connect(&mut plan)?.mac;
            facts.interface = plan.host_interface;
        }
        Dataplane::Grpc(program) => {
            routes_addresses(&plan)?;
            let request = dataplane_request(add, &plan, assigned, annotations, name, facts);
            let made = add.run(async |deadline| program.add(request, deadline.remaining()).await);
            // The external data plane may have created the interfaces although it returned an error.
            let made = made.inspect_err(|_| remove_interfaces(add))?;
            facts.interface = made.host_interface;
            facts.mac = made.mac.text;
        }
    }
    Ok(())
}

/// Refuses an assigned prefix if the data plane is external. The gRPC protocol has no field for prefixes, so the data
/// plane would route only a prefix's first address to the container.
fn routes_addresses(plan: &Plan) -> Result<()> {
    let Some(prefix) = plan.prefixes.first() else { return Ok(()) };
    let error = format!("the program of dataplane_options routes single addresses, and {prefix} is a prefix");
    Err(CniError::internal(error).with_details("name pools of addresses in ipam, or leave dataplane_options out"))
}

/// Removes the interfaces of a failed ADD. A failure to remove the interfaces is only logged, because the runtime also
/// calls DEL after a failed ADD.
pub(super) fn remove_interfaces(add: &AddOperation<'_, '_>) {
    match add.setup.dataplane() {
        Ok(Dataplane::Grpc(program)) => {
            let setup = add.setup;
            let netns = setup.netns();
            let removed = add.run(async |deadline| {
                program.del(&setup.call.interface, &netns.to_string_lossy(), deadline.remaining()).await
            });
            if let Err(error) = removed {
                tracing::warn!(
                    %error,
                    "cannot remove the container's interface after a failed ADD; the interface stays until DEL"
                );
            }
        }
        _ => add.disconnect(),
    }
}

fn dataplane_request(
    add: &AddOperation<'_, '_>,
    plan: &Plan,
    assigned: &AddResult,
    annotations: &BTreeMap<String, String>,
    name: &str,
    facts: &EndpointFacts,
) -> AddRequest {
    let setup = add.setup;
    let port = |port: &ipam_core::model::EndpointPort| GrpcPort {
        name: port.name.clone(),
        protocol: port.protocol.clone(),
        port: port.port.into(),
        host_port: port.host_port.into(),
        host_ip: port.host_ip.clone(),
    };
    AddRequest {
        interface_name: setup.call.interface.clone(),
        netns: setup.netns().to_string_lossy().into_owned(),
        desired_host_interface_name: facts.interface.clone(),
        settings: Some(ContainerSettings {
            allow_ip_forwarding: setup.conf.allow_ip_forwarding,
            mtu: i32::try_from(plan.mtu).unwrap_or(i32::MAX),
        }),
        container_ips: assigned.ips.iter().map(|ip| IpConfig::new(ip.address, ip.gateway)).collect(),
        container_routes: plan.routes.iter().map(ToString::to_string).collect(),
        workload: Some(WorkloadIds {
            name: name.to_owned(),
            namespace: setup.workload.namespace.clone(),
            labels: facts.labels.clone(),
            annotations: annotations.clone(),
            endpoint: facts.endpoint.clone(),
            node: facts.node.clone(),
            orchestrator: facts.orchestrator.as_str().to_owned(),
            pod: facts.pod.clone(),
            ports: facts.ports.iter().map(port).collect(),
        }),
        dataplane_options: BTreeMap::new(),
    }
}

/// The changes that an ADD makes to this machine's forwarding settings, and to the firewall rules for packets that leave the
/// machine.
enum OutgoingRules {
    /// The plugin enables forwarding and keeps the rules.
    Kept(MasqueradedPools),
    /// Felix does both. The plugin removes the rules that it made for the store of this name before Felix was there.
    Removed(String),
    /// Felix does both, and the plugin has never made any rule.
    LeftToFelix,
}

/// The pools to masquerade, and all pools of their store.
struct MasqueradedPools {
    /// The name that distinguishes the store's rules from the rules of other stores on the machine.
    store: String,
    forwarded: ForwardedAddresses,
    masqueraded: Vec<IpNet>,
    /// All pools of the store, including disabled pools, in which running containers may still have addresses.
    all: Vec<IpNet>,
}

/// The addresses for which the plugin enables forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForwardedAddresses {
    /// All addresses, because other nodes of the cluster must reach them, too.
    All,
    /// IPv6 addresses and masqueraded addresses. Packets between containers of one machine need forwarding by the host
    /// only for IPv6.
    Needed,
}

impl OutgoingRules {
    /// Returns what the ADD of a network does, according to [`ForwardingOwner`].
    fn of(setup: &MainContext<'_>, before: &EndpointContext, felix_file: Option<PathBuf>) -> Self {
        let (location, cluster) = (&setup.store.location, before.cluster.as_ref());
        let store = || served::rules_name(location, cluster.map_or("", ClusterInformation::guid));
        let scope = if setup.is_alone() { StoreScope::Machine } else { StoreScope::Cluster(cluster) };
        match ForwardingOwner::decide(scope, felix_file) {
            ForwardingOwner::Plugin => Self::Kept(MasqueradedPools {
                store: store(),
                forwarded: if setup.is_alone() { ForwardedAddresses::Needed } else { ForwardedAddresses::All },
                masqueraded: before.pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect(),
                all: before.pools.iter().map(Pool::cidr).collect(),
            }),
            _ if !setup.is_alone() && cluster.is_some_and(ClusterInformation::is_set_up_by_margay) => {
                Self::Removed(store())
            }
            ForwardingOwner::FelixOfCluster | ForwardingOwner::FelixOfMachine(_) => Self::LeftToFelix,
        }
    }

    fn is_kept(&self) -> bool {
        matches!(self, Self::Kept(_))
    }

    /// Enables forwarding and masquerading for a container with the given addresses.
    ///
    /// The firewall rules are rebuilt from the current pools, so the next ADD in any pool removes the old rules of a
    /// pool that was changed or deleted. If the firewall rules cannot be set up, the ADD fails only if its container
    /// needs the rules.
    ///
    /// # Errors
    /// An error with the message of [`wiring::Error`], which also names the address that needs masquerading.
    fn ensure(&self, addresses: &[IpAddr]) -> Result<()> {
        let MasqueradedPools { store, forwarded, masqueraded, all } = match self {
            Self::Kept(pools) => pools,
            Self::Removed(store) => {
                if let Err(error) = masquerade::ensure(store, &[], &[]) {
                    tracing::warn!(%error, "Felix masquerades now; cannot remove the rules of Margay's plugin");
                }
                return Ok(());
            }
            Self::LeftToFelix => return Ok(()),
        };
        let is_masqueraded = |address: &IpAddr| masqueraded.iter().any(|network| network.contains(address));
        let needed = addresses.iter().find(|address| is_masqueraded(address));
        match (masquerade::ensure(store, masqueraded, all), needed) {
            (Ok(()), _) => {}
            (Err(error), Some(address)) => {
                let text =
                    format!("the pool of {address} has natOutgoing, but its packets cannot be masqueraded: {error}");
                return Err(CniError::internal(text));
            }
            (Err(error), None) => {
                tracing::warn!(%error, "cannot update the masquerading rules for pools with natOutgoing; keeping the old rules");
            }
        }
        let is_forwarded =
            |address: &&IpAddr| *forwarded == ForwardedAddresses::All || address.is_ipv6() || is_masqueraded(address);
        let forwarded: Vec<IpAddr> = addresses.iter().filter(is_forwarded).copied().collect();
        ensure_forwarding(&forwarded).map_err(wiring_error)
    }
}

/// Carries out the ADD of a plain container, which belongs to no pod.
///
/// # Errors
/// If the ADD fails, undoes all its changes and returns an error with Calico's message.
fn add_container(add: &mut AddOperation<'_, '_>) -> Result<String> {
    if add.setup.conf.feature_ip_addrs_no_ipam {
        let text = "requested feature is not supported for this runtime: ip_addrs_no_ipam";
        return Err(CniError::internal(text));
    }
    add.setup.dataplane()?;
    let network = &add.setup.conf.net.name;
    let Some((mut found, revision)) = add.found.clone() else { return wire_container(add, vec![network.clone()]) };
    found.add_profile(network);
    let has_lost_it = found.endpoint() == add.setup.call.interface && !add.has_interface(found.endpoint())?;
    if has_lost_it { wire_container(add, found.profiles()) } else { join_network(add, &found, revision) }
}

/// Adds the profile of another network to the WorkloadEndpoint of a container that already has its interface. Changes
/// only the profiles of the stored WorkloadEndpoint.
fn join_network(add: &mut AddOperation<'_, '_>, endpoint: &WorkloadEndpoint, revision: Revision) -> Result<String> {
    let assigned = AddResult::of_addresses(&endpoint.addresses());
    add.store_document(endpoint, Some(revision)).map_err(explained)?;
    add.answer(assigned, endpoint.interface(), endpoint.mac())
}

/// Returns the facts for the WorkloadEndpoint of a container that has no addresses yet.
fn container_facts(add: &AddOperation<'_, '_>, interface: String, profiles: Vec<String>) -> EndpointFacts {
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

/// Creates the container's interface, and stores its WorkloadEndpoint with these profiles. A container with a stored
/// WorkloadEndpoint but no interface has lost its network namespace. When a container has lost its network namespace,
/// the IPAM plugin chooses new addresses, because the old ones may have been released.
fn wire_container(add: &mut AddOperation<'_, '_>, profiles: Vec<String>) -> Result<String> {
    let setup = add.setup;
    let name = setup.workload.endpoint(&setup.call.interface)?;
    let mut facts = container_facts(add, add.host_interface(), profiles);
    // Check the names in the WorkloadEndpoint before any change; Calico checks these names only after all changes.
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    add.release_store(&plugin);
    if add.found.is_some() && plugin.is_other() {
        // Release the old addresses first, because some IPAM plugins refuse a second ADD for the same attachment.
        add.release_all(&plugin);
    }
    let mut assigned = add.assign(&plugin, &setup.ipam_call(CniVerb::Add))?;
    if assigned.ips.is_empty() {
        add.release_all(&plugin);
        return Err(CniError::internal("IPAM plugin returned no IP addresses in result"));
    }
    facts.addresses = assigned.addresses();
    let mut plan = setup.plan(facts.interface.clone(), &facts.addresses);
    plan.prefixes.clone_from(&assigned.prefixes);
    let made = make_interfaces(add, plan, &assigned, &BTreeMap::new(), &name, &mut facts);
    let stored = made.and_then(|()| add.store(&name, &facts).inspect_err(|_| remove_interfaces(add)));
    stored.inspect_err(|_| add.release(&plugin, &assigned))?;
    if add.found.is_some() {
        // As in Calico, the result of a repeated ADD contains only the addresses and prefixes of the IPAM plugin's
        // result.
        let prefixes = assigned.prefixes;
        assigned = AddResult { prefixes, ..AddResult::of_addresses(&facts.addresses) };
    }
    add.answer(assigned, &facts.interface, &facts.mac)
}

/// Removes the namespace label from a WorkloadEndpoint's labels, because Calico sets this label separately.
fn endpoint_labels(mut labels: Labels) -> Labels {
    labels.remove("projectcalico.org.namespace");
    labels
}
