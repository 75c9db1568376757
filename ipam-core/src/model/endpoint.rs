//! WorkloadEndpoint: the document that says which addresses, profiles and interface a container or a pod has.

use std::net::IpAddr;

use kv::{Key, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use time::OffsetDateTime;

use super::codec::{Document, Malformed};
use super::endpoint_rules::endpoint_name_on;
use super::keys;
use super::resource::{Labels, Resource, object};
use super::spec_field::spec_fields;
use crate::timestamps::rfc3339;

spec_fields! {
    /// The fields of an endpoint's spec, of its floating addresses and of its ports, in the order in which calicoctl prints
    /// them.
    pub const ENDPOINT_FIELDS:
    ORCHESTRATOR = "orchestrator";
    _ = "workload";
    NODE = "node";
    CONTAINER = "containerID";
    POD = "pod";
    ENDPOINT = "endpoint";
    SERVICE_ACCOUNT = "serviceAccountName";
    NETWORKS = "ipNetworks";
    NATS = "ipNATs";
    INTERNAL_IP = "internalIP";
    EXTERNAL_IP = "externalIP";
    _ = "ipv4Gateway"; _ = "ipv6Gateway";
    PROFILES = "profiles";
    INTERFACE = "interfaceName";
    MAC = "mac";
    PORTS = "ports";
    _ = "protocol"; _ = "port"; _ = "hostPort"; _ = "hostIP";
    ALLOWED_SOURCES = "allowSpoofedSourcePrefixes";
}

/// The label that repeats the endpoint's namespace. Calico sets it on each write.
pub(super) const LABEL_NAMESPACE: &str = "projectcalico.org/namespace";
/// The label that repeats the orchestrator. Calico sets it on each write.
pub(super) const LABEL_ORCHESTRATOR: &str = "projectcalico.org/orchestrator";
/// The label that names the pod's service account. Calico sets it if the name is shorter than 63 bytes.
const LABEL_SERVICE_ACCOUNT: &str = "projectcalico.org/serviceaccount";
/// The longest name of a service account that becomes a label, in bytes.
const MAX_ACCOUNT_LABEL: usize = 62;

/// The program that started the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Orchestrator {
    /// A runtime that names no pod.
    Cni,
    /// Kubernetes.
    K8s,
}

impl Orchestrator {
    /// The orchestrator as endpoint names and documents spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cni => "cni",
            Self::K8s => "k8s",
        }
    }
}

/// A port of a pod, as an endpoint lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointPort {
    /// The port's name; may be empty.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The port in the pod.
    pub port: u16,
    /// The port of the node that leads to it; 0 for none.
    pub host_port: u16,
    /// The node's address for that port; may be empty.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
}

/// The facts of one container or pod that an endpoint records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointFacts {
    /// The node's name.
    pub node: String,
    /// The orchestrator.
    pub orchestrator: Orchestrator,
    /// The container's id; for a pod the id of its sandbox.
    pub container: String,
    /// The pod's name; empty for a plain container.
    pub pod: String,
    /// The interface in the container that the endpoint is named after.
    pub endpoint: String,
    /// The pod's service account; may be empty.
    pub service_account: String,
    /// The prefix that Kubernetes made the pod's name from; may be empty.
    pub generate_name: String,
    /// Labels, without the ones that Calico sets by itself.
    pub labels: Labels,
    /// The addresses.
    pub addresses: Vec<IpAddr>,
    /// Floating addresses: pairs of an address of the endpoint and an outer one.
    pub nats: Vec<(IpAddr, IpAddr)>,
    /// The names of the profiles.
    pub profiles: Vec<String>,
    /// The name of the host's end of the pair.
    pub interface: String,
    /// The address of the container's end: six or more bytes in lower case, with colons.
    pub mac: String,
    /// The ports.
    pub ports: Vec<EndpointPort>,
    /// Networks that the endpoint may send from beside its addresses.
    pub allowed_sources: Vec<String>,
}

/// A stored endpoint. Fields that this version does not know are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadEndpoint {
    namespace: String,
    resource: Resource,
}

impl Document for WorkloadEndpoint {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let (namespace, name) = keys::parse_workload_endpoint(key)
            .ok_or_else(|| Malformed::new(key, "not the key of a workload endpoint"))?;
        Ok(Self { namespace: namespace.to_owned(), resource: Resource::read(name, key, value)? })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}

impl WorkloadEndpoint {
    /// A new endpoint. `uid` is a random UUID; the time is cut to the second.
    pub fn new(namespace: &str, name: &str, facts: &EndpointFacts, uid: &str, now: OffsetDateTime) -> Self {
        let mut endpoint = Self { namespace: namespace.to_owned(), resource: Resource::empty(name) };
        let metadata = json!({ "name": name, "namespace": namespace, "uid": uid, "creationTimestamp": rfc3339(now) });
        endpoint.resource.set_part("metadata", metadata);
        endpoint.update(facts);
        endpoint
    }

    /// Overwrites the fields of the facts. The identity, the time of creation and unknown fields stay.
    pub fn update(&mut self, facts: &EndpointFacts) {
        self.resource.set_part("kind", "WorkloadEndpoint".into());
        self.resource.set_part("apiVersion", "projectcalico.org/v3".into());
        let prefix = (!facts.generate_name.is_empty()).then(|| facts.generate_name.as_str().into());
        self.resource.set("metadata", "generateName", prefix);
        self.set_labels(facts);
        let nat = |(inner, outer): &(IpAddr, IpAddr)| {
            Json::from_iter([INTERNAL_IP.with(inner.to_string()), EXTERNAL_IP.with(outer.to_string())])
        };
        let fields = [
            (ORCHESTRATOR, Json::from(facts.orchestrator.as_str())),
            (NODE, facts.node.as_str().into()),
            (CONTAINER, facts.container.as_str().into()),
            (POD, facts.pod.as_str().into()),
            (ENDPOINT, facts.endpoint.as_str().into()),
            (SERVICE_ACCOUNT, facts.service_account.as_str().into()),
            (NETWORKS, facts.addresses.iter().map(|ip| host_network(*ip)).collect()),
            (NATS, facts.nats.iter().map(nat).collect()),
            (PROFILES, facts.profiles.clone().into()),
            (INTERFACE, facts.interface.as_str().into()),
            (MAC, facts.mac.as_str().into()),
            (PORTS, facts.ports.iter().filter_map(|port| serde_json::to_value(port).ok()).collect()),
            (ALLOWED_SOURCES, facts.allowed_sources.clone().into()),
        ];
        for (field, value) in fields {
            let is_empty = value == "" || value == json!([]);
            self.resource.set_spec(field, (!is_empty).then_some(value));
        }
    }

    /// Replaces the labels. Calico's own ones come on top.
    fn set_labels(&mut self, facts: &EndpointFacts) {
        let mut labels = facts.labels.clone();
        let account = &facts.service_account;
        if !account.is_empty() && account.len() <= MAX_ACCOUNT_LABEL {
            labels.insert(LABEL_SERVICE_ACCOUNT.to_owned(), account.clone());
        }
        labels.insert(LABEL_NAMESPACE.to_owned(), self.namespace.clone());
        labels.insert(LABEL_ORCHESTRATOR.to_owned(), facts.orchestrator.as_str().to_owned());
        self.resource.set_labels(&labels);
    }

    /// Appends a profile unless it is there, and sets Calico's own labels.
    pub fn add_profile(&mut self, profile: &str) {
        let orchestrator = self.orchestrator().to_owned();
        let labels = object(self.resource.part("metadata").entry("labels"));
        labels.insert(LABEL_NAMESPACE.to_owned(), self.namespace.clone().into());
        labels.insert(LABEL_ORCHESTRATOR.to_owned(), orchestrator.into());
        let profiles = self.resource.part("spec").entry(PROFILES.name).or_insert(Json::Null);
        match profiles {
            Json::Array(profiles) if profiles.iter().any(|have| have.as_str() == Some(profile)) => {}
            Json::Array(profiles) => profiles.push(profile.into()),
            other => *other = json!([profile]),
        }
    }

    /// The same endpoint on another node, under the name that belongs to it; `None` if the endpoint has no name of the CNI
    /// plugin's, or the node's name cannot be part of one.
    pub fn on_node(&self, node: &str) -> Option<Self> {
        let mut resource = self.resource.renamed(&endpoint_name_on(self.name(), node)?);
        resource.set_spec(NODE, Some(node.into()));
        Some(Self { namespace: self.namespace.clone(), resource })
    }

    /// The key.
    pub fn key(&self) -> Key {
        keys::workload_endpoint(&self.namespace, self.name())
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// The unique id; empty if there is none.
    pub fn uid(&self) -> &str {
        self.resource.uid()
    }

    /// When it was made, as stored; empty if that is not recorded.
    pub fn created(&self) -> &str {
        self.resource.creation_timestamp()
    }

    /// The whole document.
    pub fn document(&self) -> &Map<String, Json> {
        self.resource.document()
    }

    /// The node; empty if the document names none.
    pub fn node(&self) -> &str {
        self.resource.text(NODE)
    }

    /// The orchestrator, `cni` or `k8s` for endpoints of the plugin.
    pub fn orchestrator(&self) -> &str {
        self.resource.text(ORCHESTRATOR)
    }

    /// The container's id; empty if the document names none.
    pub fn container(&self) -> &str {
        self.resource.text(CONTAINER)
    }

    /// The pod; empty for a plain container.
    pub fn pod(&self) -> &str {
        self.resource.text(POD)
    }

    /// The interface in the container.
    pub fn endpoint(&self) -> &str {
        self.resource.text(ENDPOINT)
    }

    /// The host's end of the pair.
    pub fn interface(&self) -> &str {
        self.resource.text(INTERFACE)
    }

    /// The address of the container's end.
    pub fn mac(&self) -> &str {
        self.resource.text(MAC)
    }

    /// The addresses. A network that is no single address is left out.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let networks = self.resource.texts(NETWORKS);
        networks.filter_map(|text| text.parse::<ipnet::IpNet>().ok().map(|network| network.addr())).collect()
    }

    /// The addresses as they are stored, with their prefix lengths.
    pub fn networks(&self) -> Vec<String> {
        self.resource.texts(NETWORKS).map(str::to_owned).collect()
    }

    /// The names of the profiles.
    pub fn profiles(&self) -> Vec<String> {
        self.resource.texts(PROFILES).map(str::to_owned).collect()
    }
}

/// A single address as a network, as Calico stores it.
pub fn host_network(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> EndpointFacts {
        EndpointFacts {
            node: "node1".into(),
            orchestrator: Orchestrator::K8s,
            container: "5f2d".into(),
            pod: "pod1".into(),
            endpoint: "eth0".into(),
            service_account: "seller".into(),
            generate_name: "pod-".into(),
            labels: Labels::from([("app".into(), "web".into())]),
            addresses: vec!["10.66.0.128".parse().unwrap(), "fd80::1".parse().unwrap()],
            nats: vec![("10.66.0.128".parse().unwrap(), "10.99.0.5".parse().unwrap())],
            profiles: vec!["kns.shop".into(), "ksa.shop.seller".into()],
            interface: "cali8085686fbb3".into(),
            mac: "ca:fe:ca:fe:ca:fe".into(),
            ports: vec![EndpointPort {
                name: "http".into(),
                protocol: "TCP".into(),
                port: 8080,
                host_port: 0,
                host_ip: String::new(),
            }],
            allowed_sources: vec!["8.8.8.8/32".into()],
        }
    }

    fn now() -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(1_795_000_000).unwrap()
    }

    #[test]
    fn a_pod_is_stored_as_calico_stores_it() {
        let endpoint = WorkloadEndpoint::new("shop", "node1-k8s-pod1-eth0", &facts(), "u", now());
        let stored: Json = serde_json::from_slice(endpoint.encode().unwrap().as_bytes()).unwrap();
        let expected = json!({"kind":"WorkloadEndpoint","apiVersion":"projectcalico.org/v3","metadata":{
            "name":"node1-k8s-pod1-eth0","generateName":"pod-","namespace":"shop","uid":"u","creationTimestamp":rfc3339(now()),
            "labels":{"app":"web","projectcalico.org/namespace":"shop","projectcalico.org/orchestrator":"k8s",
            "projectcalico.org/serviceaccount":"seller"}},"spec":{"orchestrator":"k8s","node":"node1","containerID":"5f2d",
            "pod":"pod1","endpoint":"eth0","serviceAccountName":"seller","ipNetworks":["10.66.0.128/32","fd80::1/128"],
            "ipNATs":[{"internalIP":"10.66.0.128","externalIP":"10.99.0.5"}],"profiles":["kns.shop","ksa.shop.seller"],
            "interfaceName":"cali8085686fbb3","mac":"ca:fe:ca:fe:ca:fe","ports":[{"name":"http","protocol":"TCP","port":8080,
            "hostPort":0,"hostIP":""}],"allowSpoofedSourcePrefixes":["8.8.8.8/32"]}});
        assert_eq!(stored, expected);
        let again = WorkloadEndpoint::decode(&endpoint.key(), endpoint.encode().unwrap().as_bytes()).unwrap();
        assert_eq!(again, endpoint);
        assert_eq!(again.addresses(), facts().addresses);
    }

    #[test]
    fn an_update_keeps_identity_and_unknown_fields_and_drops_what_is_gone() {
        let key = keys::workload_endpoint("shop", "n");
        let stored =
            br#"{"metadata":{"uid":"old","creationTimestamp":"2026-01-01T00:00:00Z","labels":{"gone":"x"},"later":1},
            "spec":{"ipNATs":[{"internalIP":"1.1.1.1","externalIP":"2.2.2.2"}],"pod":"pod1","unknown":{"a":null}}}"#;
        let mut endpoint = WorkloadEndpoint::decode(&key, stored).unwrap();
        let facts = EndpointFacts { nats: Vec::new(), service_account: "a".repeat(63), ..facts() };
        endpoint.update(&facts);
        let document = serde_json::to_value(endpoint.document()).unwrap();
        assert_eq!(endpoint.uid(), "old");
        assert_eq!(document["metadata"]["later"], 1);
        assert_eq!(document["metadata"]["creationTimestamp"], "2026-01-01T00:00:00Z");
        assert_eq!(document["spec"]["unknown"], json!({"a": null}));
        assert_eq!(document["spec"].get("ipNATs"), None);
        let labels = document["metadata"]["labels"].as_object().unwrap();
        assert_eq!(labels.keys().collect::<Vec<_>>(), ["app", LABEL_NAMESPACE, LABEL_ORCHESTRATOR]);
    }

    #[test]
    fn on_another_node_it_has_that_ones_name() {
        let endpoint = WorkloadEndpoint::new("shop", "old-k8s-my--pod-eth0", &facts(), "u", now());
        let moved = endpoint.on_node("new-host").unwrap();
        assert_eq!((moved.name(), moved.node(), moved.namespace()), ("new--host-k8s-my--pod-eth0", "new-host", "shop"));
        assert_eq!(moved.resource.metadata("name"), Some(&"new--host-k8s-my--pod-eth0".into()));
        assert_eq!((moved.uid(), moved.interface()), ("u", "cali8085686fbb3"));
        assert_eq!(moved.on_node("node1").unwrap().on_node("old").unwrap().name(), endpoint.name());
        assert_eq!(endpoint.on_node("-x"), None);
        assert_eq!(WorkloadEndpoint::new("shop", "other", &facts(), "u", now()).on_node("a"), None);
    }

    #[test]
    fn a_second_network_appends_its_profile_once() {
        let facts = EndpointFacts { profiles: vec!["net1".into()], orchestrator: Orchestrator::Cni, ..facts() };
        let mut endpoint = WorkloadEndpoint::new("default", "n", &facts, "u", now());
        endpoint.add_profile("net2");
        endpoint.add_profile("net2");
        endpoint.add_profile("net1");
        assert_eq!(endpoint.profiles(), ["net1", "net2"]);
    }
}
