//! The names of a container's endpoint and of its interface on the host.

use std::fmt::Write;

use agent::{CniError, Result};
use ipam_core::model::{Orchestrator, WorkloadEndpoint, split_endpoint_name, workload_endpoint_name};

/// So many characters follow the prefix in the name of a host's interface, which has 15 at most.
const ID: usize = 11;
/// The prefix of the interfaces' names if Felix has no other.
const PREFIX: &str = "cali";

/// The owner of an endpoint: a container or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) node: String,
    pub(super) orchestrator: Orchestrator,
    /// The endpoint's namespace.
    pub(super) namespace: String,
    /// The container's id, or the pod's name.
    pub(super) id: String,
}

impl Workload {
    /// The name of the endpoint of an interface.
    ///
    /// # Errors
    /// Calico's text for a part that no name can have.
    pub(super) fn endpoint(&self, interface: &str) -> Result<String> {
        let parts = [&self.parts()[..], &[("endpoint", interface)]].concat();
        workload_endpoint_name(&parts).map_err(|error| CniError::internal(error.to_string()))
    }

    /// How the names of its endpoints begin.
    ///
    /// # Errors
    /// Calico's text for a part that no name can have.
    pub(super) fn prefix(&self) -> Result<String> {
        let name = workload_endpoint_name(&self.parts()).map_err(|error| {
            let text = error.to_string().replacen("WorkloadEndpoint name", "WorkloadEndpoint prefix", 1);
            CniError::internal(text)
        })?;
        Ok(name + "-")
    }

    /// True if an endpoint of this name is one of this workload's.
    pub(super) fn has(&self, endpoint: &WorkloadEndpoint) -> bool {
        split_endpoint_name(endpoint.name()).is_some_and(|[node, orchestrator, id, _]| {
            node == self.node && orchestrator == self.orchestrator.as_str() && id == self.id
        })
    }

    /// The name of the interface on the host. `felix` is the text of FELIX_INTERFACEPREFIX. The name of a pod's interface is the
    /// pod's alone; the name of a container's has the first characters of its id.
    pub(super) fn host_interface(&self, felix: &str) -> String {
        match self.orchestrator {
            Orchestrator::Cni => PREFIX.to_owned() + &self.id.chars().take(ID).collect::<String>(),
            Orchestrator::K8s => {
                let prefix = felix.split(',').next().filter(|prefix| !prefix.is_empty()).unwrap_or(PREFIX);
                prefix.to_owned() + &self.digest()
            }
        }
    }

    /// The name of a container's interface on the host where another container has the usual one.
    pub(super) fn other_host_interface(&self) -> String {
        PREFIX.to_owned() + &self.digest()
    }

    fn digest(&self) -> String {
        hex_digest(&format!("{}.{}", self.namespace, self.id))
    }

    fn parts(&self) -> [(&'static str, &str); 3] {
        let id = match self.orchestrator {
            Orchestrator::Cni => "containerID",
            Orchestrator::K8s => "pod",
        };
        [("node", &self.node), ("orchestrator", self.orchestrator.as_str()), (id, &self.id)]
    }
}

/// The first 11 hexadecimal digits of the SHA-1 digest of a text: how Calico names a pod's interface.
fn hex_digest(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    let mut hex = String::new();
    for byte in digest.as_ref().iter().take(ID.div_ceil(2)) {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex.truncate(ID);
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(orchestrator: Orchestrator, namespace: &str, id: &str) -> Workload {
        Workload { node: "node-1".into(), orchestrator, namespace: namespace.into(), id: id.into() }
    }

    #[test]
    fn interfaces_of_the_host() {
        let pod = workload(Orchestrator::K8s, "shop", "pod1");
        assert_eq!(pod.host_interface(""), "cali8085686fbb3");
        assert_eq!(pod.host_interface("tap,cali"), "tap8085686fbb3");
        let container = workload(Orchestrator::Cni, "default", "abcdefghijklmno");
        assert_eq!(container.host_interface("tap"), "caliabcdefghijk");
        let other = container.other_host_interface();
        assert!(other.starts_with("cali") && other.len() == 15 && other != "caliabcdefghijk", "{other}");
    }

    #[test]
    fn endpoints() {
        let container = workload(Orchestrator::Cni, "default", "ab-cdefghijklm");
        assert_eq!(container.endpoint("eth0").unwrap(), "node--1-cni-ab--cdefghijklm-eth0");
        assert_eq!(container.prefix().unwrap(), "node--1-cni-ab--cdefghijklm-");
        let bad = workload(Orchestrator::Cni, "default", "ends-").prefix().unwrap_err();
        assert_eq!(
            bad.message(),
            "error constructing WorkloadEndpoint prefix: error with field containerID = 'ends-' (field must not end with a '-')"
        );
    }
}
