//! Defines the WorkloadEndpoint document, which records the addresses, profiles and interface of a container or a pod.
//! Checks endpoints against Calico's rules, with Calico's error messages, and creates the profile of a network whose
//! configuration has no policy.

use std::net::IpAddr;

use kv::{Key, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use time::OffsetDateTime;

use super::codec::{Document, Malformed, to_json};
use super::handle::workload_endpoint_name;
use super::keys;
use super::resource::{Labels, Resource, object};
use super::spec::spec_fields;
use crate::timestamps::rfc3339;

spec_fields! {
    /// Field names of an endpoint's spec, of its floating addresses and of its ports, in calicoctl's output order.
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

/// The label that contains the endpoint's namespace, and that Calico sets whenever it writes an endpoint.
const LABEL_NAMESPACE: &str = "projectcalico.org/namespace";
/// The label that contains the orchestrator's name, and that Calico sets whenever it writes an endpoint.
const LABEL_ORCHESTRATOR: &str = "projectcalico.org/orchestrator";
/// The label that contains the name of the pod's service account, and that Calico sets if the account's name is shorter
/// than 63 bytes.
const LABEL_SERVICE_ACCOUNT: &str = "projectcalico.org/serviceaccount";
/// Maximum length of a service account's name in a label, in bytes.
const MAX_ACCOUNT_LABEL_BYTES: usize = 62;

/// The program that started the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Orchestrator {
    /// A container runtime that passes no pod name to the CNI plugin.
    Cni,
    /// Kubernetes started the container.
    K8s,
}

impl Orchestrator {
    /// Returns the orchestrator's name as written in endpoint names and documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cni => "cni",
            Self::K8s => "k8s",
        }
    }
}

/// An entry in a workload endpoint's list of the pod's ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointPort {
    /// The name of the port; may be empty.
    pub name: String,
    /// The protocol of the port (`TCP`, `UDP` or `SCTP`).
    pub protocol: String,
    /// The port number inside the pod.
    pub port: u16,
    /// The node's port that forwards to the pod's port; 0 if no such port is set.
    pub host_port: u16,
    /// The node's address on which the host port listens; may be empty.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
}

/// The properties that a workload endpoint records about a container or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointFacts {
    /// The node's name.
    pub node: String,
    /// The orchestrator that started the container.
    pub orchestrator: Orchestrator,
    /// The container's id, or the id of the pod's sandbox.
    pub container: String,
    /// The pod's name; empty for a container without a pod.
    pub pod: String,
    /// The name of the container's interface, which is also a part of the endpoint's name.
    pub endpoint: String,
    /// The pod's service account; may be empty.
    pub service_account: String,
    /// The prefix from which Kubernetes generated the pod's name; may be empty.
    pub generate_name: String,
    /// The labels of the pod, without the labels that Calico sets automatically.
    pub labels: Labels,
    /// The addresses of the container or pod.
    pub addresses: Vec<IpAddr>,
    /// The floating addresses, as pairs of the endpoint's address and the external address.
    pub nats: Vec<(IpAddr, IpAddr)>,
    /// The names of the profiles that apply to the endpoint.
    pub profiles: Vec<String>,
    /// The name of the host-side interface that is paired with the container's interface.
    pub interface: String,
    /// The MAC address of the container's interface: six or more bytes in lower case, separated by colons.
    pub mac: String,
    /// The ports that the pod declares.
    pub ports: Vec<EndpointPort>,
    /// CIDRs from which the endpoint may send packets, besides its own addresses.
    pub allowed_sources: Vec<String>,
}

/// A stored workload endpoint. Unknown fields of the stored document are kept.
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
    /// Creates a workload endpoint. The argument `uid` must be a random UUID, and the creation time is `now`, truncated
    /// to seconds.
    pub fn new(namespace: &str, name: &str, facts: &EndpointFacts, uid: &str, now: OffsetDateTime) -> Self {
        let mut endpoint = Self { namespace: namespace.to_owned(), resource: Resource::empty(name) };
        let metadata = json!({ "name": name, "namespace": namespace, "uid": uid, "creationTimestamp": rfc3339(now) });
        endpoint.resource.set_part("metadata", metadata);
        endpoint.update(facts);
        endpoint
    }

    /// Overwrites what the endpoint records about its container or pod, but keeps the endpoint's unique id, creation
    /// time and unknown fields.
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

    /// Replaces the endpoint's labels, and adds the labels that Calico sets automatically.
    fn set_labels(&mut self, facts: &EndpointFacts) {
        let mut labels = facts.labels.clone();
        let account = &facts.service_account;
        if !account.is_empty() && account.len() <= MAX_ACCOUNT_LABEL_BYTES {
            labels.insert(LABEL_SERVICE_ACCOUNT.to_owned(), account.clone());
        }
        labels.insert(LABEL_NAMESPACE.to_owned(), self.namespace.clone());
        labels.insert(LABEL_ORCHESTRATOR.to_owned(), facts.orchestrator.as_str().to_owned());
        self.resource.set_labels(&labels);
    }

    /// Adds a profile to the endpoint unless the endpoint already has the profile, and updates Calico's automatic
    /// labels.
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

    /// Returns a copy of this endpoint for another node, under a name that contains the other node's name. Returns
    /// `None` if the endpoint's name lacks the CNI plugin's form, or if the node's name is not allowed in endpoint
    /// names.
    pub fn on_node(&self, node: &str) -> Option<Self> {
        let mut resource = self.resource.renamed(&endpoint_name_on(self.name(), node)?);
        resource.set_spec(NODE, Some(node.into()));
        Some(Self { namespace: self.namespace.clone(), resource })
    }

    /// Returns the key of the endpoint.
    pub fn key(&self) -> Key {
        keys::workload_endpoint(&self.namespace, self.name())
    }

    /// Returns the namespace of the endpoint.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the name of the endpoint.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// Returns the endpoint's unique id; empty if the document contains none.
    pub fn uid(&self) -> &str {
        self.resource.uid()
    }

    /// Returns the endpoint's stored creation time; empty if the document contains none.
    pub fn created(&self) -> &str {
        self.resource.creation_timestamp()
    }

    /// Returns the whole document of the endpoint.
    pub fn document(&self) -> &Map<String, Json> {
        self.resource.document()
    }

    /// Returns the name of the endpoint's node; empty if the document contains none.
    pub fn node(&self) -> &str {
        self.resource.text(NODE)
    }

    /// Returns the endpoint's orchestrator, which is `cni` or `k8s` for endpoints of the CNI plugin.
    pub fn orchestrator(&self) -> &str {
        self.resource.text(ORCHESTRATOR)
    }

    /// Returns the container's id; empty if the document contains none.
    pub fn container(&self) -> &str {
        self.resource.text(CONTAINER)
    }

    /// Returns the pod's name; empty for a container without a pod.
    pub fn pod(&self) -> &str {
        self.resource.text(POD)
    }

    /// Returns the name of the interface in the container.
    pub fn endpoint(&self) -> &str {
        self.resource.text(ENDPOINT)
    }

    /// Returns the name of the host-side interface that is paired with the container's interface.
    pub fn interface(&self) -> &str {
        self.resource.text(INTERFACE)
    }

    /// Returns the MAC address of the container's interface.
    pub fn mac(&self) -> &str {
        self.resource.text(MAC)
    }

    /// Returns the addresses of the endpoint, without stored addresses that cannot be parsed.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let networks = self.resource.texts(NETWORKS);
        networks.filter_map(|text| text.parse::<ipnet::IpNet>().ok().map(|network| network.addr())).collect()
    }

    /// Returns the stored addresses of the endpoint, as text with their prefix lengths.
    pub fn networks(&self) -> Vec<String> {
        self.resource.texts(NETWORKS).map(str::to_owned).collect()
    }

    /// Returns the names of the endpoint's profiles.
    pub fn profiles(&self) -> Vec<String> {
        self.resource.texts(PROFILES).map(str::to_owned).collect()
    }
}

/// Formats an address as a /32 or /128 CIDR, the form in which Calico stores addresses.
pub fn host_network(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// Maximum length of a document's name, in bytes.
const MAX_NAME_BYTES: usize = 253;
/// Maximum length in bytes of a label's value, and of the part of a label's name after the `/`.
const MAX_LABEL_BYTES: usize = 63;

const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const LABEL_NAME: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
    alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and \
    must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for \
    validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

/// Checks the name and the properties of an endpoint before the endpoint is stored.
///
/// # Errors
/// Returns Calico's error message, which lists every invalid field.
pub fn check_endpoint(name: &str, facts: &EndpointFacts) -> Result<(), String> {
    let mut wrong = FieldErrors::default();
    wrong.check_document_name(name);
    for (label, value) in &facts.labels {
        if label != LABEL_NAMESPACE && label != LABEL_ORCHESTRATOR {
            wrong.check_label(label, value);
        }
    }
    wrong.check_name("Node", &facts.node);
    if !facts.container.is_empty() && !is_label(&facts.container, |c| c.is_ascii_alphanumeric() || c == '-') {
        wrong.tagged("ContainerID", &facts.container, "containerID");
    }
    wrong.check_name("Pod", &facts.pod);
    wrong.check_name("Endpoint", &facts.endpoint);
    wrong.check_name("ServiceAccountName", &facts.service_account);
    for (index, profile) in facts.profiles.iter().enumerate() {
        wrong.check_name(&format!("Profiles[{index}]"), profile);
    }
    let interface = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if facts.interface.is_empty() || facts.interface.len() > 15 || !facts.interface.chars().all(interface) {
        wrong.tagged("InterfaceName", &facts.interface, "interface");
    }
    let inside =
        |(inner, outer): &(_, IpAddr)| facts.addresses.contains(inner) && IpAddr::is_ipv4(inner) == outer.is_ipv4();
    if !facts.nats.iter().all(inside) {
        let pairs: Vec<String> = facts.nats.iter().map(|(inner, outer)| format!("{{{inner} {outer}}}")).collect();
        wrong.field("IPNATs", &format!("[{}]", pairs.join(" ")), "NAT is not in the endpoint networks");
    }
    wrong.finish()
}

/// The error messages for an endpoint's invalid fields, in the order of the fields in the document.
#[derive(Default)]
struct FieldErrors(Vec<String>);

impl FieldErrors {
    fn field(&mut self, field: &str, value: &str, reason: &str) {
        self.0.push(format!("{field} = '{value}' ({reason})"));
    }

    /// Adds the error message for a field whose value violates the validation rule `tag`.
    fn tagged(&mut self, field: &str, value: &str, tag: &str) {
        // The trailing space in the format string is copied from Calico's error message, which has a space before its
        // closing parenthesis.
        self.field(field, value, &format!("Reason: failed to validate Field: {field} because of Tag: {tag} "));
    }

    fn check_document_name(&mut self, name: &str) {
        if name.len() > MAX_NAME_BYTES {
            self.field("Metadata.Name", name, &format!("name is too long by {} bytes", name.len() - MAX_NAME_BYTES));
        }
        if !is_subdomain(name) {
            let rule = "name must consist of lower case alphanumeric characters, '-' or '.'";
            self.field("Metadata.Name", name, &format!("{rule} (regex: {SUBDOMAIN})"));
        }
    }

    fn check_name(&mut self, field: &str, value: &str) {
        if !value.is_empty() && !is_subdomain(value) {
            self.tagged(field, value, "name");
        }
    }

    fn check_label(&mut self, label: &str, value: &str) {
        let (prefix, name) = label.split_once('/').map_or((None, label), |(prefix, name)| (Some(prefix), name));
        let mut wrong = |reason: String| self.field("Metadata.Labels (label)", label, &reason);
        if prefix.is_some_and(|prefix| !is_subdomain(prefix)) {
            wrong("prefix part must be a lowercase RFC 1123 subdomain".to_owned());
        }
        if name.is_empty() {
            wrong("name part must be non-empty".to_owned());
        } else if name.len() > MAX_LABEL_BYTES {
            wrong(format!("name part must be no more than {MAX_LABEL_BYTES} bytes"));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !is_label(name, allowed) {
            wrong(format!("name part {LABEL_NAME}"));
        }
        if value.len() > MAX_LABEL_BYTES {
            self.field("Metadata.Labels (value)", value, &format!("must be no more than {MAX_LABEL_BYTES} bytes"));
        }
        if !value.is_empty() && !is_label(value, allowed) {
            self.field("Metadata.Labels (value)", value, LABEL_VALUE);
        }
    }

    fn finish(self) -> Result<(), String> {
        match self.0.as_slice() {
            [] => Ok(()),
            [one] => Err(format!("error with field {one}")),
            several => {
                let lines: String = several.iter().map(|field| format!("-  {field}\n")).collect();
                Err(format!("error with the following fields:\n{lines}"))
            }
        }
    }
}

/// True if `allowed` accepts all characters of the text, and the first and the last character are letters or digits.
fn is_label(text: &str, allowed: impl Fn(char) -> bool) -> bool {
    text.chars().all(allowed)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

fn is_subdomain(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.split('.').all(|part| is_label(part, allowed))
}

/// Splits an endpoint's name into four parts: node, orchestrator, container id or pod name, and interface. In an
/// endpoint's name, single dashes separate the parts, and a double dash is a dash inside a part. Returns `None` if the
/// endpoint's name does not have four parts.
pub fn split_endpoint_name(name: &str) -> Option<[String; 4]> {
    let mut parts = vec![String::new()];
    let mut chars = name.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '-' {
            parts.last_mut()?.push(c);
        } else if chars.next_if_eq(&'-').is_some() {
            parts.last_mut()?.push('-');
        } else {
            parts.push(String::new());
        }
    }
    parts.try_into().ok()
}

/// Returns the name that an endpoint gets when it belongs to another node. Returns `None` if the endpoint's name does
/// not have four parts, or if the node's name is not allowed in endpoint names.
pub fn endpoint_name_on(name: &str, node: &str) -> Option<String> {
    let [_, orchestrator, workload, endpoint] = split_endpoint_name(name)?;
    let parts = [("node", node), ("orchestrator", &orchestrator), ("workload", &workload), ("endpoint", &endpoint)];
    workload_endpoint_name(&parts).ok()
}

/// Encodes a new profile that is named after a network. The profile lets all containers of the network accept traffic
/// from each other, and lets pods accept all traffic. The argument `uid` must be a random UUID, and the creation time
/// is `now`, truncated to seconds.
///
/// # Errors
/// [`Malformed`] if the profile cannot be encoded, which does not happen in practice.
pub fn new_profile(
    network: &str,
    orchestrator: Orchestrator,
    uid: &str,
    now: OffsetDateTime,
) -> Result<Value, Malformed> {
    let ingress = match orchestrator {
        Orchestrator::Cni => json!([{ "action": "Allow", "source": { "selector": format!("has({network})") } }]),
        Orchestrator::K8s => json!([{ "action": "Allow" }]),
    };
    to_json(&json!({
        "kind": "Profile",
        "apiVersion": "projectcalico.org/v3",
        "metadata": { "name": network, "uid": uid, "creationTimestamp": rfc3339(now) },
        "spec": {
            "ingress": ingress,
            "egress": [{ "action": "Allow" }],
            "labelsToApply": { network: "" },
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::resource::Labels;

    fn pod_facts() -> EndpointFacts {
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
    fn endpoint_of_pod_is_stored_as_calico_stores_it() {
        let endpoint = WorkloadEndpoint::new("shop", "node1-k8s-pod1-eth0", &pod_facts(), "u", now());
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
        assert_eq!(again.addresses(), pod_facts().addresses);
    }

    #[test]
    fn endpoint_update_keeps_identity_and_unknown_fields() {
        let key = keys::workload_endpoint("shop", "n");
        let stored =
            br#"{"metadata":{"uid":"old","creationTimestamp":"2026-01-01T00:00:00Z","labels":{"gone":"x"},"later":1},
            "spec":{"ipNATs":[{"internalIP":"1.1.1.1","externalIP":"2.2.2.2"}],"pod":"pod1","unknown":{"a":null}}}"#;
        let mut endpoint = WorkloadEndpoint::decode(&key, stored).unwrap();
        let facts = EndpointFacts { nats: Vec::new(), service_account: "a".repeat(63), ..pod_facts() };
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
    fn endpoint_has_name_of_node_it_is_on() {
        let endpoint = WorkloadEndpoint::new("shop", "old-k8s-my--pod-eth0", &pod_facts(), "u", now());
        let moved = endpoint.on_node("new-host").unwrap();
        assert_eq!((moved.name(), moved.node(), moved.namespace()), ("new--host-k8s-my--pod-eth0", "new-host", "shop"));
        assert_eq!(moved.resource.metadata("name"), Some(&"new--host-k8s-my--pod-eth0".into()));
        assert_eq!((moved.uid(), moved.interface()), ("u", "cali8085686fbb3"));
        assert_eq!(moved.on_node("node1").unwrap().on_node("old").unwrap().name(), endpoint.name());
        assert_eq!(endpoint.on_node("-x"), None);
        assert_eq!(WorkloadEndpoint::new("shop", "other", &pod_facts(), "u", now()).on_node("a"), None);
    }

    #[test]
    fn endpoint_appends_profile_of_second_network_once() {
        let facts = EndpointFacts { profiles: vec!["net1".into()], orchestrator: Orchestrator::Cni, ..pod_facts() };
        let mut endpoint = WorkloadEndpoint::new("default", "n", &facts, "u", now());
        endpoint.add_profile("net2");
        endpoint.add_profile("net2");
        endpoint.add_profile("net1");
        assert_eq!(endpoint.profiles(), ["net1", "net2"]);
    }

    fn container_facts() -> EndpointFacts {
        EndpointFacts {
            node: "node1".into(),
            orchestrator: Orchestrator::Cni,
            container: "c1".into(),
            pod: String::new(),
            endpoint: "eth0".into(),
            service_account: String::new(),
            generate_name: String::new(),
            labels: Labels::new(),
            addresses: vec!["10.65.166.128".parse().unwrap()],
            nats: Vec::new(),
            profiles: vec!["net1".into()],
            interface: "calic1".into(),
            mac: String::new(),
            ports: Vec::new(),
            allowed_sources: Vec::new(),
        }
    }

    fn error(name: &str, facts: &EndpointFacts) -> String {
        check_endpoint(name, facts).unwrap_err()
    }

    #[test]
    fn endpoint_errors_match_calico() {
        check_endpoint("node1-cni-c1-eth0", &container_facts()).unwrap();
        let subdomain = "name must consist of lower case alphanumeric characters, '-' or '.' (regex: [a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)";
        let upper = EndpointFacts { node: "Old-Name".into(), ..container_facts() };
        assert_eq!(
            error("Old--Name-cni-c4-eth0", &upper),
            format!(
                "error with the following fields:\n-  Metadata.Name = 'Old--Name-cni-c4-eth0' ({subdomain})\n-  Node = 'Old-Name' (Reason: failed to validate Field: Node because of Tag: name )\n"
            )
        );
        let dot = EndpointFacts { container: "with.dot".into(), ..container_facts() };
        assert_eq!(
            error("node1-cni-with.dot-eth0", &dot),
            "error with field ContainerID = 'with.dot' (Reason: failed to validate Field: ContainerID because of Tag: containerID )"
        );
        let profile = EndpointFacts { profiles: vec!["Net_1.x".into()], ..container_facts() };
        assert_eq!(
            error("n-cni-c-e", &profile),
            "error with field Profiles[0] = 'Net_1.x' (Reason: failed to validate Field: Profiles[0] because of Tag: name )"
        );
        let long = "a".repeat(254);
        assert_eq!(
            error(&long, &container_facts()),
            format!("error with field Metadata.Name = '{long}' (name is too long by 1 bytes)")
        );
    }

    #[test]
    fn endpoint_labels_match_kubernetes() {
        let with = |name: &str, value: &str| EndpointFacts {
            labels: [(name.into(), value.into())].into(),
            ..container_facts()
        };
        check_endpoint("n", &with("a.b/c", "")).unwrap();
        let long = "x".repeat(64);
        assert_eq!(
            error("n", &with("a", &long)),
            format!("error with field Metadata.Labels (value) = '{long}' (must be no more than 63 bytes)")
        );
        let empty = error("n", &with("", "x"));
        assert!(empty.contains("-  Metadata.Labels (label) = '' (name part must be non-empty)\n"), "{empty}");
        assert!(empty.contains("(e.g. 'MyName',  or 'my.name',  or '123-abc', regex"), "{empty}");
    }

    #[test]
    fn endpoint_has_floating_addresses() {
        let ip = |text: &str| text.parse().unwrap();
        let with = |inner, outer| EndpointFacts { nats: vec![(ip(inner), ip(outer))], ..container_facts() };
        check_endpoint("n", &with("10.65.166.128", "10.65.200.1")).unwrap();
        assert_eq!(
            error("n", &with("10.65.166.129", "10.65.200.1")),
            "error with field IPNATs = '[{10.65.166.129 10.65.200.1}]' (NAT is not in the endpoint networks)"
        );
        assert!(check_endpoint("n", &with("10.65.166.128", "fd80::1")).is_err());
    }

    #[test]
    fn endpoint_names_are_split_at_single_dashes() {
        let parts = split_endpoint_name("named--host-cni-a--b-eth0").unwrap();
        assert_eq!(parts, ["named-host", "cni", "a-b", "eth0"]);
        for name in ["a-b-c", "a-b-c-d-e", ""] {
            assert_eq!(split_endpoint_name(name), None, "{name}");
        }
    }
}
