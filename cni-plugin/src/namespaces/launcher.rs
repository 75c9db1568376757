//! The virtual machine that a pod runs, from the Kubernetes API: the pod, its instance and its machine.
//!
//! The errors are Calico's, to the letter where Calico has them.

use std::time::Duration;

use hyper::StatusCode;
use serde::Deserialize;
use tokio::runtime::Builder;

use super::api::Api;
use super::{Labels, Namespaces, Problem, is_dns_name};

/// The version of KubeVirt's objects that counts.
const VERSION: &str = "kubevirt.io/v1";
/// The label of a pod that a virtual machine migrates to.
const MIGRATION: &str = "kubevirt.io/migrationJobUID";
const ADVICE: &str = "the plugin reads the pod, its virtualmachineinstance and its virtualmachine with what kubernetes.kubeconfig \
                      names; check that file, the rights of its user (get on all three), and that this host reaches the API";

/// A virtual machine's instance, and the pod that runs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Its name, which is the machine's, too.
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The uid of the machine, if it has one.
    pub(crate) machine: Option<String>,
    /// The migration that the pod is the target of.
    pub(crate) migration: Option<String>,
    /// True if the machine, or an instance without one, is being deleted or gone.
    pub(crate) ends: bool,
}

/// The kinds of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// A pod like any other.
    Ordinary,
    /// It runs an instance.
    Of(Instance),
    /// It is gone. By its name it was of this machine, if the API says what became of that.
    Gone(Option<Instance>),
}

#[derive(Deserialize)]
struct Object {
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    uid: String,
    labels: Option<Labels>,
    owner_references: Option<Vec<Reference>>,
    deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Reference {
    api_version: String,
    kind: String,
    name: String,
    uid: String,
    controller: Option<bool>,
}

/// The answer of an API that refuses.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    message: String,
    reason: String,
}

impl Metadata {
    fn owner(&mut self, kind: &str, counts: impl Fn(&Reference) -> bool) -> Option<Reference> {
        let is_it = |one: &Reference| one.api_version == VERSION && one.kind == kind && counts(one);
        self.owner_references.take()?.into_iter().find(is_it)
    }
}

impl Namespaces {
    /// The virtual machine that a pod runs, by up to three requests that together take no longer than `patience`.
    ///
    /// # Errors
    /// The API did not answer, or not as KubeVirt's objects demand. A pod that is gone is no error.
    pub(super) fn find_launcher(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Launcher, Problem> {
        if !is_dns_name(namespace) || !is_dns_name(pod) {
            return Err(Problem::new("this is no name of a pod", "K8S_POD_NAMESPACE and K8S_POD_NAME in CNI_ARGS"));
        }
        if self.says_nothing() {
            let none = "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment \
                        variable";
            return Err(Problem::new(
                none,
                "a virtual machine's pod takes a Kubernetes API: set kubernetes.kubeconfig",
            ));
        }
        let asked = Asked { api: self.access()?, namespace };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Problem::passing(format!("cannot start: {error}"), ""))?;
        let found = runtime.block_on(async { tokio::time::timeout(patience, asked.launcher(pod)).await });
        runtime.shutdown_background();
        found.unwrap_or_else(|_| {
            let what = format!("{} gave no answer in {:.1} s", asked.api.url(), patience.as_secs_f32());
            Err(Problem::passing(what, ADVICE))
        })
    }
}

/// An API that is asked about one namespace.
struct Asked<'a> {
    api: Api,
    namespace: &'a str,
}

impl Asked<'_> {
    async fn launcher(&self, pod: &str) -> Result<Launcher, Problem> {
        let Some(mut found) = self.get("pods", pod).await?.ok() else {
            return Ok(Launcher::Gone(self.machine_of_gone(pod).await));
        };
        let is_controller = |one: &Reference| one.controller == Some(true);
        let Some(owner) = found.owner("VirtualMachineInstance", is_controller) else { return Ok(Launcher::Ordinary) };
        let Reference { name, uid, .. } = owner;
        if name.is_empty() || uid.is_empty() {
            let pod = format!("{}/{pod}", self.namespace);
            return Err(wrong(format!("pod {pod} has invalid VMI ownerReference: name=\"{name}\" uid=\"{uid}\"")));
        }
        let query = |problem: Problem| {
            let what = format!("failed to query VMI resource {}/{name}: {}", self.namespace, problem.what);
            Problem { what, ..problem }
        };
        let needed = |found: Result<Metadata, String>| found.map_err(wrong);
        let instance = self.get("virtualmachineinstances.kubevirt.io", &name).await.and_then(needed);
        let mut instance = instance.map_err(query)?;
        let machine = match instance.owner("VirtualMachine", |one| !one.name.is_empty()) {
            None => None,
            Some(owner) => {
                let machine = self.get("virtualmachines.kubevirt.io", &owner.name).await.and_then(needed);
                Some(machine.map_err(query)?)
            }
        };
        if instance.uid != uid {
            let other = instance.uid;
            return Err(wrong(format!("VMI UID mismatch: pod ownerReference has {uid} but VMI resource has {other}")));
        }
        let decides = machine.as_ref().unwrap_or(&instance);
        let migration = found.labels.and_then(|mut labels| labels.remove(MIGRATION)).filter(|uid| !uid.is_empty());
        let ends = decides.deletion_timestamp.is_some();
        Ok(Launcher::Of(Instance { name, uid, machine: machine.map(|machine| machine.uid), migration, ends }))
    }

    /// The machine that a pod was of which is gone, by its name: KubeVirt adds five characters to the machine's. `None` if the
    /// API does not say what became of the machine.
    async fn machine_of_gone(&self, pod: &str) -> Option<Instance> {
        let name = pod.strip_prefix(super::LAUNCHER)?.rsplit_once('-')?.0;
        let mut ends = true;
        for kind in ["virtualmachines.kubevirt.io", "virtualmachineinstances.kubevirt.io"] {
            if let Ok(found) = self.get(kind, name).await.ok()? {
                ends = found.deletion_timestamp.is_some();
                break;
            }
        }
        Some(Instance { name: name.to_owned(), ends, ..Instance::default() })
    }

    /// The metadata of an object, or the API's text if there is no object of that name.
    async fn get(&self, kind: &str, name: &str) -> Result<Result<Metadata, String>, Problem> {
        let Self { api, namespace } = self;
        if !is_dns_name(name) {
            return Err(wrong(format!("{name:?} is no name of one of {kind}")));
        }
        let path = match kind.split_once('.') {
            None => format!("/api/v1/namespaces/{namespace}/{kind}/{name}"),
            Some((plural, group)) => format!("/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}"),
        };
        let stream = api.dial().await.map_err(|error| {
            // As Go says it: without the number.
            let reason = error.to_string().to_lowercase();
            let reason = reason.split(" (os error").next().unwrap_or_default();
            let what = format!("Get \"{}{path}\": dial tcp {}: connect: {reason}", api.url(), api.authority());
            Problem::passing(what, ADVICE)
        })?;
        let (status, body) = api.ask(stream, &path).await?;
        if status == StatusCode::OK {
            let object: Result<Object, _> = serde_json::from_slice(&body);
            return match object {
                Ok(object) => Ok(Ok(object.metadata)),
                Err(_) => Err(wrong(format!("what {} sent is none of {kind}", api.url()))),
            };
        }
        let said: Status = serde_json::from_slice(&body).unwrap_or_default();
        if status == StatusCode::NOT_FOUND && said.reason == "NotFound" {
            return Ok(Err(said.message));
        }
        Err(wrong(match status {
            _ if !said.message.is_empty() => said.message,
            StatusCode::NOT_FOUND => format!("the server could not find the requested resource (get {kind} {name})"),
            StatusCode::UNAUTHORIZED => "Unauthorized".to_owned(),
            status => format!("{} answered {status}", api.url()),
        }))
    }
}

fn wrong(what: String) -> Problem {
    Problem::new(what, ADVICE)
}
