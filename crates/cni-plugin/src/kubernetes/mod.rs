//! Requests to the Kubernetes API: the labels of a container's namespace, by which pools may be chosen, the virtual
//! machine that a pod runs, and the parts of a pod's endpoint.

mod annotations;
mod api;
mod client;
mod dial;
mod files;
pub(crate) mod gates;
mod host_local;
mod kubeconfig;
mod launcher;
mod login;
mod pod;
mod problem;
mod tls;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper::StatusCode;
use ipam_core::model::Labels;
use serde_json::Value;
use tokio::runtime::Builder;

use self::api::{Api, CHECK_ADDRESS};
use self::problem::{Failure, Problem};
use crate::env::Environment;
use crate::netconf::NetConf;
use agent::{CniError, Result};

pub(crate) use annotations::{Allowed, Mac, PodFacts};
pub(crate) use dial::Connection;
pub(crate) use files::check_owner;
pub(crate) use host_local::{DefaultRoutes, HostLocal, default_routes};
pub(crate) use kubeconfig::check_kubeconfig;
pub(crate) use launcher::{Instance, Launcher};
pub(crate) use pod::{Pod, Port};

/// The beginning of the names of pods that may run a virtual machine of KubeVirt's.
pub(crate) const LAUNCHER: &str = "virt-launcher-";
/// The longest that the API is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The name that requests are sent under.
const AGENT: &str = concat!("margay-ipam/", env!("CARGO_PKG_VERSION"));
/// The text of Kubernetes's own client.
const NO_CONFIGURATION: &str =
    "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment variable";

/// The way to the Kubernetes API, and the login for it, as far as the configuration has them. The content of files
/// comes later.
///
/// A value that is set here beats the kubeconfig's, as in Calico's plugin. Without a kubeconfig and an API root the API
/// is that of the cluster in which this process runs. `Debug` shows no secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Kubernetes {
    /// `kubernetes.kubeconfig`.
    pub(crate) kubeconfig: PathBuf,
    /// `kubernetes.k8s_api_root`, or else `policy.k8s_api_root`: a URL.
    pub(crate) api_root: String,
    /// `policy.k8s_auth_token`.
    pub(crate) token: String,
    /// `policy.k8s_certificate_authority`, a file.
    pub(crate) authority: PathBuf,
    /// `policy.k8s_client_certificate`, a file.
    pub(crate) certificate: PathBuf,
    /// `policy.k8s_client_key`, a file.
    pub(crate) key: PathBuf,
    /// `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`.
    pub(crate) service: Option<(String, String)>,
}

impl fmt::Debug for Kubernetes {
    /// The way to the API, without the login.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kubernetes")
            .field("kubeconfig", &self.kubeconfig)
            .field("api_root", &self.api_root)
            .finish_non_exhaustive()
    }
}

impl Kubernetes {
    /// True if namespaces are looked up. As for Calico's plugin, that needs a kubeconfig or Kubernetes's policy;
    /// otherwise no namespace has labels.
    pub(crate) fn are_looked_up(conf: &NetConf) -> bool {
        !conf.store.kubeconfig.is_empty() || conf.policy.kind == "k8s"
    }

    /// The way to the API, as far as the configuration and the environment have it.
    pub(crate) fn from_conf(conf: &NetConf, environment: &Environment) -> Self {
        let policy = &conf.policy;
        let api_root = match conf.store.k8s_api_root.as_str() {
            // Where policies are read; the path of an old version of the API may follow.
            "" => policy.api_root.split("/api/").next().unwrap_or_default(),
            root => root,
        };
        let service = [environment.text("KUBERNETES_SERVICE_HOST"), environment.text("KUBERNETES_SERVICE_PORT")];
        Self {
            kubeconfig: (&conf.store.kubeconfig).into(),
            api_root: api_root.to_owned(),
            token: policy.token.clone(),
            authority: (&policy.authority).into(),
            certificate: (&policy.certificate).into(),
            key: (&policy.key).into(),
            service: service.iter().all(|text| !text.is_empty()).then(|| service.into()),
        }
    }

    /// True if nothing says where the API is.
    fn says_nothing(&self) -> bool {
        self.kubeconfig.as_os_str().is_empty() && self.api_root.is_empty() && self.service.is_none()
    }

    /// The virtual machine that a pod runs, by up to three requests that together take no longer than `patience`, or
    /// five seconds.
    ///
    /// # Errors
    /// Code 999, with Calico's text; `details` says what to do.
    pub(crate) fn launcher(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Launcher> {
        self.find_launcher(namespace, pod, patience.min(LONGEST_WAIT)).map_err(|problem| {
            CniError::internal(format!("failed to get VMI info: {}", problem.what)).with_details(problem.advice)
        })
    }

    /// The labels of a namespace, by one request that takes no longer than `patience`, or five seconds.
    ///
    /// # Errors
    /// Calico's text and the reason; `details` says what to do.
    pub(crate) fn labels(&self, namespace: &str, patience: Duration) -> Result<Labels> {
        self.ask(namespace, patience.min(LONGEST_WAIT)).map_err(|problem| {
            let message = format!("failed to get namespace {namespace}: {}", problem.what);
            CniError::new(problem.code, message).with_details(problem.advice)
        })
    }

    /// A pod, by one request that takes no longer than `patience`, or five seconds.
    ///
    /// # Errors
    /// Those of [`Client::pod`](client::Client::pod).
    pub(crate) fn pod(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Pod> {
        let mut client = self.client()?;
        block_on(client.pod(namespace, pod, patience.min(LONGEST_WAIT))).map_err(client::reported)?
    }

    fn ask(&self, namespace: &str, patience: Duration) -> Result<Labels, Problem> {
        if !is_dns_name(namespace) {
            return Err(Problem::new(
                "this is no name of a namespace",
                "K8S_POD_NAMESPACE in CNI_ARGS says which it is",
            ));
        }
        let mut api = self.access(AGENT)?;
        let path = format!("/api/v1/namespaces/{namespace}");
        let answer = block_on(api.get(&path, patience))?.map_err(|failure| match failure {
            Failure::Unreachable(error) => {
                Problem::passing(format!("{} cannot be reached: {error}", api.url()), CHECK_ADDRESS)
            }
            Failure::Late(patience) => late(&api, patience),
            Failure::Reported(problem) => problem,
        })?;
        if answer.status != StatusCode::OK {
            return Err(refused(&api, answer.status));
        }
        let document: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        if !document["metadata"].is_object() {
            let what = format!("what {} sent is no namespace", api.url());
            return Err(Problem::new(what, "check that this is the address of a Kubernetes API"));
        }
        let labels = document["metadata"]["labels"].as_object().into_iter().flatten();
        Ok(labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect())
    }
}

/// Waits for a future on this thread.
fn block_on<F: Future>(future: F) -> Result<F::Output, Problem> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Problem::passing(format!("cannot start: {error}"), ""))?;
    let output = runtime.block_on(future);
    // A name server that does not answer holds up nobody.
    runtime.shutdown_background();
    Ok(output)
}

fn late(api: &Api, patience: Duration) -> Problem {
    let what = format!("{} gave no answer in {:.1} s", api.url(), patience.as_secs_f32());
    Problem::passing(what, CHECK_ADDRESS)
}

/// The reason why there are no labels.
fn refused(api: &Api, status: StatusCode) -> Problem {
    let url = api.url();
    match status {
        StatusCode::UNAUTHORIZED => Problem::new(
            format!("{url} does not know who asks"),
            "check the token or the client certificate in the kubeconfig; it may have run out",
        ),
        StatusCode::FORBIDDEN => Problem::new(
            format!("{url} does not allow it"),
            "give the user of the kubeconfig a role with the verb get on namespaces",
        ),
        StatusCode::NOT_FOUND => {
            Problem::new(format!("{url} knows no such namespace"), "check that this is the right cluster")
        }
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Problem::passing(format!("{url} answered {status}"), "see the log of the Kubernetes API")
        }
        status => Problem::new(format!("{url} answered {status}"), "check that this is a Kubernetes API"),
    }
}

/// True for a text that can be the name of an object, and so a part of a path.
fn is_dns_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    name.chars().all(is_letter) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests;
