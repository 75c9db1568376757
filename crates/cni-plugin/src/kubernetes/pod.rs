//! Defines the objects of the Kubernetes API that the plugin reads, and the facts about a pod's endpoint. The facts
//! about a pod's endpoint are derived from the pod, its namespace and its allowed annotations.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use agent::{CniError, Result};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::gojson::{self, GoJson};

const FLOATING_IPS: &str = "cni.projectcalico.org/floatingIPs";
const HW_ADDR: &str = "cni.projectcalico.org/hwAddr";
const IP_ADDRS: &str = "cni.projectcalico.org/ipAddrs";
const IP_ADDRS_NO_IPAM: &str = "cni.projectcalico.org/ipAddrsNoIpam";
const IP_FAMILIES: &str = "cni.projectcalico.org/ipFamilies";
const POOLS_V4: &str = "cni.projectcalico.org/ipv4pools";
const POOLS_V6: &str = "cni.projectcalico.org/ipv6pools";
const SOURCE_PREFIXES: &str = "cni.projectcalico.org/allowedSourcePrefixes";

/// The values of `ipam.type` whose plugins assign addresses from pools (Calico's and Margay's).
const PLUGINS_WITH_POOLS: [&str; 2] = ["calico-ipam", "margay-ipam"];
/// Maximum length of a label's value, in bytes. A pod gets no service account label if the name of its service account
/// exceeds this maximum.
const MAX_LABEL_BYTES: usize = 63;

/// The settings of the network configuration that decide which annotations of a pod have an effect.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AllowedAnnotations<'a> {
    /// The value of `ipam.type`.
    pub(crate) ipam: &'a str,
    /// The value of `feature_control.ip_addrs_no_ipam`.
    pub(crate) ip_addrs_no_ipam: bool,
    /// The value of `feature_control.floating_ips`.
    pub(crate) floating_ips: bool,
}

impl AllowedAnnotations<'_> {
    fn has_pools(&self) -> bool {
        PLUGINS_WITH_POOLS.contains(&self.ipam)
    }
}

/// The facts about a pod that determine its WorkloadEndpoint and its network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodFacts {
    /// The pod's own labels, and the labels that Calico adds, which are `projectcalico.org/namespace`,
    /// `projectcalico.org/orchestrator` and, unless the service account's name is too long,
    /// `projectcalico.org/serviceaccount`.
    pub(crate) labels: BTreeMap<String, String>,
    /// All annotations of the pod, unchanged, for an external data plane.
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) generate_name: String,
    pub(crate) service_account: String,
    /// The names of the profiles in the pod's WorkloadEndpoint, which are `kns.<namespace>`, and also
    /// `ksa.<namespace>.<account>` if the pod has a service account.
    pub(crate) profiles: Vec<String>,
    /// The pod's ports, in the order in which its endpoint lists them.
    pub(crate) ports: Vec<KubePort>,
    /// The names or CIDRs of the pools that the pod's annotations choose, not yet checked. `None` means that no
    /// annotation of the pod chooses pools of this address family.
    pools_v4: Option<Vec<String>>,
    pools_v6: Option<Vec<String>>,
    /// Whether the pod gets an IPv4 address, and whether it gets an IPv6 address.
    pub(crate) families: Option<(bool, bool)>,
    /// The addresses to request from the IPAM plugin, at most one of each address family.
    pub(crate) ip_addrs: Option<Vec<IpAddr>>,
    /// The addresses that the pod's annotation prescribes without a call of the IPAM plugin, at most one of each
    /// address family.
    pub(crate) ip_addrs_no_ipam: Option<Vec<IpAddr>>,
    pub(crate) mac: Option<HardwareAddress>,
    /// The CIDRs of the additional source addresses that the pod may use, without host bits, in the order of the
    /// annotation.
    pub(crate) allowed_source_prefixes: Vec<String>,
    /// The valid floating addresses in the pod's annotation, written as in the annotation.
    floating_ips: Vec<String>,
}

/// A hardware address, taken from an annotation or from an external data plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HardwareAddress {
    /// The 6, 8 or 20 bytes of the hardware address, of which an interface gets only the first six.
    pub(crate) bytes: Vec<u8>,
    /// All bytes of the hardware address in lower-case hexadecimal, separated by colons.
    pub(crate) text: String,
}

impl PodFacts {
    /// Derives the facts about a pod from its annotations, before any interface is created. Calico reports some invalid
    /// annotations only after it has set up the interface.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message for an invalid annotation. For a malformed floating address, the
    /// message is Margay's own, because Calico panics.
    pub(crate) fn new(namespace: &KubeNamespace, pod: KubePod, allowed: &AllowedAnnotations<'_>) -> Result<Self> {
        if pod.node.is_empty() {
            return Err(CniError::internal("error with field node (field should be assigned)")
                .with_details("the pod is on no node yet"));
        }
        let mut facts = Self {
            allowed_source_prefixes: source_prefixes(&pod.annotations).map_err(CniError::internal)?,
            ..Self::default()
        };
        if allowed.has_pools() {
            facts.choose_pools(namespace, &pod).map_err(CniError::internal)?;
        }
        facts.want_addresses(&pod.annotations, allowed).map_err(CniError::internal)?;
        facts.mac = pod.annotations.get(HW_ADDR).map(|text| hardware_address(text)).transpose()?;
        facts.floating_ips = floating_ips(&pod.annotations, allowed)?;
        facts.profiles.push(format!("kns.{}", namespace.name));
        facts.labels = pod.labels;
        facts.labels.insert("projectcalico.org/namespace".into(), namespace.name.clone());
        facts.labels.insert("projectcalico.org/orchestrator".into(), "k8s".into());
        if !pod.service_account.is_empty() {
            facts.profiles.push(format!("ksa.{}.{}", namespace.name, pod.service_account));
            if pod.service_account.len() < MAX_LABEL_BYTES {
                facts.labels.insert("projectcalico.org/serviceaccount".into(), pod.service_account.clone());
            }
        }
        facts.service_account = pod.service_account;
        facts.generate_name = pod.generate_name;
        facts.ports = pod.ports;
        facts.annotations = pod.annotations;
        Ok(facts)
    }

    /// Returns the facts for a pod that is not read from the Kubernetes API, with the network's name as the only
    /// profile.
    pub(crate) fn of_network(network: &str) -> Self {
        Self { profiles: vec![network.to_owned()], ..Self::default() }
    }

    /// Returns the configuration for the IPAM plugin, with the pools and address families that the pod's annotations
    /// choose. Returns `None` if the annotations choose neither pools nor address families.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if `ipam` is not an object.
    pub(crate) fn ipam_conf(&self, conf: &GoJson) -> Result<Option<Value>> {
        if self.pools_v4.is_none() && self.pools_v6.is_none() && self.families.is_none() {
            return Ok(None);
        }
        let mut conf = gojson::untyped(conf);
        let Some(Value::Object(ipam)) = conf.get_mut("ipam") else {
            return Err(
                CniError::internal("data on stdin was of unexpected type").with_details("ipam must be an object")
            );
        };
        self.set_pools(ipam);
        Ok(Some(conf))
    }

    fn set_pools(&self, ipam: &mut Map<String, Value>) {
        let mut set = |name: &str, value: Value| drop(ipam.insert(name.to_owned(), value));
        let families = self.families.map(|(v4, v6)| [("assign_ipv4", v4), ("assign_ipv6", v6)]);
        for (name, wanted) in families.into_iter().flatten() {
            set(name, if wanted { "true" } else { "false" }.into());
        }
        for (name, pools) in [("ipv4_pools", &self.pools_v4), ("ipv6_pools", &self.pools_v6)] {
            if let Some(pools) = pools {
                set(name, pools.clone().into());
            }
        }
    }

    /// Returns pairs of a pod's address and a floating address that leads to the pod's address. The floating address is
    /// written as in the pod's annotation. As in Calico, if the pod has several addresses of one family, a floating
    /// address leads to the last of them.
    ///
    /// # Errors
    /// CNI error code 999 if the pod has no address of the same family as a floating address. Calico itself panics if
    /// the pod has no address of a floating address's family.
    pub(crate) fn nats(&self, addresses: &[IpAddr]) -> Result<Vec<(IpAddr, String)>> {
        let pair = |floating: &String| {
            let (is_v6, family) = if floating.contains(':') { (true, "IPv6") } else { (false, "IPv4") };
            let internal = addresses.iter().rfind(|address| address.is_ipv6() == is_v6);
            let missing = || {
                CniError::internal(format!("the floating IP {floating} needs a pod with an {family} address"))
                    .with_details(format!("the addresses are those of the annotation {FLOATING_IPS}"))
            };
            internal.map(|internal| (*internal, floating.clone())).ok_or_else(missing)
        };
        self.floating_ips.iter().map(pair).collect()
    }

    /// Reads the annotations that choose the pod's pools. If the pod's annotation is absent or empty, the annotation of
    /// the pod's namespace chooses the pools.
    fn choose_pools(&mut self, namespace: &KubeNamespace, pod: &KubePod) -> Result<(), String> {
        let said = |name| annotation(&pod.annotations, name).or_else(|| annotation(&namespace.annotations, name));
        self.pools_v4 = said(POOLS_V4).map(gojson::strings).transpose()?;
        self.pools_v6 = said(POOLS_V6).map(gojson::strings).transpose()?;
        if let Some(text) = said(IP_FAMILIES) {
            let families = gojson::strings(text)?;
            if families.iter().any(|family| family != "IPv4" && family != "IPv6") {
                return Err(format!("error parsing ipFamilies: {text}"));
            }
            let has = |wanted: &str| families.iter().any(|family| family == wanted);
            self.families = Some((has("IPv4"), has("IPv6")));
        }
        Ok(())
    }

    fn want_addresses(
        &mut self,
        annotations: &BTreeMap<String, String>,
        allowed: &AllowedAnnotations<'_>,
    ) -> Result<(), String> {
        let incompatible = |name: &str| Err(format!("{name} is not compatible with configured IPAM: {}", allowed.ipam));
        match (annotation(annotations, IP_ADDRS), annotation(annotations, IP_ADDRS_NO_IPAM)) {
            (None, None) => {}
            (Some(_), Some(_)) => {
                return Err("can't have both annotations: 'ipAddrs' and 'ipAddrsNoIpam' in use at the same time".into());
            }
            (None, Some(_)) if !allowed.has_pools() => return incompatible("ipAddrsNoIpam"),
            (None, Some(_)) if !allowed.ip_addrs_no_ipam => {
                return Err("requested feature is not enabled: ip_addrs_no_ipam".into());
            }
            (None, Some(text)) => self.ip_addrs_no_ipam = Some(one_of_a_family(text, IP_ADDRS_NO_IPAM)?),
            (Some(_), None) if !allowed.has_pools() => return incompatible("ipAddrs"),
            (Some(text), None) => self.ip_addrs = Some(one_of_a_family(text, IP_ADDRS)?),
        }
        Ok(())
    }
}

impl HardwareAddress {
    /// Parses a hardware address.
    ///
    /// # Errors
    /// Go's error message for a malformed hardware address.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let bytes = gojson::parse_mac(text)?;
        let mut text = String::new();
        for (at, byte) in bytes.iter().enumerate() {
            let separator = if at == 0 { "" } else { ":" };
            // Writing to a `String` cannot fail.
            let _ = write!(text, "{separator}{byte:02x}");
        }
        Ok(Self { bytes, text })
    }
}

fn hardware_address(text: &str) -> Result<HardwareAddress> {
    HardwareAddress::read(text).map_err(|reason| {
        CniError::internal(format!("failed to parse MAC address {text} provided via {HW_ADDR}: {reason}"))
    })
}

/// Returns the value of an annotation, or `None` if the value is empty.
fn annotation<'a>(annotations: &'a BTreeMap<String, String>, name: &str) -> Option<&'a str> {
    annotations.get(name).map(String::as_str).filter(|text| !text.is_empty())
}

fn list(text: &str) -> Result<Vec<String>, String> {
    gojson::strings(text).map_err(|reason| format!("failed to parse '{text}' as JSON: {reason}"))
}

fn source_prefixes(annotations: &BTreeMap<String, String>) -> Result<Vec<String>, String> {
    let prefixes = annotation(annotations, SOURCE_PREFIXES).map(list).transpose()?.unwrap_or_default();
    let masked = |prefix: &String| {
        let net =
            gojson::parse_cidr(prefix).map_err(|reason| format!("failed to parse '{prefix}' as a CIDR: {reason}"))?;
        Ok(net.to_string())
    };
    prefixes.iter().map(masked).collect()
}

/// Parses the addresses in an annotation, which must contain one address, or one of each address family.
fn one_of_a_family(text: &str, name: &str) -> Result<Vec<IpAddr>, String> {
    let texts =
        list(text).map_err(|reason| format!("failed to parse IPs {text} for annotation \"{name}\": {reason}"))?;
    if texts.is_empty() {
        return Err(format!("annotation \"{name}\" specified but empty"));
    }
    let mut addresses: Vec<IpAddr> = Vec::new();
    for text in texts {
        let address = gojson::parse_ip(&text).ok_or_else(|| format!("invalid IP format: {text}"))?;
        if addresses.iter().any(|other| other.is_ipv4() == address.is_ipv4()) {
            let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
            return Err(format!("cannot have more than one {family} address for \"{name}\" annotation"));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn floating_ips(annotations: &BTreeMap<String, String>, allowed: &AllowedAnnotations<'_>) -> Result<Vec<String>> {
    let Some(text) = annotation(annotations, FLOATING_IPS) else { return Ok(Vec::new()) };
    if !allowed.floating_ips {
        return Err(CniError::internal("requested feature is not enabled: floating_ips")
            .with_details("feature_control.floating_ips permits floating addresses"));
    }
    let texts = list(text).map_err(CniError::internal)?;
    match texts.iter().find(|text| gojson::parse_ip(text).is_none()) {
        None => Ok(texts),
        Some(wrong) => Err(CniError::internal(format!("the floating IP {wrong} is no address"))
            .with_details(format!("the annotation {FLOATING_IPS} is a list of addresses in JSON"))),
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KubeNamespace {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KubePod {
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) generate_name: String,
    pub(crate) service_account: String,
    /// The node that the pod is scheduled to; empty if the pod is not scheduled yet.
    pub(crate) node: String,
    /// The container ports that the pod's endpoint can list; the ports of init containers come last.
    pub(crate) ports: Vec<KubePort>,
}

/// A container's port that has a name or a host port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KubePort {
    pub(crate) name: String,
    /// The protocol of the port, which is `TCP`, `UDP` or `SCTP`.
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    /// The port on the host, or 0 if the container's port has no host port.
    pub(crate) host_port: u16,
    pub(crate) host_ip: String,
}

impl KubeNamespace {
    /// Parses a namespace; returns `None` if the text is not a Kubernetes API object.
    pub(super) fn from_json(name: &str, text: &[u8]) -> Option<Self> {
        let KubeMetadata { labels, annotations, .. } = KubeObject::read(text)?.metadata;
        Some(Self { name: name.to_owned(), labels, annotations })
    }
}

impl KubePod {
    /// Parses a pod; returns `None` if the text is not a Kubernetes API object.
    pub(super) fn from_json(text: &[u8]) -> Option<Self> {
        let KubeObject { metadata, spec } = KubeObject::read(text)?;
        let PodSpec { node_name, service_account_name, containers, init_containers, .. } = spec;
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

/// Parses the pod ranges of a node; returns `None` if the text is not a Kubernetes API object.
pub(super) fn pod_cidrs(text: &[u8]) -> Option<Vec<String>> {
    Some(KubeObject::read(text)?.spec.pod_cidrs)
}

/// The fields of namespaces, pods and nodes that the plugin reads.
#[derive(Deserialize)]
struct KubeObject {
    metadata: KubeMetadata,
    #[serde(default, deserialize_with = "or_default")]
    spec: PodSpec,
}

impl KubeObject {
    /// Parses an object of the Kubernetes API. The JSON parser's error is not returned, because it quotes a part of the
    /// text, which may contain a pod's secrets.
    fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeMetadata {
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    generate_name: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    #[serde(deserialize_with = "or_default")]
    node_name: String,
    #[serde(deserialize_with = "or_default")]
    service_account_name: String,
    #[serde(deserialize_with = "or_default")]
    containers: Vec<PodContainer>,
    #[serde(deserialize_with = "or_default")]
    init_containers: Vec<PodContainer>,
    #[serde(rename = "podCIDRs", deserialize_with = "or_default")]
    pod_cidrs: Vec<String>,
}

#[derive(Deserialize)]
struct PodContainer {
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
    /// Converts a container's port; returns `None` if an endpoint cannot list the port. An endpoint lists a port only
    /// if the port has a name, for network policies, or a host port, for port maps.
    fn into_port(self) -> Option<KubePort> {
        let protocol = match self.protocol.as_str() {
            "" | "TCP" => "TCP",
            "UDP" => "UDP",
            "SCTP" => "SCTP",
            _ => return None,
        };
        let counts = self.container_port != 0 && (self.host_port != 0 || !self.name.is_empty());
        counts.then_some(KubePort {
            name: self.name,
            protocol,
            port: self.container_port,
            host_port: self.host_port,
            host_ip: self.host_ip,
        })
    }
}

/// Deserializes a value, and treats null like an absent field.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
#[path = "pod_tests.rs"]
mod tests;
