//! DEL.

use std::sync::Arc;
use std::time::Instant;

use ipam_core::endpoints::{EndpointOf, EndpointOwner, EndpointQuery, Pools};
use ipam_core::model::Orchestrator;

use super::check::finish;
use super::ipam::{IpamCall, IpamPlugin};
use super::setup::Setup;
use crate::allocator::failure::{Failure, explain};
use crate::allocator::is_no_store;
use crate::dataplane_grpc::Dataplane;
use crate::error::{CniError, Result};
use crate::netns;
use crate::request::{AddRequest, Allocator, Assigned, CheckRequest, Checked, Collected, DelRequest, GcRequest};
use crate::run::Rules;
use crate::served::Served;
use crate::session::{Purpose, Session};

/// An allocator whose DEL deletes the endpoint in the same commit.
struct WithEndpoint<'e> {
    inner: Box<dyn Allocator>,
    endpoint: &'e EndpointOf,
}

impl Allocator for WithEndpoint<'_> {
    fn add(&self, request: &AddRequest) -> Result<Vec<Assigned>> {
        self.inner.add(request)
    }

    fn del(&self, request: &DelRequest) -> Result<()> {
        self.inner.del(&DelRequest { endpoint: Some(self.endpoint.clone()), ..request.clone() })
    }

    fn check(&self, request: &CheckRequest) -> Result<Checked> {
        self.inner.check(request)
    }

    fn status(&self, request: &AddRequest) -> Result<()> {
        self.inner.status(request)
    }

    fn gc(&self, request: &GcRequest) -> Result<Collected> {
        self.inner.gc(request)
    }
}

/// DEL: the address, the endpoint, and the interface. Each is tried whatever becomes of the others, and the first error is
/// the answer.
///
/// # Errors
/// Calico's texts.
pub(super) fn del(setup: &Setup<'_>) -> Result<String> {
    let session = match Session::open(&setup.store, Purpose::Release) {
        Ok(session) => Arc::new(session),
        // Without a store there is no endpoint and no address.
        Err(Failure::Store(error)) if is_no_store(&error, &setup.store.location) => {
            tracing::warn!(%error, "nothing to release");
            return unwire(setup, None).map(|()| String::new());
        }
        Err(error) => return Err(error.into()),
    };
    let query = EndpointQuery {
        namespace: setup.workload.namespace.clone(),
        prefix: None,
        profile: None,
        pools: Pools::Skipped,
    };
    let (pending, _) = setup.begin(&session, query)?;
    drop(pending);
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
    released.and(unwired)?;
    if setup.is_own_netns() { Err(netns::own_netns_error()) } else { Ok(String::new()) }
}

/// Releases the address and deletes the endpoint: in one commit if the IPAM plugin is this program.
fn release(setup: &Setup<'_>, session: Arc<Session>, endpoint: &EndpointOf) -> Result<()> {
    let plugin = setup.ipam_plugin();
    let released = match &plugin {
        Ok(plugin @ IpamPlugin::Own(_)) => {
            let inner = Setup::allocator(&session);
            let done = plugin.call(&setup.ipam_call("DEL"), &WithEndpoint { inner, endpoint });
            if done.is_ok() {
                finish(session);
                return Ok(());
            }
            done.map(drop)
        }
        Ok(plugin) => {
            let deleted = delete(session, endpoint);
            let released = setup.stdin_to_release().and_then(|stdin| {
                let call = IpamCall { stdin: &stdin, ..setup.ipam_call("DEL") };
                plugin.call(&call, &Served::default())
            });
            return released.map(drop).and(deleted);
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
    match (setup.dataplane()?, session) {
        (Dataplane::Grpc(program), Some(session)) => {
            session.run(program.del(interface, &netns.to_string_lossy(), session.deadline().remaining()))
        }
        _ => Ok(wiring::disconnect(&netns, interface, Instant::now() + super::WIRING)?),
    }
}
