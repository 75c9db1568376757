//! The option `-t`: whether the datastore of a configuration answers.

use std::io::Read;
use std::time::Duration;

use agent::{CniError, Code, Result, Session};
use kv::Purpose;

use super::setup::Setup;
use crate::env::{Call, OwnNetns, Verb};
use crate::gojson::Json;
use crate::invocation::Invocation;
use crate::run::read;

/// How long the datastore may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads a configuration and tests its datastore. Nothing is printed if it answers.
///
/// # Errors
/// Code 100, with the cause in the details.
pub(super) fn test(invocation: &Invocation, stdin: &mut dyn Read) -> Result<String> {
    let failed = |error: CniError| {
        CniError::new(Code::Unreachable, "data store connection failed").with_details(error.message())
    };
    answers(invocation, &read(stdin)?).map_err(failed)?;
    Ok(String::new())
}

fn answers(invocation: &Invocation, text: &[u8]) -> Result<()> {
    let wrong = |reason| CniError::internal(format!("failed to load netconf: {reason}"));
    let json = Json::parse(text).map_err(wrong)?;
    let call = Call {
        verb: Verb::Status,
        command: String::new(),
        container: "test".to_owned(),
        netns: None,
        interface: "eth0".to_owned(),
        args: String::new(),
        own_netns: OwnNetns::Accepted,
    };
    let mut setup = Setup::new(invocation, call, json, text.to_vec())?;
    setup.store.patience = PATIENCE;
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

/// Tests the Kubernetes API, if a kubeconfig is named.
fn kubernetes_answers(setup: &Setup<'_>, session: &Session) -> Result<()> {
    if setup.conf.net.store.kubeconfig.is_empty() {
        return Ok(());
    }
    let failed = |what: &'static str| move |error: CniError| CniError::internal(format!("{what}: {}", error.message()));
    let mut client = setup.kubernetes.client().map_err(failed("error building K8s client config"))?;
    session.run(client.version(PATIENCE)).map_err(failed("unable to connect to K8s server"))
}
