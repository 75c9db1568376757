//! The identity of a caller: the node, the container, the pod, and the attributes recorded with each address.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use agent::{CniError, Result};
use ipam_core::attachment::Attachment;
use ipam_core::attachment::NETNS;
use ipam_core::model::workload_endpoint_name;
use ipam_core::timestamps::go_string;
use time::OffsetDateTime;

use crate::args::Args;
use crate::env::Call;
use crate::netconf::NetConf;

/// The facts of the machine.
#[derive(Clone, Debug)]
pub struct Host {
    /// The host name as the kernel has it.
    pub hostname: String,
    /// The kernel's boot id, if it reports one.
    pub boot_id: Option<String>,
    /// The time.
    pub now: OffsetDateTime,
    /// The file with the node's name if the configuration names no other.
    pub nodename_file: PathBuf,
    /// A path that leads to the plugin's own network namespace.
    pub own_netns: PathBuf,
}

impl Host {
    /// The machine that this process runs on.
    pub fn of_this_process() -> Self {
        Self {
            hostname: host::hostname(),
            boot_id: host::boot_id(),
            now: OffsetDateTime::now_utc(),
            nodename_file: host::NODENAME_FILE.into(),
            own_netns: crate::netns::OWN.into(),
        }
    }

    /// The first 8 characters of the boot id.
    pub(crate) fn boot(&self) -> Option<String> {
        host::short_boot(self.boot_id.as_deref()?)
    }

    /// The node's name: the configuration's, else the text of the node name file, else the configuration's old
    /// `hostname`, else the host name in lower case.
    pub(crate) fn node(&self, conf: &NetConf) -> String {
        let file = if conf.nodename_file.is_empty() { &self.nodename_file } else { Path::new(&conf.nodename_file) };
        let names = host::NodeNames { given: &conf.nodename, file, former: &conf.hostname, hostname: &self.hostname };
        names.choose()
    }
}

/// A container or a pod, as the books know it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) attachment: Attachment,
    /// The pod's namespace and name, if it is one.
    pub(crate) pod: Option<(String, String)>,
    /// The pod's namespace, else `default`.
    pub(crate) namespace: String,
    /// The name of the container's network namespace, if there is one.
    pub(crate) netns: Option<String>,
}

impl Identity {
    pub(crate) fn new(conf: &NetConf, call: &Call, args: &Args, host: &Host) -> Self {
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

    /// Refuses an identity from which Calico cannot make the name of a WorkloadEndpoint.
    ///
    /// # Errors
    /// Code 999 with Calico's text.
    pub(crate) fn check_endpoint_name(&self) -> Result<()> {
        let Attachment { node, container, interface, .. } = &self.attachment;
        if node.is_empty() {
            // Only here does Calico leave out the value.
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

    /// Refuses a node without a name.
    ///
    /// # Errors
    /// Code 7.
    pub(crate) fn check_node(&self) -> Result<()> {
        if self.attachment.node.is_empty() {
            return Err(no_node_error());
        }
        Ok(())
    }

    /// The attributes to record with an address.
    pub(crate) fn attributes(&self, now: OffsetDateTime) -> BTreeMap<String, String> {
        let Attachment { network, interface, node, boot, .. } = &self.attachment;
        let mut attributes = BTreeMap::from([
            ("node".to_owned(), node.clone()),
            ("timestamp".to_owned(), go_string(now)),
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

    /// The handle that old versions of Calico used.
    pub(crate) fn old_handle(&self) -> String {
        match &self.pod {
            Some((namespace, pod)) => format!("{namespace}.{pod}"),
            None => self.attachment.container.clone(),
        }
    }
}

/// The error for a node without a name.
pub(crate) fn no_node_error() -> CniError {
    CniError::config("the name of this node is not known").with_details("set nodename")
}

#[cfg(test)]
#[path = "identity_tests.rs"]
mod tests;
