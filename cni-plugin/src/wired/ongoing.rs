//! An ADD under way: the store that it has open, and the steps that it can take and undo.

use std::sync::Arc;
use std::time::Instant;

use ipam_core::endpoints::{Before, EndpointQuery, PendingEndpoint, Pools};
use ipam_core::model::{EndpointFacts, ReleaseRequest, WorkloadEndpoint};
use kv::{Deadline, Revision};
use wiring::{Plan, Wired};

use super::WIRING;
use super::answer::Answer;
use super::ipam::{IpamCall, IpamPlugin};
use super::ipam_result::IpamResult;
use super::outgoing::Outgoing;
use super::remover;
use super::setup::Setup;
use crate::allocator::failure::explain;
use crate::error::{CniError, Result};
use crate::request::Allocator;
use crate::run::Rules;
use crate::served::Served;
use crate::session::{Paused, Session};

/// An ADD that has read the store.
pub(super) struct Add<'s, 'a> {
    pub(super) setup: &'s Setup<'a>,
    pub(super) session: SessionState,
    pub(super) pending: Option<PendingEndpoint>,
    /// The endpoint that the workload has already.
    pub(super) found: Option<(WorkloadEndpoint, Revision)>,
    /// The way of its packets out of this machine.
    outgoing: Outgoing,
}

/// The store of an ADD.
pub(super) enum SessionState {
    Open(Arc<Session>),
    Paused(Box<Paused>),
    /// The store could not be opened again.
    Gone,
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
        Ok(Self { setup, session: SessionState::Open(session), pending: Some(pending), found, outgoing })
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
                wiring::connect(&netns, plan, deadline)?
            }
            done => done?,
        };
        // The host's settings come last: a container that cannot be wired changes none.
        self.outgoing.ensure(&plan.addresses).inspect_err(|_| self.disconnect())?;
        Ok(wired)
    }

    /// True if the container has this interface.
    ///
    /// # Errors
    /// The texts of [`wiring::Error`].
    pub(super) fn has_interface(&self, name: &str) -> Result<bool> {
        Ok(wiring::has_interface(&self.setup.netns(), name, Instant::now() + WIRING)?)
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
        match &self.session {
            SessionState::Open(session) => Setup::allocator(session),
            SessionState::Paused(_) | SessionState::Gone => Box::new(Served::default()),
        }
    }

    /// Lets an IPAM plugin that is another program have the store, which it may need; opens it for one that is this program.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn make_way(&mut self, plugin: &IpamPlugin) -> Result<()> {
        if plugin.is_other() {
            self.pause();
            return Ok(());
        }
        self.reopened().map(drop)
    }

    /// Lets other programs have a store that they must wait for otherwise.
    pub(super) fn pause(&mut self) {
        if !matches!(&self.session, SessionState::Open(session) if session.is_exclusive()) {
            return;
        }
        self.session = match std::mem::replace(&mut self.session, SessionState::Gone) {
            SessionState::Open(session) => match Arc::try_unwrap(session) {
                Ok(session) => SessionState::Paused(Box::new(session.pause())),
                Err(session) => SessionState::Open(session),
            },
            other => other,
        };
    }

    /// Runs a future to its end, with the time that the call has left.
    ///
    /// # Errors
    /// The future's.
    pub(super) fn run<T>(&self, future: impl AsyncFnOnce(Deadline) -> Result<T>) -> Result<T> {
        match &self.session {
            SessionState::Open(session) => session.run(future(session.deadline())),
            SessionState::Paused(paused) => paused.run(future(paused.deadline())),
            SessionState::Gone => Err(gone()),
        }
    }

    /// The open store, opened again if other programs had it.
    fn reopened(&mut self) -> Result<Arc<Session>> {
        match std::mem::replace(&mut self.session, SessionState::Gone) {
            SessionState::Open(session) => {
                self.session = SessionState::Open(Arc::clone(&session));
                Ok(session)
            }
            SessionState::Paused(paused) => {
                let session = Arc::new(paused.resume()?);
                self.pending = self.pending.take().map(|pending| pending.reopened(session.ipam()));
                self.session = SessionState::Open(Arc::clone(&session));
                Ok(session)
            }
            SessionState::Gone => Err(CniError::internal("the store could not be opened again")),
        }
    }

    /// Stores the endpoint: a new one, or the one that was found with these facts.
    ///
    /// # Errors
    /// Another call stored the endpoint meanwhile; those of the store.
    pub(super) fn store(&mut self, name: &str, facts: &EndpointFacts) -> Result<()> {
        let pending = self.pending.as_ref().ok_or_else(gone)?;
        let (endpoint, replaced) = match &self.found {
            Some((found, revision)) => {
                let mut endpoint = found.clone();
                endpoint.update(facts);
                (endpoint, Some(*revision))
            }
            None => (pending.new_endpoint(name, facts), None),
        };
        self.store_document(&endpoint, replaced)
    }

    /// Stores a document as it is.
    ///
    /// # Errors
    /// Those of [`store`](Self::store).
    pub(super) fn store_document(&mut self, endpoint: &WorkloadEndpoint, replaced: Option<Revision>) -> Result<()> {
        let session = self.reopened()?;
        let orchestrator = self.setup.workload.orchestrator;
        let pending = self.pending.as_mut().ok_or_else(gone)?;
        let stored = session.run(pending.store(endpoint, replaced, orchestrator));
        stored.map_err(|error| explain(error, Rules::Calico).into())
    }

    /// Releases the addresses of a call that fails, unless the container had one of them before: a release is about all of
    /// them. The runtime calls DEL, too, so an error here is only logged.
    pub(super) fn release(&mut self, plugin: &IpamPlugin, assigned: &IpamResult) {
        let had = self.found.as_ref().filter(|(found, _)| found.container() == self.setup.call.container);
        let had = had.map(|(found, _)| found.addresses()).unwrap_or_default();
        if assigned.ips.is_empty() || assigned.addresses().iter().any(|address| had.contains(address)) {
            return;
        }
        self.release_all(plugin);
    }

    /// Releases all addresses that the container has from IPAM. An error is only logged.
    pub(super) fn release_all(&mut self, plugin: &IpamPlugin) {
        // Another program may need the store.
        if plugin.is_other() {
            self.pause();
        }
        let released = self.setup.stdin_to_release().and_then(|stdin| {
            let call = IpamCall { stdin: &stdin, ..self.setup.ipam_call("DEL") };
            plugin.call(&call, &*self.allocator())
        });
        if let Err(error) = released {
            tracing::warn!(%error, "an address of a failed ADD stays assigned until DEL");
        }
    }

    /// Releases an address, unless it is another one's by now.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn release_address(&mut self, request: &ReleaseRequest) -> Result<()> {
        let session = self.reopened()?;
        match session.run(session.ipam().release_ips(std::slice::from_ref(request), session.deadline())) {
            Ok(_) | Err(ipam_core::Error::ReleaseConflict(_)) => Ok(()),
            Err(error) => Err(explain(error, Rules::Calico).into()),
        }
    }

    /// The text that ADD prints.
    ///
    /// # Errors
    /// A result before 0.3.0 without an address.
    pub(super) fn answer(&self, assigned: &IpamResult, host_interface: &str, mac: &str) -> Result<String> {
        let netns = self.setup.netns();
        let answer = Answer {
            assigned,
            host_interface,
            interface: &self.setup.call.interface,
            mac,
            mtu: self.setup.mtu,
            netns: &netns.to_string_lossy(),
        };
        // A configuration without a version gets a result of 0.2.0, as from Calico.
        let version = self.setup.json.text_member("cniVersion").unwrap_or("");
        answer.to_json(if version.is_empty() { "0.2.0" } else { version })
    }

    /// Closes the store.
    pub(super) fn close(self) {
        let Self { session, pending, .. } = self;
        drop(pending);
        if let SessionState::Open(session) = session
            && let Ok(session) = Arc::try_unwrap(session)
        {
            session.close();
        }
    }
}

fn gone() -> CniError {
    CniError::internal("the endpoint was not read")
}
