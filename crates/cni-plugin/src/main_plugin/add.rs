//! Carries out ADD of the main plugin: the open store, the steps of ADD and how to undo them, and the ADD of a plain
//! container, which belongs to no pod.
//!
//! The kernel or an external data plane creates the interfaces of a container. On a store of one machine, the plugin
//! enables forwarding on the host, and masquerades the pools with `natOutgoing`. On etcd, and on a machine where
//! calico-node runs, Felix sets forwarding and masquerading, and the plugin changes neither.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::{Allocator, CniError, NetworkRules, Result, Session, explain};
use datastore::{Location, served};
use ipam_core::endpoints::{EndpointContext, EndpointQuery, PendingEndpoint, PoolsToRead};
use ipam_core::model::{EndpointFacts, Labels, Orchestrator, Pool, ReleaseRequest, WorkloadEndpoint, check_endpoint};
use ipnet::IpNet;
use kv::{Deadline, Purpose, Revision};
use wiring::{ConnectResult, Plan, ensure_forwarding, masquerade};

use super::ipam::IpamPlugin;
use super::setup::MainContext;
use super::{WIRING_TIMEOUT, pod, wiring_error};
use crate::dataplane_grpc::{AddRequest, ContainerSettings, Dataplane, GrpcPort, IpConfig, WorkloadIds};
use crate::env::{self, CniVerb};
use crate::invocation;
use crate::kubernetes::gates;
use crate::result::{AddResult, ResultInterface};

/// Carries out ADD of the main plugin.
///
/// # Errors
/// An error with Calico's message. A failed ADD has undone its changes.
pub(super) fn add(setup: &MainContext<'_>) -> Result<String> {
    // Calico detects this error only after all changes, and does not undo the changes.
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

/// Waits for the readiness gates of the configuration after the store is ready. The time limit of the plugin call
/// starts after the gates have opened.
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

/// A running ADD, with the state that this ADD has read from the store.
pub(super) struct AddOperation<'s, 'a> {
    pub(super) setup: &'s MainContext<'a>,
    session: Arc<Session>,
    pending: PendingEndpoint,
    /// The stored endpoint of the workload, and the endpoint's revision.
    pub(super) found: Option<(WorkloadEndpoint, Revision)>,
    outgoing: OutgoingRules,
}

impl<'s, 'a> AddOperation<'s, 'a> {
    /// Reads the endpoints of the workload and, for masquerading, the pools.
    ///
    /// # Errors
    /// Any store error, or an error for a workload whose name an endpoint cannot have.
    pub(super) fn begin(setup: &'s MainContext<'a>, session: Arc<Session>) -> Result<Self> {
        let workload = &setup.workload;
        let prefix = workload.prefix();
        let query = EndpointQuery {
            namespace: workload.namespace.clone(),
            prefix: prefix.clone().ok(),
            profile: setup.conf.net.policy.kind.is_empty().then(|| setup.conf.net.name.clone()),
            pools: if setup.is_alone() { PoolsToRead::Read } else { PoolsToRead::Skipped },
        };
        let (pending, before) = setup.begin(&session, query)?;
        prefix?;
        let EndpointContext { endpoints, pools, .. } = before;
        // calico-node writes the node name file. A network of Margay's own may run beside calico-node.
        let has_felix = !setup.is_alone() || setup.invocation.host.nodename_file.exists();
        let outgoing =
            if has_felix { OutgoingRules::by_calico() } else { OutgoingRules::by_us(&setup.store.location, &pools) };
        let found = endpoints.into_iter().find(|(found, _)| workload.has(found));
        Ok(Self { setup, session, pending, found, outgoing })
    }

    /// Returns the name of the interface on the host.
    pub(super) fn host_interface(&self) -> String {
        let felix = self.setup.invocation.environment.text("FELIX_INTERFACEPREFIX");
        self.setup.workload.host_interface(&felix)
    }

    /// Wires the container. If another container already has the planned name of the host interface, the plan gets
    /// another name: the ids of two containers may start with the same characters.
    ///
    /// # Errors
    /// The message of [`wiring::Error`]. After an error, the container has no interface.
    pub(super) fn connect(&self, plan: &mut Plan) -> Result<ConnectResult> {
        let (netns, deadline) = (self.setup.netns(), Instant::now() + WIRING_TIMEOUT);
        let wired = match wiring::connect(&netns, plan, deadline) {
            Err(wiring::Error::Taken(_)) => {
                plan.host_interface = self.setup.workload.other_host_interface();
                wiring::connect(&netns, plan, deadline)
            }
            done => done,
        };
        let wired = wired.map_err(wiring_error)?;
        // Change the host's settings last, because a container that cannot be wired must not change the settings.
        self.outgoing.ensure(&plan.addresses).inspect_err(|_| self.disconnect())?;
        Ok(wired)
    }

    /// True if the container has the named interface.
    ///
    /// # Errors
    /// The message of [`wiring::Error`].
    fn has_interface(&self, name: &str) -> Result<bool> {
        wiring::has_interface(&self.setup.netns(), name, Instant::now() + WIRING_TIMEOUT).map_err(wiring_error)
    }

    /// Removes the container's interface after a failure. The pair is removed through the container's end, since a
    /// newer ADD of the same pod may have replaced the host's end. An error is only logged, since the runtime calls DEL
    /// as well.
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

    /// Returns the allocator for an IPAM plugin that is this program.
    pub(super) fn allocator(&self) -> Box<dyn Allocator> {
        MainContext::allocator(&self.session)
    }

    /// Releases the store if the IPAM plugin is another program, which may need the store.
    pub(super) fn release_store(&self, plugin: &IpamPlugin) {
        if plugin.is_other() {
            self.pause();
        }
    }

    /// Lets other processes open the store until the plugin call needs the store again.
    pub(super) fn pause(&self) {
        self.session.pause();
    }

    /// Runs a future to completion, with the deadline of the plugin call.
    ///
    /// # Errors
    /// Any error that the future returns.
    pub(super) fn run<T>(&self, future: impl AsyncFnOnce(Deadline) -> Result<T>) -> Result<T> {
        self.session.run(future(self.session.deadline()))
    }

    /// Stores the endpoint: a new endpoint, or the already stored endpoint with these facts.
    ///
    /// # Errors
    /// An error if another plugin call has stored the endpoint in the meantime, and any other store error.
    pub(super) fn store(&mut self, name: &str, facts: &EndpointFacts) -> Result<()> {
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

    /// Stores an endpoint document unchanged.
    ///
    /// # Errors
    /// Returns the same errors as [`store`](Self::store).
    fn store_document(&mut self, endpoint: &WorkloadEndpoint, replaced: Option<Revision>) -> Result<()> {
        let orchestrator = self.setup.workload.orchestrator;
        let stored = self.session.run(self.pending.store(endpoint, replaced, orchestrator));
        stored.map_err(|error| explain(error, NetworkRules::Calico).into())
    }

    /// Releases the addresses of a failed ADD, unless the container had one of the addresses before: a release always
    /// includes all addresses of the container. An error is only logged, since the runtime calls DEL as well.
    pub(super) fn release(&mut self, plugin: &IpamPlugin, assigned: &AddResult) {
        let had = self.found.as_ref().filter(|(found, _)| found.container() == self.setup.call.container);
        let had = had.map(|(found, _)| found.addresses()).unwrap_or_default();
        if assigned.ips.is_empty() || assigned.addresses().iter().any(|address| had.contains(address)) {
            return;
        }
        self.release_all(plugin);
    }

    /// Releases all addresses of the container through the IPAM plugin. An error is only logged.
    fn release_all(&mut self, plugin: &IpamPlugin) {
        self.release_store(plugin);
        if let Err(error) = self.setup.call_later(plugin, CniVerb::Del, &*self.allocator()) {
            tracing::warn!(
                %error,
                "cannot release the container's addresses after a failed ADD; the addresses stay assigned until DEL"
            );
        }
    }

    /// Releases an address, unless the address belongs to another container by now.
    ///
    /// # Errors
    /// Any store error.
    pub(super) fn release_address(&mut self, request: &ReleaseRequest) -> Result<()> {
        let session = &self.session;
        match session.run(session.ipam().release_ips(std::slice::from_ref(request), session.deadline())) {
            Ok(_) | Err(ipam_core::Error::ReleaseConflict(_)) => Ok(()),
            Err(error) => Err(explain(error, NetworkRules::Calico).into()),
        }
    }

    /// Returns the CNI result that ADD prints.
    ///
    /// # Errors
    /// An error for a result without an address in a CNI version before 0.3.0.
    pub(super) fn answer(&self, assigned: AddResult, host_interface: &str, mac: &str) -> Result<String> {
        let setup = self.setup;
        let outside = ResultInterface { name: host_interface.to_owned(), ..ResultInterface::default() };
        let inside = ResultInterface {
            name: setup.call.interface.clone(),
            mac: Some(mac.to_owned()),
            mtu: Some(setup.mtu).filter(|mtu| *mtu > 0),
            sandbox: Some(setup.netns().to_string_lossy().into_owned()),
        };
        // As in Calico, a configuration without a version gets a result of CNI version 0.2.0.
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

/// Creates the interfaces, and records the host interface's name and the container's MAC address in `facts`.
///
/// # Errors
/// The message of [`wiring::Error`], or the message of the external data plane without a prefix. After an error, the
/// container has no interface.
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
            // The external data plane may have created the interfaces despite the error.
            let made = made.inspect_err(|_| remove_interfaces(add))?;
            facts.interface = made.host_interface;
            facts.mac = made.mac.text;
        }
    }
    Ok(())
}

/// Refuses prefixes for an external data plane. The data plane's protocol has no field for prefixes: only the first
/// address of a prefix would be routed to the container.
fn routes_addresses(plan: &Plan) -> Result<()> {
    let Some(prefix) = plan.prefixes.first() else { return Ok(()) };
    let error = format!("the program of dataplane_options routes single addresses, and {prefix} is a prefix");
    Err(CniError::internal(error).with_details("name pools of addresses in ipam, or leave dataplane_options out"))
}

/// Removes the interfaces of a failed ADD. An error is only logged, since the runtime calls DEL as well.
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

/// The rules for packets that leave the machine; `None` where Felix sets the rules.
struct OutgoingRules(Option<MasqueradedPools>);

/// The pools of a store whose addresses are masqueraded, and all pools of that store.
struct MasqueradedPools {
    /// The instance name of the store's daemon.
    store: String,
    masqueraded: Vec<IpNet>,
    /// All pools of the store, including disabled pools, whose running containers keep their addresses.
    all: Vec<IpNet>,
}

impl OutgoingRules {
    /// Returns outgoing rules that the plugin sets, for all pools of the store at this location.
    fn by_us(location: &Location, pools: &[Pool]) -> Self {
        let store = served::instance(location).unwrap_or_default();
        let masqueraded = pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect();
        Self(Some(MasqueradedPools { store, masqueraded, all: pools.iter().map(Pool::cidr).collect() }))
    }

    /// Returns no outgoing rules, since Felix sets them.
    fn by_calico() -> Self {
        Self(None)
    }

    /// Enables forwarding and masquerading for a container with these addresses.
    ///
    /// The rules are rebuilt for all current pools. The rules of a changed or deleted pool therefore disappear with the
    /// next container of any pool. A failure is an error only if this container needs the rules.
    ///
    /// # Errors
    /// The message of [`wiring::Error`], after the address that needs masquerading.
    fn ensure(&self, addresses: &[IpAddr]) -> Result<()> {
        let Some(MasqueradedPools { store, masqueraded, all }) = &self.0 else { return Ok(()) };
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
        // Packets between containers of this machine need IP forwarding for IPv6 only.
        let forwarded: Vec<IpAddr> =
            addresses.iter().filter(|address| address.is_ipv6() || is_masqueraded(address)).copied().collect();
        ensure_forwarding(&forwarded).map_err(wiring_error)
    }
}

/// Carries out ADD of a plain container, which belongs to no pod.
///
/// # Errors
/// An error with Calico's message. A failed ADD has undone its changes.
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

/// Adds another network's profile to the endpoint of a container that already has its interface. The rest of the
/// endpoint is unchanged.
fn join_network(add: &mut AddOperation<'_, '_>, endpoint: &WorkloadEndpoint, revision: Revision) -> Result<String> {
    let assigned = AddResult::of_addresses(&endpoint.addresses());
    add.store_document(endpoint, Some(revision))?;
    add.answer(assigned, endpoint.interface(), endpoint.mac())
}

/// Returns the facts about a container's endpoint before the container has addresses.
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

/// Wires the container and stores its endpoint with these profiles. A container that already has an endpoint has lost
/// its interface together with its network namespace. The IPAM plugin then chooses addresses again, since the old
/// addresses may have been released.
fn wire_container(add: &mut AddOperation<'_, '_>, profiles: Vec<String>) -> Result<String> {
    let setup = add.setup;
    let name = setup.workload.endpoint(&setup.call.interface)?;
    let mut facts = container_facts(add, add.host_interface(), profiles);
    // Check the names first; Calico checks the names only after all changes.
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    add.release_store(&plugin);
    if add.found.is_some() && plugin.is_other() {
        // Not every IPAM plugin accepts a second ADD for the same attachment.
        add.release_all(&plugin);
    }
    let mut assigned = plugin.call(&setup.ipam_call(CniVerb::Add), &*add.allocator())?;
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
        // As in Calico, the result of a repeated ADD contains only the addresses.
        let prefixes = assigned.prefixes;
        assigned = AddResult { prefixes, ..AddResult::of_addresses(&facts.addresses) };
    }
    add.answer(assigned, &facts.interface, &facts.mac)
}

/// Removes the label of an endpoint's namespace, because Calico sets this label separately.
fn endpoint_labels(mut labels: Labels) -> Labels {
    labels.remove("projectcalico.org.namespace");
    labels
}
