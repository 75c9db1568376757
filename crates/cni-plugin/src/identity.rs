//! The identity of a plugin call: its node, its container or pod, and the attributes that are recorded with each
//! assigned address.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use agent::{CniError, Result};
use ipam_core::attachment::{Attachment, NETNS};
use ipam_core::model::workload_endpoint_name;
use ipam_core::timestamps::{go_string, whole_milliseconds};
use time::OffsetDateTime;

use crate::env::{CniArgs, CniCall};
use crate::netconf::NetConf;

/// The machine that a plugin call runs on.
#[derive(Clone, Debug)]
pub struct Host {
    /// The host name that the kernel reports.
    pub hostname: String,
    /// The boot id of the running kernel; `None` if the kernel does not report a boot id.
    pub boot_id: Option<String>,
    /// The time at which the plugin call started.
    pub now: OffsetDateTime,
    /// The file that contains the node's name, unless the network configuration names another file.
    pub nodename_file: PathBuf,
    /// A path that refers to the plugin's own network namespace.
    pub own_netns: PathBuf,
}

impl Host {
    /// Reads the host name, boot id and time of the machine that this process runs on.
    pub fn of_this_process() -> Self {
        Self {
            hostname: host::hostname(),
            boot_id: host::boot_id(),
            now: OffsetDateTime::now_utc(),
            nodename_file: host::NODENAME_FILE.into(),
            own_netns: crate::env::OWN_NETNS.into(),
        }
    }

    /// Returns the first 8 characters of the boot id.
    pub(crate) fn boot(&self) -> Option<String> {
        host::short_boot(self.boot_id.as_deref()?)
    }

    /// Returns the node's name. The first source that has a name wins: the setting `nodename`, the node name file, the
    /// deprecated setting `hostname`, then the kernel's host name in lower case.
    pub(crate) fn node(&self, conf: &NetConf) -> String {
        let file = if conf.nodename_file.is_empty() { &self.nodename_file } else { Path::new(&conf.nodename_file) };
        let names = host::NodeNames { given: &conf.nodename, file, former: &conf.hostname, hostname: &self.hostname };
        names.choose()
    }
}

/// A container or a pod, as the store identifies it.
#[derive(Clone, Debug)]
pub(crate) struct ContainerIdentity {
    pub(crate) attachment: Attachment,
    /// The namespace and the name of the container's pod, if the container belongs to a pod.
    pub(crate) pod: Option<(String, String)>,
    /// The namespace of the pod, or `default` without a pod.
    pub(crate) namespace: String,
    /// The identifier of the container's network namespace.
    pub(crate) netns: Option<String>,
}

impl ContainerIdentity {
    pub(crate) fn new(conf: &NetConf, call: &CniCall, args: &CniArgs, host: &Host) -> Self {
        let is_pod = !args.pod.is_empty() && !args.pod_namespace.is_empty();
        let pod = is_pod.then(|| (args.pod_namespace.clone(), args.pod.clone()));
        let namespace = match &pod {
            Some((namespace, _)) => namespace.clone(),
            None if !args.test_namespace.is_empty() => args.test_namespace.clone(),
            None => "default".to_owned(),
        };
        let attachment = Attachment {
            network: conf.name.clone(),
            container: call.container.clone(),
            interface: call.interface.clone(),
            node: host.node(conf),
            boot: host.boot(),
        };
        Self { attachment, pod, namespace, netns: call.netns.as_deref().and_then(host::network_namespace) }
    }

    /// Refuses an identity from which Calico could not build the name of the WorkloadEndpoint.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message for the missing or invalid field.
    pub(crate) fn check_endpoint_name(&self) -> Result<()> {
        let Attachment { node, container, interface, .. } = &self.attachment;
        if node.is_empty() {
            // If the node's name is missing, Calico's message omits the invalid value, unlike its messages about other
            // fields.
            let reason = "error constructing WorkloadEndpoint name: error with field node (field should be assigned)";
            return Err(CniError::internal(reason));
        }
        let owner = match &self.pod {
            Some((_, pod)) => ("pod", pod.as_str()),
            None => ("containerID", container.as_str()),
        };
        let parts = [("node", node.as_str()), owner, ("endpoint", interface.as_str())];
        workload_endpoint_name(&parts).map(|_| ()).map_err(|error| CniError::internal(error.to_string()))
    }

    /// Refuses a plugin call if the node has no name.
    ///
    /// # Errors
    /// CNI error code 7 if the node has no name.
    pub(crate) fn check_node(&self) -> Result<()> {
        if self.attachment.node.is_empty() {
            return Err(no_node_error());
        }
        Ok(())
    }

    /// Returns the attributes that are recorded with an assigned address.
    pub(crate) fn attributes(&self, now: OffsetDateTime) -> BTreeMap<String, String> {
        let Attachment { network, interface, node, boot, .. } = &self.attachment;
        let mut attributes = BTreeMap::from([
            ("node".to_owned(), node.clone()),
            // Timestamps have only milliseconds to keep blocks small, because every change of a block rewrites the
            // timestamps of all its addresses.
            ("timestamp".to_owned(), go_string(whole_milliseconds(now))),
            ("margay.io/net".to_owned(), network.clone()),
            ("margay.io/ifname".to_owned(), interface.clone()),
        ]);
        if let Some(boot) = boot {
            attributes.insert("margay.io/boot".to_owned(), boot.clone());
        }
        if let Some(netns) = &self.netns {
            attributes.insert(NETNS.to_owned(), netns.clone());
        }
        if let Some((namespace, pod)) = &self.pod {
            attributes.insert("namespace".to_owned(), namespace.clone());
            attributes.insert("pod".to_owned(), pod.clone());
        }
        attributes
    }

    /// Returns the handle that old versions of Calico used for this container.
    pub(crate) fn old_handle(&self) -> String {
        match &self.pod {
            Some((namespace, pod)) => format!("{namespace}.{pod}"),
            None => self.attachment.container.clone(),
        }
    }
}

pub(crate) fn no_node_error() -> CniError {
    CniError::config("the name of this node is not known").with_details("set nodename")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ipam_core::attachment::BOOT;
    use ipam_core::model::{Attribute, Block, Document, Owner};
    use ipam_core::reservations::Reservations;

    use super::*;
    use crate::env::{AddressForm, Environment};
    use crate::gojson::GoJson;

    fn host() -> Host {
        Host {
            hostname: "Host-1".into(),
            boot_id: Some("191b29e2-6a5a-43ab-90d5-e4a2f05417e4\n".into()),
            now: time::macros::datetime!(2026-11-21 02:41:03.956790656 UTC),
            nodename_file: "/no/such/file".into(),
            own_netns: "/no/such/file".into(),
        }
    }

    fn conf(json: &str) -> NetConf {
        NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap()
    }

    fn identity(json: &str, args: &str, changes: &[(&str, &str)]) -> ContainerIdentity {
        let mut env = BTreeMap::from([
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/x"),
        ]);
        env.extend(changes.iter().copied());
        let call = CniCall::from_environment(&env.into_iter().collect::<Environment>()).unwrap();
        ContainerIdentity::new(&conf(json), &call, &CniArgs::parse(args, AddressForm::Bare).unwrap(), &host())
    }

    #[test]
    fn node_name_comes_from_sources_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let (full, blank) = (write("full", b" node7\n"), write("blank", b" \n"));
        let named =
            |path: &Path, more: &str| host().node(&conf(&format!(r#"{{"nodename_file":"{}"{more}}}"#, path.display())));
        assert_eq!(host().node(&conf("{}")), "host-1");
        assert_eq!(host().node(&conf(r#"{"hostname":"Old"}"#)), "Old");
        assert_eq!(named(&full, r#","hostname":"Old""#), "node7");
        assert_eq!(named(&full, r#","nodename":"n1""#), "n1");
        assert_eq!(named(&blank, ""), "host-1");
        assert_eq!(named(folder.path(), ""), "host-1");
        let endless = write("endless", &[b'a'; 1 << 20]);
        assert_eq!(named(&endless, ""), "host-1", "a file of 1 MiB was read as a name");
        let by_default = Host { nodename_file: full, ..host() };
        assert_eq!(by_default.node(&conf("{}")), "node7");
        assert_eq!(by_default.node(&conf(r#"{"nodename_file":"/no/such/file"}"#)), "host-1");
    }

    #[test]
    fn attributes_are_recorded() {
        let pod = identity(r#"{"name":"net.1","nodename":"n1"}"#, "K8S_POD_NAME=cart;K8S_POD_NAMESPACE=shop", &[]);
        let attributes: Vec<_> = pod.attributes(host().now).into_iter().collect();
        let expected = [
            ("margay.io/boot", "191b29e2"),
            ("margay.io/ifname", "eth0"),
            ("margay.io/net", "net.1"),
            ("namespace", "shop"),
            ("node", "n1"),
            ("pod", "cart"),
            ("timestamp", "2026-11-21 02:41:03.957 +0000 UTC"),
        ];
        assert_eq!(attributes, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
        assert_eq!((pod.attachment.handle().as_str(), pod.old_handle().as_str()), ("net.1.c1", "shop.cart"));
        assert_eq!(pod.namespace, "shop");

        let plain = identity(r#"{"name":"a","nodename":"n1"}"#, "K8S_POD_NAME=cart", &[]);
        assert_eq!((plain.namespace.as_str(), plain.old_handle().as_str()), ("default", "c1"));
        assert!(!plain.attributes(host().now).contains_key("pod"));
        // A `CNI_NETNS` path that does not refer to a network namespace is not recorded.
        let netns = |path: &str| {
            let identity = identity("{}", "", &[("CNI_NETNS", path)]);
            identity.attributes(host().now).get("margay.io/netns").cloned()
        };
        let own = netns("/proc/thread-self/ns/net").unwrap();
        assert_eq!(Some(&own), host::network_namespace(Path::new("/proc/self/ns/net")).as_ref());
        assert_eq!((netns("/no/such/file"), netns("/"), netns("/proc/self/stat")), (None, None, None));
        let test = identity("{}", "CNI_TEST_NAMESPACE=t;IgnoreUnknown=1", &[]);
        assert_eq!(test.namespace, "t");
        let unknown = Host { boot_id: Some("short".into()), ..host() };
        assert_eq!(unknown.boot(), None);
    }

    #[test]
    fn attributes_enlarge_a_full_block_of_calico_by_8_percent() {
        // Calico's plugin records node, pod, namespace and the time in nanoseconds (`fixtures/calico-plugin`).
        let block_bytes = |namespace: &str, of_calico: bool| {
            let cidr = "10.65.7.0/26".parse().unwrap();
            let mut block = Block::new(cidr, Some(&Owner::host("node1")), host().now, None).unwrap();
            for number in 0..64_u64 {
                let args = format!("K8S_POD_NAME=web-{number};K8S_POD_NAMESPACE={namespace}");
                let container = format!("{number:064x}");
                let env = [("CNI_CONTAINERID", container.as_str())];
                let mut pod = identity(r#"{"name":"net1","nodename":"node1"}"#, &args, &env);
                pod.netns = Some(format!("4:{}", 4_026_532_000_u64 + 7 * number));
                let mut attributes = pod.attributes(host().now);
                if of_calico {
                    attributes.retain(|name, _| !name.starts_with("margay.io/"));
                    attributes.insert("timestamp".to_owned(), go_string(host().now));
                } else {
                    assert!(attributes.contains_key(NETNS) && attributes.contains_key(BOOT), "{attributes:?}");
                }
                let holder = Attribute::new(Some(&pod.attachment.handle()), attributes);
                assert_eq!(block.assign_auto(1, &holder, &Reservations::default()).len(), 1);
            }
            block.encode().unwrap().as_bytes().len()
        };
        for namespace in ["default", "a-team-with-a-longer-name"] {
            let (margay, calico) = (block_bytes(namespace, false), block_bytes(namespace, true));
            assert!(margay * 100 <= calico * 108, "{namespace}: {margay} bytes, Calico's has {calico}");
        }
    }

    #[test]
    fn endpoint_names_match_calico() {
        let refused = |json: &str, args: &str, changes: &[(&str, &str)]| {
            let error = identity(json, args, changes).check_endpoint_name().unwrap_err();
            let start = "error constructing WorkloadEndpoint name: error with field ";
            error.message().strip_prefix(start).unwrap().to_owned()
        };
        identity(r#"{"nodename":"a-b"}"#, "", &[("CNI_CONTAINERID", "c-1")]).check_endpoint_name().unwrap();
        assert_eq!(refused(r#"{"nodename":"-a"}"#, "", &[]), "node = '-a' (field must not begin with a '-')");
        assert_eq!(
            refused("{}", "", &[("CNI_CONTAINERID", "c-")]),
            "containerID = 'c-' (field must not end with a '-')"
        );
        assert_eq!(refused("{}", "", &[("CNI_IFNAME", "-")]), "endpoint = '-' (field must not begin with a '-')");
        let pod = "K8S_POD_NAME=p-;K8S_POD_NAMESPACE=n";
        // The name of a pod's WorkloadEndpoint contains the pod's name, not the container id.
        assert_eq!(refused("{}", pod, &[("CNI_CONTAINERID", "c-")]), "pod = 'p-' (field must not end with a '-')");
        let mut nameless = identity("{}", "", &[]);
        nameless.attachment.node.clear();
        assert_eq!(
            nameless.check_endpoint_name().unwrap_err().message(),
            "error constructing WorkloadEndpoint name: error with field node (field should be assigned)"
        );
        assert_eq!(nameless.check_node().unwrap_err().code().number(), 7);
    }
}
