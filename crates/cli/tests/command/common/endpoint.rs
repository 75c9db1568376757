//! Stores workload endpoints as the main plugin stores them.

use ipam_core::Ipam;
use ipam_core::endpoints::{EndpointQuery, PoolsToRead};
use ipam_core::model::{EndpointFacts, Labels, Orchestrator, workload_endpoint_name};
use kv::Deadline;
use serde_json::Value;

use crate::common::{Lab, TEST_TIMEOUT};

/// The workload endpoint of a container or a pod on a node.
pub(crate) struct Endpoint<'a> {
    pub(crate) node: &'a str,
    pub(crate) container: &'a str,
    /// The namespace and the name of the endpoint's pod; `None` for a container without a pod.
    pub(crate) pod: Option<(&'a str, &'a str)>,
    pub(crate) address: &'a str,
}

impl Endpoint<'_> {
    pub(crate) fn namespace(&self) -> &str {
        self.pod.map_or("default", |(namespace, _)| namespace)
    }

    pub(crate) fn name(&self) -> String {
        let (orchestrator, id) = self.pod.map_or(("cni", self.container), |(_, pod)| ("k8s", pod));
        let parts = [("node", self.node), ("orchestrator", orchestrator), ("id", id), ("endpoint", "eth0")];
        workload_endpoint_name(&parts).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Stores the workload endpoint together with the profile of network `net`.
    pub(crate) async fn store(&self, ipam: &Ipam) {
        let query = EndpointQuery {
            namespace: self.namespace().to_owned(),
            prefix: None,
            profile: Some("net".to_owned()),
            pools: PoolsToRead::Skipped,
        };
        let orchestrator = if self.pod.is_some() { Orchestrator::K8s } else { Orchestrator::Cni };
        let facts = EndpointFacts {
            node: self.node.to_owned(),
            orchestrator,
            container: self.container.to_owned(),
            pod: self.pod.map(|(_, pod)| pod.to_owned()).unwrap_or_default(),
            endpoint: "eth0".to_owned(),
            service_account: String::new(),
            generate_name: String::new(),
            labels: Labels::new(),
            addresses: vec![self.address.parse().unwrap_or_else(|error| panic!("{error}"))],
            nats: Vec::new(),
            profiles: vec!["net".to_owned()],
            interface: "cali8085686fbb3".to_owned(),
            mac: "ca:fe:ca:fe:ca:fe".to_owned(),
            ports: Vec::new(),
            allowed_sources: Vec::new(),
        };
        let begun = ipam.begin_endpoint(query, Deadline::after(TEST_TIMEOUT)).await;
        let (mut pending, _) = begun.unwrap_or_else(|error| panic!("{error}"));
        let endpoint = pending.new_endpoint(&self.name(), &facts);
        pending.store(&endpoint, None, orchestrator).await.unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Returns the names of the workload endpoints in the store.
pub(crate) fn stored(lab: &Lab) -> Vec<String> {
    let list = lab.margay("get wep -A -o json").json();
    let name = |item: &Value| item["metadata"]["name"].as_str().unwrap().to_owned();
    list["items"].as_array().unwrap().iter().map(name).collect()
}

/// Returns the names of the workload endpoints in the list `list` of a report.
pub(crate) fn named(report: &Value, list: &str) -> Vec<String> {
    let rows = report["stores"][0][list].as_array().unwrap();
    rows.iter().map(|row| row["name"].as_str().unwrap().to_owned()).collect()
}
