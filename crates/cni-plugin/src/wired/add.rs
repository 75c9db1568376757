//! ADD.

use std::sync::Arc;
use std::time::Duration;

use agent::{Result, Session};
use ipam_core::model::Orchestrator;
use kv::Purpose;

use super::container;
use super::ongoing::Add;
use super::pod;
use super::setup::Setup;
use crate::kubernetes::gates;
use crate::netns;

/// ADD.
///
/// # Errors
/// Calico's texts. Nothing that this call made is left then.
pub(super) fn add(setup: &Setup<'_>) -> Result<String> {
    // Calico finds that out when everything is done, and leaves it.
    if setup.is_own_netns() {
        return Err(netns::own_netns_error());
    }
    pass_gates(setup)?;
    let session = Arc::new(Session::open(&setup.store, Purpose::Any)?);
    let mut add = Add::begin(setup, session)?;
    let answer = match setup.workload.orchestrator {
        Orchestrator::Cni => container::add(&mut add),
        Orchestrator::K8s => pod::add(&mut add),
    };
    add.close();
    answer
}

/// Waits for the gates that the configuration names, once the store is ready. The call's time begins afterwards.
fn pass_gates(setup: &Setup<'_>) -> Result<()> {
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
