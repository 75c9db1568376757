//! Reads from the Kubernetes API: labels of namespaces (for choosing pools), the virtual machines that pods run, and
//! the facts about a pod's endpoint.
//!
//! Errors about virtual machines have Calico's exact messages where Calico reports the same problem.

mod api;
mod dial;
pub(crate) mod gates;
mod host_local;
mod kubeconfig;
mod pod;

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, fs};

use agent::{CniError, Code, Result};
use hyper::StatusCode;
use ipam_core::model::Labels;
use serde_json::Value;
use tokio::runtime::Builder;
use tokio::time::timeout;

use crate::env::Environment;
use crate::netconf::NetConf;
use api::{Api, ApiResponse, CHECK_ADDRESS};
use dial::{ApiFailure, ApiProblem};
use pod::{KubeNamespace, pod_cidrs};

pub(crate) use dial::{ApiStream, check_owner};
pub(crate) use host_local::{DefaultRoutes, HostLocal, default_routes};
pub(crate) use kubeconfig::check_kubeconfig;
pub(crate) use pod::{AllowedAnnotations, HardwareAddress, KubePod, KubePort, PodFacts};

/// The name prefix of pods that may run a virtual machine of KubeVirt.
pub(crate) const LAUNCHER_PREFIX: &str = "virt-launcher-";
/// Maximum total time of the API requests for one lookup.
const API_TIMEOUT: Duration = Duration::from_secs(5);
/// The User-Agent header of the IPAM plugin's API requests.
const IPAM_USER_AGENT: &str = concat!("margay-ipam/", env!("CARGO_PKG_VERSION"));
/// The error message of Kubernetes's own client if the Kubernetes API is not configured.
const NO_CONFIGURATION: &str =
    "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment variable";

/// The configured address of the Kubernetes API and the credentials for it. The plugin reads the named credential files
/// only if it sends a request to the Kubernetes API.
///
/// As in Calico's plugin, a value in [`Kubernetes`] overrides the kubeconfig's value. If both the kubeconfig and the
/// API root are empty, the plugin uses the Kubernetes API of the cluster in which its process runs. The `Debug` output
/// of [`Kubernetes`] shows no secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Kubernetes {
    /// The path of the kubeconfig, from `kubernetes.kubeconfig`.
    pub(crate) kubeconfig: PathBuf,
    /// The URL of the Kubernetes API, from `kubernetes.k8s_api_root`, or else from `policy.k8s_api_root`.
    pub(crate) api_root: String,
    /// The bearer token, from `policy.k8s_auth_token`.
    pub(crate) token: String,
    /// The path of the certificate authority's certificate, from `policy.k8s_certificate_authority`.
    pub(crate) authority: PathBuf,
    /// The path of the client certificate, from `policy.k8s_client_certificate`.
    pub(crate) certificate: PathBuf,
    /// The path of the client key, from `policy.k8s_client_key`.
    pub(crate) key: PathBuf,
    /// The values of `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`.
    pub(crate) service: Option<(String, String)>,
}

impl fmt::Debug for Kubernetes {
    /// Prints the address of the Kubernetes API, but not the credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kubernetes")
            .field("kubeconfig", &self.kubeconfig)
            .field("api_root", &self.api_root)
            .finish_non_exhaustive()
    }
}

impl Kubernetes {
    /// True if the plugin reads the labels of namespaces from the Kubernetes API. As in Calico's plugin, reading labels
    /// requires a kubeconfig or the policy type `k8s`; otherwise, namespaces count as having no labels.
    pub(crate) fn are_looked_up(conf: &NetConf) -> bool {
        !conf.store.kubeconfig.is_empty() || conf.policy.kind == "k8s"
    }

    /// Reads the settings for the Kubernetes API from the network configuration and the environment.
    pub(crate) fn from_conf(conf: &NetConf, environment: &Environment) -> Self {
        let policy = &conf.policy;
        let api_root = match conf.store.k8s_api_root.as_str() {
            // The path of an old API version at the end of `policy.k8s_api_root` is cut off.
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

    /// True if neither the network configuration nor the environment names a Kubernetes API server.
    fn is_unconfigured(&self) -> bool {
        self.kubeconfig.as_os_str().is_empty() && self.api_root.is_empty() && self.service.is_none()
    }

    /// Reads which virtual machine a pod runs, with up to three API requests, which together take at most `patience`
    /// and at most five seconds.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message, and advice in the error's `details`.
    pub(crate) fn launcher(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Launcher> {
        self.find_launcher(namespace, pod, patience.min(API_TIMEOUT)).map_err(|problem| {
            CniError::internal(format!("failed to get VMI info: {}", problem.what)).with_details(problem.advice)
        })
    }

    /// Reads the labels of a namespace with one API request, which takes at most `patience` and at most five seconds.
    ///
    /// # Errors
    /// An error with Calico's message, followed by the cause; its `details` contain advice.
    pub(crate) fn labels(&self, namespace: &str, patience: Duration) -> Result<Labels> {
        self.read_labels(namespace, patience.min(API_TIMEOUT)).map_err(|problem| {
            let message = format!("failed to get namespace {namespace}: {}", problem.what);
            CniError::new(problem.code, message).with_details(problem.advice)
        })
    }

    /// Reads a pod with one API request, which takes at most `patience` and at most five seconds.
    ///
    /// # Errors
    /// Any error of [`KubeClient::pod`].
    pub(crate) fn pod(&self, namespace: &str, pod: &str, patience: Duration) -> Result<KubePod> {
        let mut client = self.client()?;
        block_on(client.pod(namespace, pod, patience.min(API_TIMEOUT))).map_err(to_cni_error)?
    }

    fn read_labels(&self, namespace: &str, patience: Duration) -> Result<Labels, ApiProblem> {
        if !is_dns_name(namespace) {
            return Err(ApiProblem::new(
                "this is no name of a namespace",
                "K8S_POD_NAMESPACE in CNI_ARGS says which it is",
            ));
        }
        let mut api = self.access(IPAM_USER_AGENT)?;
        let path = format!("/api/v1/namespaces/{namespace}");
        let answer = block_on(api.get(&path, patience))?.map_err(|failure| match failure {
            ApiFailure::Unreachable(error) => {
                ApiProblem::transient(format!("{} cannot be reached: {error}", api.url()), CHECK_ADDRESS)
            }
            ApiFailure::Late(patience) => timeout_problem(&api, patience),
            ApiFailure::Reported(problem) => problem,
        })?;
        if answer.status != StatusCode::OK {
            return Err(refusal_problem(&api, answer.status));
        }
        let document: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        if !document["metadata"].is_object() {
            let what = format!("what {} sent is no namespace", api.url());
            return Err(ApiProblem::new(what, "check that this is the address of a Kubernetes API"));
        }
        let labels = document["metadata"]["labels"].as_object().into_iter().flatten();
        Ok(labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect())
    }
}

fn block_on<F: Future>(future: F) -> Result<F::Output, ApiProblem> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ApiProblem::transient(format!("cannot start: {error}"), ""))?;
    let output = runtime.block_on(future);
    // A name lookup may still run in another thread; do not wait for its end.
    runtime.shutdown_background();
    Ok(output)
}

fn timeout_problem(api: &Api, patience: Duration) -> ApiProblem {
    let what = format!("{} gave no answer in {:.1} s", api.url(), patience.as_secs_f32());
    ApiProblem::transient(what, CHECK_ADDRESS)
}

/// Returns the problem to report if the Kubernetes API refuses a request for the labels of a namespace.
fn refusal_problem(api: &Api, status: StatusCode) -> ApiProblem {
    let url = api.url();
    match status {
        StatusCode::UNAUTHORIZED => ApiProblem::new(
            format!("{url} does not know who asks"),
            "check the token or the client certificate in the kubeconfig; it may have run out",
        ),
        StatusCode::FORBIDDEN => ApiProblem::new(
            format!("{url} does not allow it"),
            "give the user of the kubeconfig a role with the verb get on namespaces",
        ),
        StatusCode::NOT_FOUND => {
            ApiProblem::new(format!("{url} knows no such namespace"), "check that this is the right cluster")
        }
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            ApiProblem::transient(format!("{url} answered {status}"), "see the log of the Kubernetes API")
        }
        status => ApiProblem::new(format!("{url} answered {status}"), "check that this is a Kubernetes API"),
    }
}

/// True if the text is a valid name of a Kubernetes object, and can therefore be inserted in the path of a URL.
fn is_dns_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    name.chars().all(is_letter) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

const MAIN_USER_AGENT: &str = concat!("margay/", env!("CARGO_PKG_VERSION"));

/// A client for several requests to the Kubernetes API, which needs a tokio runtime with timers and I/O. This tokio
/// runtime must be shut down in the background, because a name lookup may still be running in it.
pub(crate) struct KubeClient {
    api: Api,
}

impl Kubernetes {
    /// Returns a client for any number of API requests. Creating the client reads the credential files, but sends no
    /// request.
    ///
    /// # Errors
    /// CNI error code 999, with Calico's message if the Kubernetes API is not configured or the kubeconfig is missing.
    pub(crate) fn client(&self) -> Result<KubeClient> {
        if self.is_unconfigured() {
            return Err(CniError::internal(NO_CONFIGURATION).with_details("set kubernetes.kubeconfig"));
        }
        let path = &self.kubeconfig;
        let is_missing = || fs::metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound);
        if !path.as_os_str().is_empty() && is_missing() {
            return Err(CniError::internal(format!("stat {}: no such file or directory", path.display()))
                .with_details("check kubernetes.kubeconfig"));
        }
        Ok(KubeClient { api: self.access(MAIN_USER_AGENT).map_err(to_cni_error)? })
    }
}

impl KubeClient {
    /// Reads a namespace from the Kubernetes API.
    ///
    /// # Errors
    /// CNI error code 999 with the message of Kubernetes's own client. CNI error code 11 if the Kubernetes API does not
    /// respond in time, cannot be reached, or cannot serve the request for now.
    pub(crate) async fn namespace(&mut self, name: &str, left: Duration) -> Result<KubeNamespace> {
        let path = format!("/api/v1/namespaces/{name}");
        self.object("namespaces", &[name], &path, left, |body| KubeNamespace::from_json(name, body)).await
    }

    /// Reads a pod from the Kubernetes API.
    ///
    /// # Errors
    /// Any error of [`namespace`](Self::namespace).
    pub(crate) async fn pod(&mut self, namespace: &str, name: &str, left: Duration) -> Result<KubePod> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        self.object("pods", &[name, namespace], &path, left, KubePod::from_json).await
    }

    /// Reads the pod ranges of a node (`spec.podCIDRs`).
    ///
    /// # Errors
    /// Any error of [`namespace`](Self::namespace).
    pub(crate) async fn node_pod_cidrs(&mut self, name: &str, left: Duration) -> Result<Vec<String>> {
        self.object("nodes", &[name], &format!("/api/v1/nodes/{name}"), left, pod_cidrs).await
    }

    /// Checks that the Kubernetes API responds by requesting its version, and asks the API server to respond within two
    /// seconds.
    ///
    /// # Errors
    /// Any error of [`namespace`](Self::namespace).
    pub(crate) async fn version(&mut self, left: Duration) -> Result<()> {
        let is_object = |body: &[u8]| matches!(body.trim_ascii_start().first(), Some(b'{')).then_some(());
        self.object("version", &[], "/version?timeout=2s", left, is_object).await
    }

    /// Reads an object of the Kubernetes API by the object's path. This function checks the names of objects in the
    /// path, because the names come from a runtime or a file.
    async fn object<T>(
        &mut self,
        kind: &str,
        names: &[&str],
        path: &str,
        left: Duration,
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T> {
        if let Some(name) = names.iter().find(|name| !is_dns_name(name)) {
            return Err(CniError::internal(format!("{name:?} is no name that one of {kind} can have")));
        }
        let answer = self.api.get(path, left).await.map_err(|failure| self.unanswered(failure, path))?;
        if answer.status != StatusCode::OK {
            return Err(self.refused(&answer, kind, names.first().copied().unwrap_or_default()));
        }
        let wrong = || {
            let what = format!("what {} sent is none of {kind}", self.api.url());
            CniError::internal(what).with_details("check that this is the address of a Kubernetes API")
        };
        read(&answer.body).ok_or_else(wrong)
    }

    fn unanswered(&self, failure: ApiFailure, path: &str) -> CniError {
        match failure {
            ApiFailure::Unreachable(error) => {
                let refused = error.kind() == ErrorKind::ConnectionRefused;
                let code = if refused { Code::Internal } else { Code::TryAgain };
                CniError::new(code, self.api.no_connection(path, &error)).with_details(CHECK_ADDRESS)
            }
            ApiFailure::Late(left) => {
                let what = format!("Get \"{}{path}\": context deadline exceeded", self.api.url());
                let details = format!("there was no answer in {:.1} s; {CHECK_ADDRESS}", left.as_secs_f32());
                CniError::new(Code::TryAgain, what).with_details(details)
            }
            ApiFailure::Reported(problem) => to_cni_error(problem),
        }
    }

    fn refused(&self, answer: &ApiResponse, kind: &str, name: &str) -> CniError {
        let text = self.api.complaint(answer, kind, name);
        let status = answer.status;
        let (code, advice) = match status {
            StatusCode::UNAUTHORIZED => {
                (Code::Internal, "check the token or the client certificate of the kubeconfig; it may have run out")
            }
            StatusCode::FORBIDDEN => (
                Code::Internal,
                "give the user of the kubeconfig a role with the verb get on nodes, namespaces and pods",
            ),
            StatusCode::TOO_MANY_REQUESTS => (Code::TryAgain, "the Kubernetes API is busy"),
            _ if status.is_server_error() => (Code::TryAgain, "see the log of the Kubernetes API"),
            _ => (Code::Internal, ""),
        };
        CniError::new(code, text).with_details(advice)
    }
}

fn to_cni_error(problem: ApiProblem) -> CniError {
    CniError::new(problem.code, problem.what).with_details(problem.advice)
}

/// The only API version of KubeVirt's objects that the plugin uses.
const KUBEVIRT_VERSION: &str = "kubevirt.io/v1";
/// The label of a pod to which a virtual machine is being migrated.
const MIGRATION_LABEL: &str = "kubevirt.io/migrationJobUID";
const LAUNCHER_ADVICE: &str = "the plugin reads the pod, its virtualmachineinstance and its virtualmachine with what kubernetes.kubeconfig \
                      names; check that file, the rights of its user (get on all three), and that this host reaches the API";

/// A running instance of a KubeVirt virtual machine, as seen from one of its pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmInstance {
    /// The name of the instance, which is also the name of the virtual machine.
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The uid of the virtual machine that owns the instance; `None` for an instance without an owner.
    pub(crate) machine: Option<String>,
    /// The uid of the migration that moves the virtual machine to this pod; `None` if the virtual machine is not being
    /// migrated here.
    pub(crate) migration: Option<String>,
    /// True if the VirtualMachine (or a VirtualMachineInstance without an owner) is deleted or being deleted.
    pub(crate) ends: bool,
}

/// How a pod relates to a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// The pod exists and runs no virtual machine.
    Ordinary,
    /// The pod runs this instance of a virtual machine.
    Of(VmInstance),
    /// The pod no longer exists. `Gone(Some(_))` holds the virtual machine that the deleted pod's name suggests.
    /// `Gone(None)` means that the Kubernetes API does not report the state of this virtual machine.
    Gone(Option<VmInstance>),
}

/// Returns the string in a field of a JSON object, or an empty string if there is no such field.
fn text_of<'v>(object: &'v Value, name: &str) -> &'v str {
    object[name].as_str().unwrap_or_default()
}

/// Returns the first owner reference to a KubeVirt object of kind `kind` for which the closure `counts` returns true.
fn owner_of<'v>(metadata: &'v Value, kind: &str, counts: impl Fn(&Value) -> bool) -> Option<&'v Value> {
    let is_it = |one: &&Value| one["apiVersion"] == KUBEVIRT_VERSION && one["kind"] == kind && counts(one);
    metadata["ownerReferences"].as_array()?.iter().find(is_it)
}

impl Kubernetes {
    /// Reads which virtual machine a pod runs, with up to three API requests that together take at most `patience`.
    ///
    /// # Errors
    /// An error if the Kubernetes API did not respond, or if KubeVirt's objects contradict each other. A pod that no
    /// longer exists is not an error.
    fn find_launcher(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Launcher, ApiProblem> {
        if !is_dns_name(namespace) || !is_dns_name(pod) {
            return Err(ApiProblem::new("this is no name of a pod", "K8S_POD_NAMESPACE and K8S_POD_NAME in CNI_ARGS"));
        }
        if self.is_unconfigured() {
            return Err(ApiProblem::new(
                NO_CONFIGURATION,
                "a virtual machine's pod takes a Kubernetes API: set kubernetes.kubeconfig",
            ));
        }
        let mut asked = LauncherQuery { api: self.access(IPAM_USER_AGENT)?, namespace, patience };
        let found = block_on(async { timeout(patience, asked.launcher(pod)).await })?;
        found.unwrap_or_else(|_| {
            Err(ApiProblem { advice: LAUNCHER_ADVICE.to_owned(), ..timeout_problem(&asked.api, patience) })
        })
    }
}

/// A sequence of API requests about the pods and virtual machines of one namespace.
struct LauncherQuery<'a> {
    api: Api,
    namespace: &'a str,
    patience: Duration,
}

impl LauncherQuery<'_> {
    async fn launcher(&mut self, pod: &str) -> Result<Launcher, ApiProblem> {
        let Some(found) = self.get("pods", pod).await?.ok() else {
            return Ok(Launcher::Gone(self.vm_of_deleted_pod(pod).await));
        };
        let Some(owner) = owner_of(&found, "VirtualMachineInstance", |one| one["controller"] == true) else {
            return Ok(Launcher::Ordinary);
        };
        let (name, uid) = (text_of(owner, "name"), text_of(owner, "uid"));
        if name.is_empty() || uid.is_empty() {
            let pod = format!("{}/{pod}", self.namespace);
            return Err(launcher_problem(format!(
                "pod {pod} has invalid VMI ownerReference: name=\"{name}\" uid=\"{uid}\""
            )));
        }
        let instance = self.get_required("virtualmachineinstances.kubevirt.io", name, name).await?;
        let machine = match owner_of(&instance, "VirtualMachine", |one| !text_of(one, "name").is_empty()) {
            None => None,
            Some(owner) => Some(self.get_required("virtualmachines.kubevirt.io", text_of(owner, "name"), name).await?),
        };
        let other = text_of(&instance, "uid");
        if other != uid {
            return Err(launcher_problem(format!(
                "VMI UID mismatch: pod ownerReference has {uid} but VMI resource has {other}"
            )));
        }
        let migration = text_of(&found["labels"], MIGRATION_LABEL);
        Ok(Launcher::Of(VmInstance {
            name: name.to_owned(),
            uid: uid.to_owned(),
            machine: machine.as_ref().map(|machine| text_of(machine, "uid").to_owned()),
            migration: (!migration.is_empty()).then(|| migration.to_owned()),
            ends: is_ending(machine.as_ref().unwrap_or(&instance)),
        }))
    }

    /// Reads the metadata of an object that must exist because the VirtualMachineInstance refers to it; fails if the
    /// object is missing.
    async fn get_required(&mut self, kind: &str, name: &str, instance: &str) -> Result<Value, ApiProblem> {
        let found = self.get(kind, name).await.and_then(|found| found.map_err(launcher_problem));
        found.map_err(|problem| {
            let what = format!("failed to query VMI resource {}/{instance}: {}", self.namespace, problem.what);
            ApiProblem { what, ..problem }
        })
    }

    /// Finds the virtual machine of a deleted pod by the name of the pod. KubeVirt builds the pod's name from the
    /// virtual machine's name and five characters. Returns `None` if the Kubernetes API does not report whether the
    /// virtual machine exists.
    async fn vm_of_deleted_pod(&mut self, pod: &str) -> Option<VmInstance> {
        let name = pod.strip_prefix(LAUNCHER_PREFIX)?.rsplit_once('-')?.0;
        let mut ends = true;
        for kind in ["virtualmachines.kubevirt.io", "virtualmachineinstances.kubevirt.io"] {
            if let Ok(found) = self.get(kind, name).await.ok()? {
                ends = is_ending(&found);
                break;
            }
        }
        Some(VmInstance { name: name.to_owned(), ends, ..VmInstance::default() })
    }

    /// Reads the metadata of an API object. Returns `Ok(Err(message))` with the Kubernetes API's message if the object
    /// does not exist.
    async fn get(&mut self, kind: &str, name: &str) -> Result<Result<Value, String>, ApiProblem> {
        let Self { api, namespace, patience } = self;
        if !is_dns_name(name) {
            return Err(launcher_problem(format!("{name:?} is no name of one of {kind}")));
        }
        let path = match kind.split_once('.') {
            None => format!("/api/v1/namespaces/{namespace}/{kind}/{name}"),
            Some((plural, group)) => format!("/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}"),
        };
        let answer = api.get(&path, *patience).await.map_err(|failure| match failure {
            ApiFailure::Unreachable(error) => ApiProblem::transient(api.no_connection(&path, &error), LAUNCHER_ADVICE),
            ApiFailure::Late(patience) => {
                ApiProblem { advice: LAUNCHER_ADVICE.to_owned(), ..timeout_problem(api, patience) }
            }
            ApiFailure::Reported(problem) => problem,
        })?;
        if answer.status == StatusCode::OK {
            let mut said: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            return match said.get_mut("metadata").map(Value::take) {
                Some(metadata @ Value::Object(_)) => Ok(Ok(metadata)),
                _ => Err(launcher_problem(format!("what {} sent is none of {kind}", api.url()))),
            };
        }
        let status = api.status(&answer);
        if answer.status == StatusCode::NOT_FOUND && status.reason == "NotFound" {
            return Ok(Err(status.message));
        }
        Err(launcher_problem(api.complaint(&answer, kind, name)))
    }
}

fn is_ending(metadata: &Value) -> bool {
    metadata["deletionTimestamp"].is_string()
}

fn launcher_problem(what: String) -> ApiProblem {
    ApiProblem::new(what, LAUNCHER_ADVICE)
}

#[cfg(test)]
mod tests;
