//! Objects of the Kubernetes API, as far as the plugin reads them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) generate_name: String,
    pub(crate) service_account: String,
    /// The node that the pod is scheduled to; empty if there is none yet.
    pub(crate) node: String,
    /// The ports that an endpoint has, those of the containers first and of the init containers last.
    pub(crate) ports: Vec<Port>,
}

/// A port of a container that has a name or a port on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    /// The port on the host; 0 for none.
    pub(crate) host_port: u16,
    pub(crate) host_ip: String,
}

impl Namespace {
    /// The namespace of that name; `None` if the text is no object of the API.
    pub(super) fn from_json(name: &str, text: &[u8]) -> Option<Self> {
        let Metadata { labels, annotations, .. } = Object::read(text)?.metadata;
        Some(Self { name: name.to_owned(), labels, annotations })
    }
}

impl Pod {
    /// `None` if the text is no object of the API.
    pub(super) fn from_json(text: &[u8]) -> Option<Self> {
        let Object { metadata, spec } = Object::read(text)?;
        let Spec { node_name, service_account_name, containers, init_containers, .. } = spec;
        let ports = containers.into_iter().chain(init_containers).flat_map(|container| container.ports);
        Some(Self {
            labels: metadata.labels,
            annotations: metadata.annotations,
            generate_name: metadata.generate_name,
            service_account: service_account_name,
            node: node_name,
            ports: ports.filter_map(ContainerPort::into_port).collect(),
        })
    }
}

/// The ranges of a node's pods; `None` if the text is no object of the API.
pub(super) fn pod_cidrs(text: &[u8]) -> Option<Vec<String>> {
    Some(Object::read(text)?.spec.pod_cidrs)
}

/// The parts of namespaces, pods and nodes that the plugin reads.
#[derive(Deserialize)]
struct Object {
    metadata: Metadata,
    #[serde(default, deserialize_with = "or_default")]
    spec: Spec,
}

impl Object {
    /// The reader's error is left aside: it repeats a part of the text, and a pod has secrets in it.
    fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    generate_name: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    #[serde(deserialize_with = "or_default")]
    node_name: String,
    #[serde(deserialize_with = "or_default")]
    service_account_name: String,
    #[serde(deserialize_with = "or_default")]
    containers: Vec<Container>,
    #[serde(deserialize_with = "or_default")]
    init_containers: Vec<Container>,
    #[serde(rename = "podCIDRs", deserialize_with = "or_default")]
    pod_cidrs: Vec<String>,
}

#[derive(Deserialize)]
struct Container {
    #[serde(default, deserialize_with = "or_default")]
    ports: Vec<ContainerPort>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerPort {
    #[serde(deserialize_with = "or_default")]
    name: String,
    #[serde(deserialize_with = "or_default")]
    container_port: u16,
    #[serde(deserialize_with = "or_default")]
    host_port: u16,
    #[serde(rename = "hostIP", deserialize_with = "or_default")]
    host_ip: String,
    #[serde(deserialize_with = "or_default")]
    protocol: String,
}

impl ContainerPort {
    /// `None` if an endpoint has no such port: policies and port maps need a name or a port on the host.
    fn into_port(self) -> Option<Port> {
        let protocol = match self.protocol.as_str() {
            "" | "TCP" => "TCP",
            "UDP" => "UDP",
            "SCTP" => "SCTP",
            _ => return None,
        };
        let counts = self.container_port != 0 && (self.host_port != 0 || !self.name.is_empty());
        counts.then_some(Port {
            name: self.name,
            protocol,
            port: self.container_port,
            host_port: self.host_port,
            host_ip: self.host_ip,
        })
    }
}

/// Null is as good as absent.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}
