//! ADD: the store that it has open, the steps that it can take and undo, and the ADD of a plain container, for which no orchestrator names
//! a pod.
//!
//! The kernel makes the interfaces of a container, or another program does. On a store of one machine the plugin enables forwarding on the
//! host, and masquerades the pools with `natOutgoing`. On etcd, and on a machine where calico-node runs, Felix does both, and the plugin
//! does nothing.

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

/// ADD.
///
/// # Errors
/// Calico's texts. Nothing that this call made is left then.
pub(super) fn add(setup: &MainContext<'_>) -> Result<String> {
    // Calico finds that out when everything is done, and leaves it.
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

/// Waits for the gates that the configuration names, once the store is ready. The call's time begins afterwards.
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

/// An ADD that has read the store.
pub(super) struct AddOperation<'s, 'a> {
    pub(super) setup: &'s MainContext<'a>,
    session: Arc<Session>,
    pending: PendingEndpoint,
    /// The endpoint that the workload has already.
    pub(super) found: Option<(WorkloadEndpoint, Revision)>,
    /// The way of its packets out of this machine.
    outgoing: OutgoingRules,
}

impl<'s, 'a> AddOperation<'s, 'a> {
    /// Reads the endpoints of the workload.
    ///
    /// # Errors
    /// Those of the store; a name that cannot be an endpoint's.
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
        // calico-node leaves this file on its nodes: a network of Margay's own may run beside it.
        let has_felix = !setup.is_alone() || setup.invocation.host.nodename_file.exists();
        let outgoing =
            if has_felix { OutgoingRules::by_calico() } else { OutgoingRules::by_us(&setup.store.location, &pools) };
        let found = endpoints.into_iter().find(|(found, _)| workload.has(found));
        Ok(Self { setup, session, pending, found, outgoing })
    }

    /// The name of the interface on the host.
    pub(super) fn host_interface(&self) -> String {
        let felix = self.setup.invocation.environment.text("FELIX_INTERFACEPREFIX");
        self.setup.workload.host_interface(&felix)
    }

    /// Wires the container. The plan gets another name for the host's interface if another container has the planned one: two
    /// ids may begin the same.
    ///
    /// # Errors
    /// The texts of [`wiring::Error`]. The container has no interface then.
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
        // The host's settings come last: a container that cannot be wired changes none.
        self.outgoing.ensure(&plan.addresses).inspect_err(|_| self.disconnect())?;
        Ok(wired)
    }

    /// True if the container has this interface.
    ///
    /// # Errors
    /// The texts of [`wiring::Error`].
    fn has_interface(&self, name: &str) -> Result<bool> {
        wiring::has_interface(&self.setup.netns(), name, Instant::now() + WIRING_TIMEOUT).map_err(wiring_error)
    }

    /// Removes the container's interface after a failure. A newer ADD of the same pod may have replaced the host's end, so the
    /// container's end counts. The runtime calls DEL, too, so an error here is only logged.
    pub(super) fn disconnect(&self) {
        let (netns, interface) = (self.setup.netns(), &self.setup.call.interface);
        if let Err(error) =
            wiring::disconnect(&netns, interface, Instant::now() + WIRING_TIMEOUT, invocation::start_remover)
        {
            tracing::warn!(%error, interface, "an interface of a failed ADD stays until DEL");
        }
    }

    /// The allocator for an IPAM plugin that is this program.
    pub(super) fn allocator(&self) -> Box<dyn Allocator> {
        MainContext::allocator(&self.session)
    }

    /// Lets an IPAM plugin that is another program have the store, which it may need.
    pub(super) fn release_store(&self, plugin: &IpamPlugin) {
        if plugin.is_other() {
            self.pause();
        }
    }

    /// Lets other programs have a store that they must wait for otherwise, until this call needs it again.
    pub(super) fn pause(&self) {
        self.session.pause();
    }

    /// Runs a future to its end, with the time that the call has left.
    ///
    /// # Errors
    /// The future's.
    pub(super) fn run<T>(&self, future: impl AsyncFnOnce(Deadline) -> Result<T>) -> Result<T> {
        self.session.run(future(self.session.deadline()))
    }

    /// Stores the endpoint: a new one, or the one that was found with these facts.
    ///
    /// # Errors
    /// Another call stored the endpoint meanwhile; those of the store.
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

    /// Stores a document as it is.
    ///
    /// # Errors
    /// Those of [`store`](Self::store).
    fn store_document(&mut self, endpoint: &WorkloadEndpoint, replaced: Option<Revision>) -> Result<()> {
        let orchestrator = self.setup.workload.orchestrator;
        let stored = self.session.run(self.pending.store(endpoint, replaced, orchestrator));
        stored.map_err(|error| explain(error, NetworkRules::Calico).into())
    }

    /// Releases the addresses of a call that fails, unless the container had one of them before: a release is about all of
    /// them. The runtime calls DEL, too, so an error here is only logged.
    pub(super) fn release(&mut self, plugin: &IpamPlugin, assigned: &AddResult) {
        let had = self.found.as_ref().filter(|(found, _)| found.container() == self.setup.call.container);
        let had = had.map(|(found, _)| found.addresses()).unwrap_or_default();
        if assigned.ips.is_empty() || assigned.addresses().iter().any(|address| had.contains(address)) {
            return;
        }
        self.release_all(plugin);
    }

    /// Releases all addresses that the container has from IPAM. An error is only logged.
    fn release_all(&mut self, plugin: &IpamPlugin) {
        self.release_store(plugin);
        if let Err(error) = self.setup.call_later(plugin, CniVerb::Del, &*self.allocator()) {
            tracing::warn!(%error, "an address of a failed ADD stays assigned until DEL");
        }
    }

    /// Releases an address, unless it is another one's by now.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn release_address(&mut self, request: &ReleaseRequest) -> Result<()> {
        let session = &self.session;
        match session.run(session.ipam().release_ips(std::slice::from_ref(request), session.deadline())) {
            Ok(_) | Err(ipam_core::Error::ReleaseConflict(_)) => Ok(()),
            Err(error) => Err(explain(error, NetworkRules::Calico).into()),
        }
    }

    /// The text that ADD prints.
    ///
    /// # Errors
    /// A result before 0.3.0 without an address.
    pub(super) fn answer(&self, assigned: AddResult, host_interface: &str, mac: &str) -> Result<String> {
        let setup = self.setup;
        let outside = ResultInterface { name: host_interface.to_owned(), ..ResultInterface::default() };
        let inside = ResultInterface {
            name: setup.call.interface.clone(),
            mac: Some(mac.to_owned()),
            mtu: Some(setup.mtu).filter(|mtu| *mtu > 0),
            sandbox: Some(setup.netns().to_string_lossy().into_owned()),
        };
        // A configuration without a version gets a result of 0.2.0, as from Calico.
        let version = setup.json.text_member("cniVersion").unwrap_or("");
        assigned.on([outside, inside]).to_json(if version.is_empty() { "0.2.0" } else { version })
    }

    /// Closes the store.
    pub(super) fn close(self) {
        let Self { session, pending, .. } = self;
        drop(pending);
        if let Ok(session) = Arc::try_unwrap(session) {
            session.close();
        }
    }
}

/// Makes the interfaces, and records in the facts the name on the host and the MAC address in the container.
///
/// # Errors
/// The texts of [`wiring::Error`]; those of the other program, which gets no prefix. The container has no interface then.
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
            // The other program may have made the interfaces all the same.
            let made = made.inspect_err(|_| remove_interfaces(add))?;
            facts.interface = made.host_interface;
            facts.mac = made.mac.text;
        }
    }
    Ok(())
}

/// The other program's protocol has no member for prefixes: it would send the first address of each to the container, and
/// nothing else.
fn routes_addresses(plan: &Plan) -> Result<()> {
    let Some(prefix) = plan.prefixes.first() else { return Ok(()) };
    let error = format!("the program of dataplane_options routes single addresses, and {prefix} is a prefix");
    Err(CniError::internal(error).with_details("name pools of addresses in ipam, or leave dataplane_options out"))
}

/// Removes the interfaces of a call that fails. The runtime calls DEL, too, so an error here is only logged.
pub(super) fn remove_interfaces(add: &AddOperation<'_, '_>) {
    match add.setup.dataplane() {
        Ok(Dataplane::Grpc(program)) => {
            let setup = add.setup;
            let netns = setup.netns();
            let removed = add.run(async |deadline| {
                program.del(&setup.call.interface, &netns.to_string_lossy(), deadline.remaining()).await
            });
            if let Err(error) = removed {
                tracing::warn!(%error, "an interface of a failed ADD stays until DEL");
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

/// The rules for packets that leave the machine; `None` where Felix makes them.
struct OutgoingRules(Option<MasqueradedPools>);

/// The pools of a store.
struct MasqueradedPools {
    /// The store, as its daemon is named.
    store: String,
    masqueraded: Vec<IpNet>,
    /// Disabled ones as well: containers that run on keep their addresses.
    all: Vec<IpNet>,
}

impl OutgoingRules {
    /// The plugin makes the rules, for these pools: all of the store at this location.
    fn by_us(location: &Location, pools: &[Pool]) -> Self {
        let store = served::instance(location).unwrap_or_default();
        let masqueraded = pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect();
        Self(Some(MasqueradedPools { store, masqueraded, all: pools.iter().map(Pool::cidr).collect() }))
    }

    /// Felix makes the rules.
    fn by_calico() -> Self {
        Self(None)
    }

    /// Opens the way for a container with these addresses.
    ///
    /// The rules are those of all pools as they are now, so that rules of a pool that has been changed or deleted go with the
    /// next container of whatever pool. That something fails counts only for a container that needs it.
    ///
    /// # Errors
    /// The text of [`wiring::Error`], with what needs it in front.
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
            (Err(error), None) => tracing::warn!(%error, "the rules for pools with natOutgoing stay as they are"),
        }
        // Among themselves, containers need it for IPv6 alone.
        let forwarded: Vec<IpAddr> =
            addresses.iter().filter(|address| address.is_ipv6() || is_masqueraded(address)).copied().collect();
        ensure_forwarding(&forwarded).map_err(wiring_error)
    }
}

/// ADD of a plain container.
///
/// # Errors
/// Calico's texts. Nothing that this call made is left then.
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

/// The container has an endpoint and its interface: this stores the endpoint with another network's profile, and nothing else.
fn join_network(add: &mut AddOperation<'_, '_>, endpoint: &WorkloadEndpoint, revision: Revision) -> Result<String> {
    let assigned = AddResult::of_addresses(&endpoint.addresses());
    add.store_document(endpoint, Some(revision))?;
    add.answer(assigned, endpoint.interface(), endpoint.mac())
}

/// The facts of a container's endpoint before it has addresses.
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

/// Wires the container, whose endpoint gets these profiles. If it has an endpoint, it lost its interface together with
/// its network namespace. IPAM then decides anew which addresses it has, since somebody may have released the old ones.
fn wire_container(add: &mut AddOperation<'_, '_>, profiles: Vec<String>) -> Result<String> {
    let setup = add.setup;
    let name = setup.workload.endpoint(&setup.call.interface)?;
    let mut facts = container_facts(add, add.host_interface(), profiles);
    // Calico checks the names after all the work.
    check_endpoint(&name, &facts).map_err(CniError::internal)?;
    let plugin = setup.ipam_plugin()?;
    add.release_store(&plugin);
    if add.found.is_some() && plugin.is_other() {
        // Not every IPAM plugin takes a second ADD of the same attachment.
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
        // A repeated ADD answers with the addresses alone, as Calico's.
        let prefixes = assigned.prefixes;
        assigned = AddResult { prefixes, ..AddResult::of_addresses(&facts.addresses) };
    }
    add.answer(assigned, &facts.interface, &facts.mac)
}

/// The labels of an endpoint without the one that names its namespace, which Calico sets by itself.
fn endpoint_labels(mut labels: Labels) -> Labels {
    labels.remove("projectcalico.org.namespace");
    labels
}
