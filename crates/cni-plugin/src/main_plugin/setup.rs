//! Prepares a call of the main plugin: checks the configuration in Calico's order, before a verb opens the store. This
//! module also determines the names of WorkloadEndpoints and host interfaces, and converts Mesos labels to valid
//! labels.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use agent::{
    Allocator, CniError, Code, DaemonAllocator, DirectAllocator, NetworkRules, Result, Session, StoreAccess, explain,
};
use datastore::Location;
use ipam_core::endpoints::{EndpointContext, EndpointQuery, PendingEndpoint, PoolsToRead};
use ipam_core::model::{
    ClusterInformation, Labels, Orchestrator, WorkloadEndpoint, split_endpoint_name, workload_endpoint_name,
};
use ipnet::IpNet;
use wiring::{Forwarding, NextHop, OldInterface, Plan};

use super::conf::{Device, MainConf};
use crate::dataplane_grpc::Dataplane;
use crate::env::{self, AddressForm, CniArgs, CniCall, CniVerb, OwnNetns};
use crate::gojson::GoJson;
use crate::identity::ContainerIdentity;
use crate::invocation::{Invocation, LogDestination, PluginName};
use crate::kubernetes::{DefaultRoutes, HostLocal, Kubernetes, default_routes};
use crate::logging;
use crate::run::store_at;

/// A call of the main plugin, with its decoded network configuration.
pub(super) struct MainContext<'a> {
    pub(super) invocation: &'a Invocation,
    pub(super) call: CniCall,
    /// The network configuration, exactly as the runtime passed it.
    pub(super) stdin: Vec<u8>,
    pub(super) json: GoJson,
    pub(super) conf: MainConf,
    pub(super) workload: Workload,
    /// The labels in the network configuration, which only the WorkloadEndpoint of a plain container gets.
    pub(super) labels: Labels,
    /// The value of `CNI_ARGS` for the IPAM plugin, which starts with `IgnoreUnknown=1`.
    pub(super) args: String,
    pub(super) store: StoreAccess,
    pub(super) kubernetes: Kubernetes,
    /// The MTU of the container's interfaces; 0 means the kernel's default.
    pub(super) mtu: u32,
    pub(super) device: Device,
    /// The error for a missing node name file, which only DEL tolerates.
    pub(super) nodename: Result<()>,
    /// The data plane. An invalid setting is kept as an error and returned late, so that a DEL does the rest of its
    /// work first.
    dataplane: Result<Dataplane>,
}

impl<'a> MainContext<'a> {
    /// Decodes and checks the configuration of a call of the main plugin.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message for an invalid configuration.
    pub(super) fn new(invocation: &'a Invocation, call: CniCall, json: GoJson, stdin: Vec<u8>) -> Result<Self> {
        let mut conf = MainConf::decode(&json)?;
        conf.net.store.called_as_calico_ipam = invocation.name == PluginName::CalicoIpam;
        if invocation.logging == LogDestination::Process {
            logging::install(&conf.net);
        }
        let lookup = |name: &str| invocation.environment.lookup(name);
        let location = datastore::for_netconf(&invocation.drivers, &conf.net.store, &lookup);
        // Where Calico's agents do not run, for example with an embedded store, no program creates the node name file.
        let needs_nodename = location.as_ref().is_ok_and(Location::is_shared) || location.is_err();
        let nodename = if needs_nodename { conf.check_nodename_file(&invocation.host.nodename_file) } else { Ok(()) };
        if call.verb != CniVerb::Del {
            nodename.clone()?;
        }
        let is_add = call.verb == CniVerb::Add;
        if is_add {
            conf.check_credentials()?;
        }
        let mtu = if is_add || call.verb == CniVerb::Check { conf.mtu()? } else { 0 };
        let device = if is_add { conf.device()? } else { Device::Veth };
        let args = match call.args.as_str() {
            "" => "IgnoreUnknown=1".to_owned(),
            args => format!("IgnoreUnknown=1;{args}"),
        };
        let parsed = CniArgs::parse(&args, AddressForm::Bare)?;
        let identity = ContainerIdentity::new(&conf.net, &call, &parsed, &invocation.host);
        let location = location.map_err(|error| {
            let prefix = if is_add { "error creating calico client: " } else { "" };
            CniError::internal(format!("{prefix}{error}"))
        })?;
        let store = store_at(&conf.net, location)?;
        let (labels, namespace) = labels_from_mesos(&conf.mesos_labels);
        let workload = match &identity.pod {
            Some((namespace, pod)) => Workload {
                node: identity.attachment.node.clone(),
                orchestrator: Orchestrator::K8s,
                namespace: namespace.clone(),
                id: pod.clone(),
            },
            None => Workload {
                node: identity.attachment.node.clone(),
                orchestrator: Orchestrator::Cni,
                namespace: namespace.unwrap_or_else(|| identity.namespace.clone()),
                id: call.container.clone(),
            },
        };
        let dataplane = Dataplane::choose(json.member("dataplane_options"));
        let kubernetes = Kubernetes::from_conf(&conf.net, &invocation.environment);
        Ok(Self {
            invocation,
            call,
            stdin,
            json,
            conf,
            workload,
            labels,
            args,
            store,
            kubernetes,
            mtu,
            device,
            nodename,
            dataplane,
        })
    }

    /// Returns the path of the container's network namespace; empty if the plugin call names no network namespace.
    pub(super) fn netns(&self) -> PathBuf {
        self.call.netns.clone().unwrap_or_default()
    }

    /// True if the container is in the plugin's own network namespace although `CNI_NETNS_OVERRIDE` does not allow
    /// that.
    pub(super) fn is_own_netns(&self) -> bool {
        let netns = self.call.netns.as_deref().filter(|_| self.call.own_netns == OwnNetns::Refused);
        netns.is_some_and(|netns| env::is_own_netns(netns, &self.invocation.host.own_netns))
    }

    /// Returns the data plane of the network configuration.
    ///
    /// # Errors
    /// An error with Calico's message if the configuration names an unknown data plane.
    pub(super) fn dataplane(&self) -> Result<&Dataplane> {
        self.dataplane.as_ref().map_err(Clone::clone)
    }

    /// Returns the container's routes: for a pod with host-local, the routes in host-local's configuration; otherwise
    /// the default routes.
    ///
    /// # Errors
    /// An error with Calico's message if the configured routes are malformed.
    pub(super) fn routes(&self) -> Result<Vec<IpNet>> {
        if self.workload.orchestrator == Orchestrator::Cni || self.conf.ipam_type != "host-local" {
            return Ok(default_routes());
        }
        let default = if self.conf.include_default_routes { DefaultRoutes::Kept } else { DefaultRoutes::Replaced };
        HostLocal::new(&self.json)?.routes(default)
    }

    /// Returns the plan for the container's interface, with default routes.
    pub(super) fn plan(&self, host_interface: String, addresses: &[IpAddr]) -> Plan {
        let old_interface = match self.workload.orchestrator {
            Orchestrator::Cni => OldInterface::KeptIfInUse,
            Orchestrator::K8s => OldInterface::Removed,
        };
        Plan {
            host_interface,
            old_interface,
            interface: self.call.interface.clone(),
            mtu: self.mtu,
            queues: self.conf.queues(),
            device: self.device,
            mac: None,
            addresses: addresses.to_vec(),
            prefixes: Vec::new(),
            routes: default_routes(),
            forwarding: if self.conf.allow_ip_forwarding { Forwarding::On } else { Forwarding::Off },
            next_hop: if self.is_alone() { NextHop::Known } else { NextHop::Asked },
        }
    }

    /// Returns the allocator for the IPAM plugin that is part of this program. If this process has the store open
    /// exclusively, there is no daemon, and the allocator uses the open store directly.
    pub(super) fn allocator(session: &Arc<Session>) -> Box<dyn Allocator> {
        match session.is_exclusive() {
            true => Box::new(DirectAllocator::within(Arc::clone(session))),
            false => Box::new(DaemonAllocator::within(Arc::clone(session))),
        }
    }

    /// True if the store belongs to one machine, so that no agent of Calico can read it.
    pub(super) fn is_alone(&self) -> bool {
        !self.store.location.is_shared()
    }

    /// Checks that the datastore is marked as ready for plugins, without reading any WorkloadEndpoint.
    ///
    /// # Errors
    /// Any error of [`begin`](Self::begin).
    pub(super) fn check_ready(&self, session: &Session) -> Result<()> {
        self.begin(session, read_nothing()).map(drop)
    }

    /// Checks like [`check_ready`](Self::check_ready), but accepts a cluster that was never set up: its plugins have
    /// never assigned anything, so a DEL has nothing to wait for.
    ///
    /// # Errors
    /// An error with Calico's message if the store does not answer or is not ready.
    pub(super) fn check_not_locked(&self, session: &Session) -> Result<()> {
        let (_, before) = self.read(session, read_nothing())?;
        match before.cluster {
            Some(cluster) => require_ready(&cluster),
            None => Ok(()),
        }
    }

    /// Reads WorkloadEndpoints and pools from the store, and checks that the datastore is marked as ready for plugins.
    ///
    /// # Errors
    /// An error with Calico's message if the store does not answer or is not ready.
    pub(super) fn begin(&self, session: &Session, query: EndpointQuery) -> Result<(PendingEndpoint, EndpointContext)> {
        let (pending, before) = self.read(session, query)?;
        match &before.cluster {
            Some(cluster) => require_ready(cluster)?,
            None if self.store.location.is_shared() => return Err(no_cluster_information()),
            None => {}
        }
        Ok((pending, before))
    }

    fn read(&self, session: &Session, query: EndpointQuery) -> Result<(PendingEndpoint, EndpointContext)> {
        let read = session.run(session.ipam().begin_endpoint(query, session.deadline()));
        read.map_err(|error| {
            let error = CniError::from(explain(error, NetworkRules::Calico));
            let message = format!("error getting ClusterInformation: {}", error.message());
            CniError::new(error.code(), message).with_details(error.details())
        })
    }
}

fn read_nothing() -> EndpointQuery {
    EndpointQuery { namespace: String::new(), prefix: None, profile: None, pools: PoolsToRead::Skipped }
}

fn require_ready(cluster: &ClusterInformation) -> Result<()> {
    if cluster.is_ready() {
        return Ok(());
    }
    Err(CniError::internal("Calico is currently not ready to process requests").with_details(
        "an upgrade or a migration locks the datastore; if none is running, end it with: calicoctl datastore migrate \
         unlock",
    ))
}

/// Returns the error for an etcd cluster that neither Calico nor `margay cluster init` has set up.
fn no_cluster_information() -> CniError {
    let text =
        "error getting ClusterInformation: resource does not exist: ClusterInformation(default) with error: <nil>";
    CniError::new(Code::Internal, text).with_details(
        "nothing has set up this etcd: compare etcd_endpoints, or set it up with: margay cluster init --pool CIDR",
    )
}

/// Number of characters that follow the prefix in the name of a host interface. Linux allows 15 characters in the whole
/// name of an interface.
const INTERFACE_ID_CHARS: usize = 11;
/// The prefix of the name of a host interface, unless Felix is configured with another prefix.
const INTERFACE_PREFIX: &str = "cali";

/// The container or pod that a WorkloadEndpoint describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) node: String,
    pub(super) orchestrator: Orchestrator,
    pub(super) namespace: String,
    /// The pod's name for a pod, otherwise the container's id.
    pub(super) id: String,
}

impl Workload {
    /// Returns the name of the workload's WorkloadEndpoint for a container interface.
    ///
    /// # Errors
    /// An error with Calico's message if a part of the name is not allowed in a WorkloadEndpoint's name.
    pub(super) fn endpoint(&self, interface: &str) -> Result<String> {
        let parts = [&self.parts()[..], &[("endpoint", interface)]].concat();
        workload_endpoint_name(&parts).map_err(|error| CniError::internal(error.to_string()))
    }

    /// Returns the common prefix of the names of the workload's WorkloadEndpoints.
    ///
    /// # Errors
    /// An error with Calico's message if a part of the prefix is not allowed in a WorkloadEndpoint's name.
    pub(super) fn prefix(&self) -> Result<String> {
        let name = workload_endpoint_name(&self.parts()).map_err(|error| {
            let text = error.to_string().replacen("WorkloadEndpoint name", "WorkloadEndpoint prefix", 1);
            CniError::internal(text)
        })?;
        Ok(name + "-")
    }

    /// True if the WorkloadEndpoint belongs to this workload.
    pub(super) fn has(&self, endpoint: &WorkloadEndpoint) -> bool {
        split_endpoint_name(endpoint.name()).is_some_and(|[node, orchestrator, id, _]| {
            node == self.node && orchestrator == self.orchestrator.as_str() && id == self.id
        })
    }

    /// Returns the name of the workload's interface on the host. The argument `felix` is the value of the environment
    /// variable `FELIX_INTERFACEPREFIX`. The name of a pod's host interface contains a digest, and that of a plain
    /// container's host interface contains the first characters of the container's id.
    pub(super) fn host_interface(&self, felix: &str) -> String {
        match self.orchestrator {
            Orchestrator::Cni => {
                INTERFACE_PREFIX.to_owned() + &self.id.chars().take(INTERFACE_ID_CHARS).collect::<String>()
            }
            Orchestrator::K8s => {
                let prefix = felix.split(',').next().filter(|prefix| !prefix.is_empty()).unwrap_or(INTERFACE_PREFIX);
                prefix.to_owned() + &self.digest()
            }
        }
    }

    /// Returns the alternative name of a plain container's host interface, for the case that another container already
    /// has the usual name.
    pub(super) fn other_host_interface(&self) -> String {
        INTERFACE_PREFIX.to_owned() + &self.digest()
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

/// Returns the first 11 hexadecimal digits of a text's SHA-1 digest, which Calico uses in the names of pods'
/// interfaces.
fn hex_digest(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    let mut hex = String::new();
    for byte in digest.as_ref().iter().take(INTERFACE_ID_CHARS.div_ceil(2)) {
        // Writing to a `String` cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex.truncate(INTERFACE_ID_CHARS);
    hex
}

/// The label in which Mesos passes the namespace of the endpoint.
const NAMESPACE_LABEL: &str = "projectcalico.org/namespace";

/// Converts Mesos labels to valid labels, and returns the labels and the namespace that one of the Mesos labels names.
fn labels_from_mesos(stated: &[(String, String)]) -> (Labels, Option<String>) {
    let mut namespace = None;
    let mut labels = Labels::new();
    for (key, value) in stated {
        let value = clean_label(value);
        if key == NAMESPACE_LABEL {
            namespace = Some(value.clone());
        }
        labels.insert(clean_label(key), value);
    }
    (labels, namespace)
}

/// Replaces the invalid characters in a label's key or value, by Calico's rules. A slash in the key or value becomes a
/// dot, and a sequence of other invalid characters becomes one dash. In a label, a run of dots and dashes that contains
/// a dot becomes one dot. Dots and dashes at both ends of a label's key or value are removed.
fn clean_label(text: &str) -> String {
    let mut dashed = String::new();
    for c in text.chars() {
        let c = if c == '/' { '.' } else { c };
        let is_allowed = c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match (is_allowed, dashed.ends_with('\0')) {
            (true, _) => dashed.push(c),
            (false, false) => dashed.push('\0'),
            (false, true) => {}
        }
    }
    let dashed = dashed.replace('\0', "-");
    let mut clean = String::new();
    let mut rest = dashed.as_str();
    while let Some(first) = rest.chars().next() {
        let run: usize = rest.chars().take_while(|c| matches!(c, '.' | '-')).count();
        let (part, after) = rest.split_at(run.max(first.len_utf8()));
        clean.push_str(if run > 0 && part.contains('.') { "." } else { part });
        rest = after;
    }
    clean.trim_matches(['.', '-']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(orchestrator: Orchestrator, namespace: &str, id: &str) -> Workload {
        Workload { node: "node-1".into(), orchestrator, namespace: namespace.into(), id: id.into() }
    }

    #[test]
    fn workload_host_interface_is_named() {
        let pod = workload(Orchestrator::K8s, "shop", "pod1");
        assert_eq!(pod.host_interface(""), "cali8085686fbb3");
        assert_eq!(pod.host_interface("tap,cali"), "tap8085686fbb3");
        let container = workload(Orchestrator::Cni, "default", "abcdefghijklmno");
        assert_eq!(container.host_interface("tap"), "caliabcdefghijk");
        let other = container.other_host_interface();
        assert!(other.starts_with("cali") && other.len() == 15 && other != "caliabcdefghijk", "{other}");
    }

    #[test]
    fn workload_endpoint_is_named() {
        let container = workload(Orchestrator::Cni, "default", "ab-cdefghijklm");
        assert_eq!(container.endpoint("eth0").unwrap(), "node--1-cni-ab--cdefghijklm-eth0");
        assert_eq!(container.prefix().unwrap(), "node--1-cni-ab--cdefghijklm-");
        let bad = workload(Orchestrator::Cni, "default", "ends-").prefix().unwrap_err();
        assert_eq!(
            bad.message(),
            "error constructing WorkloadEndpoint prefix: error with field containerID = 'ends-' (field must not end with a '-')"
        );
    }

    #[test]
    fn workload_labels_are_cleaned() {
        let cases =
            [("/a/b/c", "a.b.c"), ("we!rd kéy", "we-rd-k-y"), ("--x..y//z--", "x.y.z"), ("c d", "c-d"), ("v", "v")];
        for (text, expected) in cases {
            assert_eq!(clean_label(text), expected, "{text}");
        }
        assert_eq!(clean_label("a-.-b"), "a.b");
        assert_eq!(clean_label("a--b"), "a--b");
        assert_eq!(clean_label("!!"), "");
    }

    #[test]
    fn workload_namespace_comes_from_one_mesos_label() {
        let stated = [(NAMESPACE_LABEL.to_owned(), "team/blue".to_owned()), ("k".to_owned(), "v".to_owned())];
        let (labels, namespace) = labels_from_mesos(&stated);
        assert_eq!(namespace.as_deref(), Some("team.blue"));
        assert_eq!(labels.get("k").map(String::as_str), Some("v"));
    }
}
