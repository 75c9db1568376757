//! The virtual machine that a pod runs, from the Kubernetes API: the pod, its instance and its machine.
//!
//! The errors are Calico's, to the letter where Calico has them.

use std::time::Duration;

use hyper::StatusCode;
use serde_json::Value;
use tokio::runtime::Builder;

use super::api::Api;
use super::{Namespaces, Problem, is_dns_name};

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

/// The text of a member of an object; empty if there is none.
fn text<'v>(object: &'v Value, name: &str) -> &'v str {
    object[name].as_str().unwrap_or_default()
}

/// The first owner of that kind that counts.
fn owner_of<'v>(metadata: &'v Value, kind: &str, counts: impl Fn(&Value) -> bool) -> Option<&'v Value> {
    let is_it = |one: &&Value| one["apiVersion"] == VERSION && one["kind"] == kind && counts(one);
    metadata["ownerReferences"].as_array()?.iter().find(is_it)
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
        let Some(found) = self.get("pods", pod).await?.ok() else {
            return Ok(Launcher::Gone(self.machine_of_gone(pod).await));
        };
        let Some(owner) = owner_of(&found, "VirtualMachineInstance", |one| one["controller"] == true) else {
            return Ok(Launcher::Ordinary);
        };
        let (name, uid) = (text(owner, "name"), text(owner, "uid"));
        if name.is_empty() || uid.is_empty() {
            let pod = format!("{}/{pod}", self.namespace);
            return Err(wrong(format!("pod {pod} has invalid VMI ownerReference: name=\"{name}\" uid=\"{uid}\"")));
        }
        let instance = self.needed("virtualmachineinstances.kubevirt.io", name, name).await?;
        let machine = match owner_of(&instance, "VirtualMachine", |one| !text(one, "name").is_empty()) {
            None => None,
            Some(owner) => Some(self.needed("virtualmachines.kubevirt.io", text(owner, "name"), name).await?),
        };
        let other = text(&instance, "uid");
        if other != uid {
            return Err(wrong(format!("VMI UID mismatch: pod ownerReference has {uid} but VMI resource has {other}")));
        }
        let migration = text(&found["labels"], MIGRATION);
        Ok(Launcher::Of(Instance {
            name: name.to_owned(),
            uid: uid.to_owned(),
            machine: machine.as_ref().map(|machine| text(machine, "uid").to_owned()),
            migration: (!migration.is_empty()).then(|| migration.to_owned()),
            ends: is_ending(machine.as_ref().unwrap_or(&instance)),
        }))
    }

    /// The metadata of an object that must be there for an instance.
    async fn needed(&self, kind: &str, name: &str, instance: &str) -> Result<Value, Problem> {
        let found = self.get(kind, name).await.and_then(|found| found.map_err(wrong));
        found.map_err(|problem| {
            let what = format!("failed to query VMI resource {}/{instance}: {}", self.namespace, problem.what);
            Problem { what, ..problem }
        })
    }

    /// The machine that a pod was of which is gone, by its name: KubeVirt adds five characters to the machine's. `None` if the
    /// API does not say what became of the machine.
    async fn machine_of_gone(&self, pod: &str) -> Option<Instance> {
        let name = pod.strip_prefix(super::LAUNCHER)?.rsplit_once('-')?.0;
        let mut ends = true;
        for kind in ["virtualmachines.kubevirt.io", "virtualmachineinstances.kubevirt.io"] {
            if let Ok(found) = self.get(kind, name).await.ok()? {
                ends = is_ending(&found);
                break;
            }
        }
        Some(Instance { name: name.to_owned(), ends, ..Instance::default() })
    }

    /// The metadata of an object, or the API's text if there is no object of that name.
    async fn get(&self, kind: &str, name: &str) -> Result<Result<Value, String>, Problem> {
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
        let mut said: Value = serde_json::from_slice(&body).unwrap_or_default();
        if status == StatusCode::OK {
            return match said.get_mut("metadata").map(Value::take) {
                Some(metadata @ Value::Object(_)) => Ok(Ok(metadata)),
                _ => Err(wrong(format!("what {} sent is none of {kind}", api.url()))),
            };
        }
        let message = text(&said, "message").to_owned();
        if status == StatusCode::NOT_FOUND && said["reason"] == "NotFound" {
            return Ok(Err(message));
        }
        Err(wrong(match status {
            _ if !message.is_empty() => message,
            StatusCode::NOT_FOUND => format!("the server could not find the requested resource (get {kind} {name})"),
            StatusCode::UNAUTHORIZED => "Unauthorized".to_owned(),
            status => format!("{} answered {status}", api.url()),
        }))
    }
}

fn is_ending(metadata: &Value) -> bool {
    metadata["deletionTimestamp"].is_string()
}

fn wrong(what: String) -> Problem {
    Problem::new(what, ADVICE)
}
