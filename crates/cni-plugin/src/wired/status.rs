//! STATUS: whether an ADD can be served now.

use std::time::Duration;

use agent::{Code, Result, Rights, Served, Session};
use ipam_core::model::keys;
use kv::Purpose;

use super::ipam::IpamPlugin;
use super::setup::Setup;
use crate::env::Verb;

/// How long the datastore may take.
const PATIENCE: Duration = Duration::from_millis(900);
/// The codes with which another plugin says that it does not know the verb, or not in this version.
pub(super) const UNKNOWN_VERB: [u32; 2] = [1, 4];

/// STATUS. Only the IPAM plugin checks an embedded store; it does not fail if other processes have it open.
///
/// # Errors
/// The reason why no ADD can be served, with code 50.
pub(super) fn status(setup: &Setup<'_>) -> Result<String> {
    ready(setup).map_err(|error| error.with_code(Code::Unavailable))
}

fn ready(setup: &Setup<'_>) -> Result<String> {
    if setup.store.location.is_shared() {
        let mut at = setup.store.clone();
        at.patience = at.patience.min(PATIENCE);
        let session = Session::open(&at, Purpose::Any)?;
        let ready = setup.check_ready(&session).and_then(|()| check_rights(setup, &session));
        session.close();
        ready?;
    } else {
        tracing::info!("no Felix runs on a store of one machine, so network policies have no effect");
    }
    let plugin = setup.ipam_plugin()?;
    match plugin.call(&setup.ipam_call(Verb::Status), &Served::default()) {
        Err(error) if matches!(plugin, IpamPlugin::Other(_)) && UNKNOWN_VERB.contains(&error.code().number()) => {
            tracing::debug!(%error, "the IPAM plugin knows no STATUS");
            Ok(String::new())
        }
        done => done.map(|_| String::new()),
    }
}

/// Checks that the login may write the endpoint of a container.
fn check_rights(setup: &Setup<'_>, session: &Session) -> Result<()> {
    let results = format!("endpoints of {}", setup.conf.net.name);
    let Some(rights) = Rights::of(&setup.store.location, &results, &setup.workload.node) else { return Ok(()) };
    let key = keys::workload_endpoint("default", "status");
    Ok(session.run(rights.check(&*session.store(), vec![key]))?)
}
