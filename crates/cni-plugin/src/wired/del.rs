//! DEL takes a container's network down.

use std::sync::Arc;
use std::time::Instant;

use agent::{
    Allocator, Answer, CniError, Code, Del, Failure, Result, Rules, Served, Session, StoreAt, explain, is_no_store,
};
use ipam_core::endpoints::{EndpointOf, EndpointOwner};
use ipam_core::model::Orchestrator;
use kv::Purpose;
use tokio::runtime::Builder;

use super::check::finish;
use super::ipam::IpamPlugin;
use super::remover;
use super::setup::Setup;
use super::told;
use crate::dataplane_grpc::Dataplane;
use crate::env::Verb;
use crate::netns;

/// An allocator whose DEL deletes the endpoint in the same commit.
struct WithEndpoint<'e> {
    inner: Box<dyn Allocator>,
    endpoint: &'e EndpointOf,
}

impl Allocator for WithEndpoint<'_> {
    fn call(&self, at: &StoreAt, verb: &agent::Verb) -> Result<Answer> {
        let agent::Verb::Del(del) = verb else { return self.inner.call(at, verb) };
        self.inner.call(at, &agent::Verb::Del(Del { endpoint: Some(self.endpoint.clone()), ..del.clone() }))
    }
}

/// DEL: the interface, the address and the endpoint. The plugin tries each of them, and the first error is the answer. A store
/// that is not ready stops DEL at once, as in Calico's plugin.
///
/// # Errors
/// Calico's texts.
pub(super) fn del(setup: &Setup<'_>) -> Result<String> {
    let session = match Session::open(&setup.store, Purpose::Release) {
        Ok(session) => Arc::new(session),
        // Without a store there is no endpoint and no address.
        Err(Failure::Store(error)) if is_no_store(&error, &setup.store.location) => {
            tracing::warn!(%error, "there is no endpoint");
            let unwired = unwire(setup, None);
            let released = match setup.ipam_plugin() {
                // The other program has books of its own.
                Ok(plugin) if plugin.is_other() => setup.call_later(&plugin, Verb::Del, &Served::default()),
                _ => Ok(()),
            };
            return unwired.and(released).map(|()| String::new());
        }
        Err(error) => return Err(without_store(setup, error.into())),
    };
    match setup.check_ready(&session) {
        Err(error) if error.code() == Code::TryAgain => return Err(without_store(setup, error)),
        ready => ready?,
    }
    let endpoint = EndpointOf {
        namespace: setup.workload.namespace.clone(),
        name: setup.workload.endpoint(&setup.call.interface)?,
        owner: match setup.workload.orchestrator {
            Orchestrator::Cni => EndpointOwner::Any,
            Orchestrator::K8s => EndpointOwner::Container(setup.call.container.clone()),
        },
    };
    // The interface goes first: no other container gets the address before. The kernel goes on cleaning up meanwhile.
    let unwired = unwire(setup, Some(&session));
    let released = release(setup, session, &endpoint);
    unwired.and(released)?;
    if setup.is_own_netns() { Err(netns::own_netns_error()) } else { Ok(String::new()) }
}

/// Removes the interface although the store does not answer; the store's error is the answer.
fn without_store(setup: &Setup<'_>, error: CniError) -> CniError {
    if let Err(error) = unwire(setup, None) {
        tracing::warn!(%error, "the interface stays, too");
    }
    error
}

/// Releases the address and deletes the endpoint: in one commit if the IPAM plugin is this program.
fn release(setup: &Setup<'_>, session: Arc<Session>, endpoint: &EndpointOf) -> Result<()> {
    let plugin = setup.ipam_plugin();
    let released = match &plugin {
        Ok(plugin @ IpamPlugin::Own(_)) => {
            let inner = Setup::allocator(&session);
            let done = plugin.call(&setup.ipam_call(Verb::Del), &WithEndpoint { inner, endpoint });
            if done.is_ok() {
                finish(session);
                return Ok(());
            }
            done.map(drop)
        }
        Ok(plugin) => {
            let deleted = delete(session, endpoint);
            return setup.call_later(plugin, Verb::Del, &Served::default()).and(deleted);
        }
        Err(error) => Err(error.clone()),
    };
    // The endpoint goes although the address could not be released.
    released.and(delete(session, endpoint))
}

fn delete(session: Arc<Session>, endpoint: &EndpointOf) -> Result<()> {
    let deleted = session.run(session.ipam().delete_endpoint(endpoint, session.deadline()));
    finish(session);
    match deleted {
        Ok(_) => Ok(()),
        Err(error) => {
            let error = CniError::from(explain(error, Rules::Calico));
            let message = format!("error deleting endpoint: {}", error.message());
            Err(CniError::new(error.code(), message).with_details(error.details()))
        }
    }
}

/// Takes the interface down. A namespace that is the plugin's own keeps its interfaces.
fn unwire(setup: &Setup<'_>, session: Option<&Arc<Session>>) -> Result<()> {
    if setup.is_own_netns() {
        return Ok(());
    }
    let (netns, interface) = (setup.netns(), &setup.call.interface);
    let Dataplane::Grpc(program) = setup.dataplane()? else {
        return wiring::disconnect(&netns, interface, Instant::now() + super::WIRING, remover::start).map_err(told);
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
