//! Questions to the Kubernetes API: the labels of a container's namespace, by which pools may be chosen, and the virtual
//! machine that a pod runs.

mod api;
mod kubeconfig;
mod launcher;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use ipam_core::model::Labels;
use serde_json::Value;
use tokio::runtime::Builder;

use crate::env::Environment;
use crate::error::{CniError, Code, Result};
use crate::netconf::NetConf;

pub(crate) use launcher::{Instance, Launcher};

/// How the names of pods begin that may run a virtual machine of KubeVirt's.
pub(crate) const LAUNCHER: &str = "virt-launcher-";
/// The longest that the API is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Where the Kubernetes API is, and how it lets us in: as far as the configuration says, the rest is in files.
///
/// What is set here beats what stands in the kubeconfig, as in Calico's plugin. Without a kubeconfig and an API root it is
/// the API of the cluster that this process runs in. `Debug` shows no secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// `kubernetes.kubeconfig`.
    pub(crate) kubeconfig: PathBuf,
    /// `kubernetes.k8s_api_root`, or `policy.k8s_api_root`: a URL.
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

impl fmt::Debug for Namespaces {
    /// Where it is, not how to get in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespaces")
            .field("kubeconfig", &self.kubeconfig)
            .field("api_root", &self.api_root)
            .finish_non_exhaustive()
    }
}

/// Why there are no labels, and what to do. No secret is kept in it.
#[derive(Debug, PartialEq, Eq)]
struct Problem {
    code: Code,
    what: String,
    advice: String,
}

impl Problem {
    /// What somebody has to mend.
    fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::Internal, what: what.into(), advice: advice.into() }
    }

    /// What may be gone a little later.
    fn passing(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::TryAgain, ..Self::new(what, advice) }
    }
}

impl Namespaces {
    /// True if namespaces are looked up; as for Calico's plugin they are not, unless there is a kubeconfig or the policy is
    /// Kubernetes's, and then no namespace has labels.
    pub(crate) fn are_looked_up(conf: &NetConf) -> bool {
        !conf.store.kubeconfig.is_empty() || conf.policy.kind == "k8s"
    }

    /// Where the API is, as far as it is said.
    pub(crate) fn from_conf(conf: &NetConf, environment: &Environment) -> Self {
        let policy = &conf.policy;
        let api_root = if policy.api_root.is_empty() { &conf.store.k8s_api_root } else { &policy.api_root };
        let service = [environment.text("KUBERNETES_SERVICE_HOST"), environment.text("KUBERNETES_SERVICE_PORT")];
        Self {
            kubeconfig: (&conf.store.kubeconfig).into(),
            api_root: api_root.clone(),
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

    /// The virtual machine that a pod runs, by up to three requests that together take no longer than `patience`, or five seconds.
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

    fn ask(&self, namespace: &str, patience: Duration) -> Result<Labels, Problem> {
        if !is_dns_name(namespace) {
            return Err(Problem::new(
                "this is no name of a namespace",
                "K8S_POD_NAMESPACE in CNI_ARGS says which it is",
            ));
        }
        let api = self.access()?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Problem::passing(format!("cannot start: {error}"), ""))?;
        let get = async { tokio::time::timeout(patience, api.get(&format!("/api/v1/namespaces/{namespace}"))).await };
        let answer = runtime.block_on(get);
        // A name server that does not answer holds up nobody.
        runtime.shutdown_background();
        let late = |_| {
            let what = format!("{} gave no answer in {:.1} s", api.url(), patience.as_secs_f32());
            Problem::passing(what, "check that the Kubernetes API runs, and that this host can reach it")
        };
        let body = answer.map_err(late)??;
        let document: Value = serde_json::from_slice(&body).unwrap_or_default();
        if !document["metadata"].is_object() {
            let what = format!("what {} sent is no namespace", api.url());
            return Err(Problem::new(what, "check that this is the address of a Kubernetes API"));
        }
        let labels = document["metadata"]["labels"].as_object().into_iter().flatten();
        Ok(labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect())
    }
}

/// True for what can be the name of an object, and so a part of a path.
fn is_dns_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    name.chars().all(is_letter) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}
