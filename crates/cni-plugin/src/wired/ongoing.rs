//! An ADD under way: the store that it has open, and the steps that it can take and undo.

use std::sync::Arc;
use std::time::Instant;

use agent::{Allocator, Result, Rules, Session, explain};
use ipam_core::endpoints::{Before, EndpointQuery, PendingEndpoint, Pools};
use ipam_core::model::{EndpointFacts, ReleaseRequest, WorkloadEndpoint};
use kv::{Deadline, Revision};
use wiring::{Plan, Wired};

use super::ipam::IpamPlugin;
use super::outgoing::Outgoing;
use super::remover;
use super::setup::Setup;
use super::{WIRING, told};
use crate::env::Verb;
use crate::result::{AddResult, Interface};

/// An ADD that has read the store.
pub(super) struct Add<'s, 'a> {
    pub(super) setup: &'s Setup<'a>,
    session: Arc<Session>,
    pending: PendingEndpoint,
    /// The endpoint that the workload has already.
    pub(super) found: Option<(WorkloadEndpoint, Revision)>,
    /// The way of its packets out of this machine.
    outgoing: Outgoing,
}

impl<'s, 'a> Add<'s, 'a> {
    /// Reads the endpoints of the workload.
    ///
    /// # Errors
    /// Those of the store; a name that cannot be an endpoint's.
    pub(super) fn begin(setup: &'s Setup<'a>, session: Arc<Session>) -> Result<Self> {
        let workload = &setup.workload;
        let prefix = workload.prefix();
        let query = EndpointQuery {
            namespace: workload.namespace.clone(),
            prefix: prefix.clone().ok(),
            profile: setup.conf.net.policy.kind.is_empty().then(|| setup.conf.net.name.clone()),
            pools: if setup.is_alone() { Pools::Read } else { Pools::Skipped },
        };
        let (pending, before) = setup.begin(&session, query)?;
        prefix?;
        let Before { endpoints, pools, .. } = before;
        // calico-node leaves this file on its nodes: a network of Margay's own may run beside it.
        let has_felix = !setup.is_alone() || setup.invocation.host.nodename_file.exists();
        let outgoing = if has_felix { Outgoing::by_calico() } else { Outgoing::by_us(&setup.store.location, &pools) };
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
    pub(super) fn connect(&self, plan: &mut Plan) -> Result<Wired> {
        let (netns, deadline) = (self.setup.netns(), Instant::now() + WIRING);
        let wired = match wiring::connect(&netns, plan, deadline) {
            Err(wiring::Error::Taken(_)) => {
                plan.host_interface = self.setup.workload.other_host_interface();
                wiring::connect(&netns, plan, deadline)
            }
            done => done,
        };
        let wired = wired.map_err(told)?;
        // The host's settings come last: a container that cannot be wired changes none.
        self.outgoing.ensure(&plan.addresses).inspect_err(|_| self.disconnect())?;
        Ok(wired)
    }

    /// True if the container has this interface.
    ///
    /// # Errors
    /// The texts of [`wiring::Error`].
    pub(super) fn has_interface(&self, name: &str) -> Result<bool> {
        wiring::has_interface(&self.setup.netns(), name, Instant::now() + WIRING).map_err(told)
    }

    /// Removes the container's interface after a failure. A newer ADD of the same pod may have replaced the host's end, so the
    /// container's end counts. The runtime calls DEL, too, so an error here is only logged.
    pub(super) fn disconnect(&self) {
        let (netns, interface) = (self.setup.netns(), &self.setup.call.interface);
        if let Err(error) = wiring::disconnect(&netns, interface, Instant::now() + WIRING, remover::start) {
            tracing::warn!(%error, interface, "an interface of a failed ADD stays until DEL");
        }
    }

    /// The allocator for an IPAM plugin that is this program.
    pub(super) fn allocator(&self) -> Box<dyn Allocator> {
        Setup::allocator(&self.session)
    }

    /// Lets an IPAM plugin that is another program have the store, which it may need.
    pub(super) fn make_way(&self, plugin: &IpamPlugin) {
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
    pub(super) fn store_document(&mut self, endpoint: &WorkloadEndpoint, replaced: Option<Revision>) -> Result<()> {
        let orchestrator = self.setup.workload.orchestrator;
        let stored = self.session.run(self.pending.store(endpoint, replaced, orchestrator));
        stored.map_err(|error| explain(error, Rules::Calico).into())
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
    pub(super) fn release_all(&mut self, plugin: &IpamPlugin) {
        self.make_way(plugin);
        if let Err(error) = self.setup.call_later(plugin, Verb::Del, &*self.allocator()) {
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
            Err(error) => Err(explain(error, Rules::Calico).into()),
        }
    }

    /// The text that ADD prints.
    ///
    /// # Errors
    /// A result before 0.3.0 without an address.
    pub(super) fn answer(&self, assigned: AddResult, host_interface: &str, mac: &str) -> Result<String> {
        let setup = self.setup;
        let outside = Interface { name: host_interface.to_owned(), ..Interface::default() };
        let inside = Interface {
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
