//! The virtual machine that a pod runs, from the Kubernetes API: the pod, its instance and its machine.
//!
//! The errors are Calico's, to the letter where Calico has them.

use std::time::Duration;

use hyper::StatusCode;
use serde_json::Value;
use tokio::time::timeout;

use super::api::Api;
use super::problem::{Failure, Problem};
use super::{AGENT, Kubernetes, NO_CONFIGURATION, block_on, is_dns_name, late};

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

impl Kubernetes {
    /// The virtual machine that a pod runs, by up to three requests that together take no longer than `patience`.
    ///
    /// # Errors
    /// The API did not answer, or not as KubeVirt's objects demand. A pod that is gone is no error.
    pub(super) fn find_launcher(&self, namespace: &str, pod: &str, patience: Duration) -> Result<Launcher, Problem> {
        if !is_dns_name(namespace) || !is_dns_name(pod) {
            return Err(Problem::new("this is no name of a pod", "K8S_POD_NAMESPACE and K8S_POD_NAME in CNI_ARGS"));
        }
        if self.says_nothing() {
            return Err(Problem::new(
                NO_CONFIGURATION,
                "a virtual machine's pod takes a Kubernetes API: set kubernetes.kubeconfig",
            ));
        }
        let mut asked = Asked { api: self.access(AGENT)?, namespace, patience };
        let found = block_on(async { timeout(patience, asked.launcher(pod)).await })?;
        found.unwrap_or_else(|_| Err(Problem { advice: ADVICE.to_owned(), ..late(&asked.api, patience) }))
    }
}

/// An API that is asked about one namespace.
struct Asked<'a> {
    api: Api,
    namespace: &'a str,
    patience: Duration,
}

impl Asked<'_> {
    async fn launcher(&mut self, pod: &str) -> Result<Launcher, Problem> {
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
    async fn needed(&mut self, kind: &str, name: &str, instance: &str) -> Result<Value, Problem> {
        let found = self.get(kind, name).await.and_then(|found| found.map_err(wrong));
        found.map_err(|problem| {
            let what = format!("failed to query VMI resource {}/{instance}: {}", self.namespace, problem.what);
            Problem { what, ..problem }
        })
    }

    /// The machine that a pod was of which is gone, by its name: KubeVirt adds five characters to the machine's. `None` if the
    /// API does not say what became of the machine.
    async fn machine_of_gone(&mut self, pod: &str) -> Option<Instance> {
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
    async fn get(&mut self, kind: &str, name: &str) -> Result<Result<Value, String>, Problem> {
        let Self { api, namespace, patience } = self;
        if !is_dns_name(name) {
            return Err(wrong(format!("{name:?} is no name of one of {kind}")));
        }
        let path = match kind.split_once('.') {
            None => format!("/api/v1/namespaces/{namespace}/{kind}/{name}"),
            Some((plural, group)) => format!("/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}"),
        };
        let answer = api.get(&path, *patience).await.map_err(|failure| match failure {
            Failure::Unreachable(error) => Problem::passing(api.no_connection(&path, &error), ADVICE),
            Failure::Late(patience) => Problem { advice: ADVICE.to_owned(), ..late(api, patience) },
            Failure::Reported(problem) => problem,
        })?;
        if answer.status == StatusCode::OK {
            let mut said: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            return match said.get_mut("metadata").map(Value::take) {
                Some(metadata @ Value::Object(_)) => Ok(Ok(metadata)),
                _ => Err(wrong(format!("what {} sent is none of {kind}", api.url()))),
            };
        }
        let status = api.status(&answer);
        if answer.status == StatusCode::NOT_FOUND && status.reason == "NotFound" {
            return Ok(Err(status.message));
        }
        Err(wrong(api.complaint(&answer, kind, name)))
    }
}

fn is_ending(metadata: &Value) -> bool {
    metadata["deletionTimestamp"].is_string()
}

fn wrong(what: String) -> Problem {
    Problem::new(what, ADVICE)
}
