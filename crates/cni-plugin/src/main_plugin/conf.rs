//! Decodes the fields of a network configuration that only the main plugin reads.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use agent::{CniError, Result};

use crate::gojson::{GoJson, quoted};
use crate::kubernetes;
use crate::netconf::{Decoder, NetConf};

/// The file to which Calico's node agent writes the MTU of the network.
const MTU_FILE: &str = "/var/lib/calico/mtu";

/// A network configuration as the main plugin reads it, decoded by the rules of [`NetConf`]. If the configuration lacks
/// a field, the struct's field is empty.
#[derive(Debug, Default)]
pub(crate) struct MainConf {
    /// The fields of the configuration that the main plugin and the IPAM plugin read.
    pub(crate) net: NetConf,
    /// The value of `ipam.type`.
    pub(crate) ipam_type: String,
    mtu: i64,
    require_mtu_file: bool,
    num_queues: i64,
    device_type: String,
    pub(crate) nodename_file_optional: bool,
    pub(crate) readiness_gates: Vec<String>,
    /// The value of `policy_setup_timeout_seconds`.
    pub(crate) policy_timeout: i64,
    /// The value of `endpoint_status_dir`.
    pub(crate) status_folder: String,
    pub(crate) include_default_routes: bool,
    pub(crate) feature_ip_addrs_no_ipam: bool,
    pub(crate) feature_floating_ips: bool,
    pub(crate) allow_ip_forwarding: bool,
    /// The value of `kubernetes.node_name`.
    pub(crate) kubernetes_node: String,
    /// The keys and values of the Mesos labels in `args.org.apache.mesos.network_info.labels.labels`.
    pub(crate) mesos_labels: Vec<(String, String)>,
    /// The datastore settings that the main plugin passes to the IPAM plugin in environment variables, as pairs of name
    /// and value.
    pub(crate) variables: Vec<(&'static str, String)>,
}

impl MainConf {
    /// Decodes the fields of the network configuration that the main plugin uses.
    ///
    /// # Errors
    /// CNI error code 999 with Go's message for the first configuration value of a wrong type.
    pub(crate) fn decode(json: &GoJson) -> Result<Self> {
        let mut conf = Self::default();
        let mut decoder = Decoder::default();
        decoder.members(json, "", "types.NetConf", |d, name, value| {
            conf.net.member(d, name, value);
            conf.member(d, name, value);
        });
        decoder.finish()?;
        Ok(conf)
    }

    fn member(&mut self, d: &mut Decoder, name: &str, value: &GoJson) {
        match name {
            "mtu" => d.keep_int(&mut self.mtu, value, "mtu"),
            "require_mtu_file" => d.bool(&mut self.require_mtu_file, value, name),
            "num_queues" => d.keep_int(&mut self.num_queues, value, name),
            "device_type" => d.string(&mut self.device_type, value, name),
            "nodename_file_optional" => d.bool(&mut self.nodename_file_optional, value, name),
            "readiness_gates" => d.strings(&mut self.readiness_gates, value, name),
            "policy_setup_timeout_seconds" => d.keep_int(&mut self.policy_timeout, value, name),
            "endpoint_status_dir" => d.string(&mut self.status_folder, value, name),
            "include_default_routes" => d.bool(&mut self.include_default_routes, value, name),
            "feature_control" => d.members(value, name, "types.FeatureControl", |d, name, value| match name {
                "ip_addrs_no_ipam" => {
                    d.bool(&mut self.feature_ip_addrs_no_ipam, value, "feature_control.ip_addrs_no_ipam");
                }
                "floating_ips" => d.bool(&mut self.feature_floating_ips, value, "feature_control.floating_ips"),
                _ => {}
            }),
            "container_settings" => d.members(value, name, "types.ContainerSettings", |d, name, value| {
                if name == "allow_ip_forwarding" {
                    d.bool(&mut self.allow_ip_forwarding, value, "container_settings.allow_ip_forwarding");
                }
            }),
            "dataplane_options" if !matches!(value, GoJson::Object(_) | GoJson::Null) => {
                d.wrong(value, name, "map[string]interface {}");
            }
            "ipam" => d.members(value, "ipam", "struct", |d, name, value| {
                if name == "type" {
                    d.string(&mut self.ipam_type, value, "ipam.type");
                }
            }),
            "kubernetes" => d.members(value, "kubernetes", "types.Kubernetes", |d, name, value| {
                if name == "node_name" {
                    d.string(&mut self.kubernetes_node, value, "kubernetes.node_name");
                }
            }),
            "args" => d.members(value, "args", "types.Args", |d, name, value| {
                if name == "org.apache.mesos" {
                    self.mesos(d, value);
                }
            }),
            _ => self.variable(name, value),
        }
    }

    fn mesos(&mut self, d: &mut Decoder, value: &GoJson) {
        let path = "args.org.apache.mesos";
        d.members(value, path, "types.Mesos", |d, name, value| {
            if name == "network_info" {
                d.members(value, path, "types.NetworkInfo", |d, name, value| {
                    if name == "labels" {
                        d.members(value, path, "struct", |d, name, value| {
                            if let ("labels", GoJson::Array(labels)) = (name, value) {
                                self.mesos_labels = labels.iter().map(|label| mesos_label(d, label)).collect();
                            }
                        });
                    }
                });
            }
        });
    }

    /// Records a datastore setting that the IPAM plugin gets in an environment variable.
    fn variable(&mut self, name: &str, value: &GoJson) {
        let variable = match name {
            "datastore_type" => "DATASTORE_TYPE",
            "etcd_endpoints" => "ETCD_ENDPOINTS",
            "etcd_discovery_srv" => "ETCD_DISCOVERY_SRV",
            "etcd_key_file" => "ETCD_KEY_FILE",
            "etcd_cert_file" => "ETCD_CERT_FILE",
            "etcd_ca_cert_file" => "ETCD_CA_CERT_FILE",
            "etcd_authority" => "ETCD_AUTHORITY",
            "etcd_scheme" => "ETCD_SCHEME",
            "calico_api_group" => "CALICO_API_GROUP",
            _ => return,
        };
        if let GoJson::String(text) = value
            && !text.is_empty()
        {
            self.variables.retain(|(known, _)| *known != variable);
            self.variables.push((variable, text.clone()));
        }
    }

    /// Refuses etcd's key and certificate files if users other than their owner may write to them: these users could
    /// make the plugin trust another etcd. A missing key or certificate file is reported only when the store is opened.
    ///
    /// # Errors
    /// An error that names the refused file and the command that corrects its mode.
    pub(crate) fn check_credentials(&self) -> Result<()> {
        let is_file = |name: &str| ["ETCD_KEY_FILE", "ETCD_CERT_FILE", "ETCD_CA_CERT_FILE"].contains(&name);
        let mut files = self.variables.iter().filter(|(name, _)| is_file(name));
        files.try_for_each(|(_, path)| kubernetes::check_owner(Path::new(path)))
    }

    /// Returns the configured MTU or, if none is configured, the MTU in Calico's file; 0 means the kernel's default.
    ///
    /// # Errors
    /// An error if the required MTU file is missing, unreadable or not a number, or if the MTU is out of range.
    pub(crate) fn mtu(&self) -> Result<u32> {
        let failed = |reason: String| CniError::internal(format!("failed to read MTU file: {reason}"));
        let from_file = match fs::read_to_string(MTU_FILE) {
            Ok(text) => {
                let text = text.trim();
                let wrong = |_| failed(format!("strconv.Atoi: parsing {}: invalid syntax", quoted(text)));
                text.parse::<i64>().map_err(wrong)?
            }
            Err(error) if error.kind() == ErrorKind::NotFound && !self.require_mtu_file => 0,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(failed(format!("open {MTU_FILE}: no such file or directory")));
            }
            Err(error) => return Err(failed(format!("open {MTU_FILE}: {error}"))),
        };
        let mtu = if self.mtu == 0 { from_file } else { self.mtu };
        u32::try_from(mtu).map_err(|_| CniError::config(format!("mtu {mtu} is out of range")))
    }

    /// Returns the number of queues of each interface in the veth or netkit pair.
    pub(crate) fn queues(&self) -> u32 {
        u32::try_from(self.num_queues).unwrap_or(1).max(1)
    }

    /// Returns the device type of the pair of interfaces: veth or netkit.
    ///
    /// # Errors
    /// An error if the value of `device_type` is unknown.
    pub(crate) fn device(&self) -> Result<Device> {
        match self.device_type.as_str() {
            "" | "veth" => Ok(Device::Veth),
            "netkit" => Ok(Device::Netkit),
            other => Err(CniError::internal(format!(
                "unknown device_type {} in CNI config (supported: \"veth\", \"netkit\")",
                quoted(other)
            ))),
        }
    }

    /// Refuses a configuration that requires the node name file if this file does not exist.
    ///
    /// # Errors
    /// An error if the required node name file is missing.
    pub(crate) fn check_nodename_file(&self, default: &Path) -> Result<()> {
        if self.nodename_file_optional {
            return Ok(());
        }
        let file = if self.net.nodename_file.is_empty() { default } else { Path::new(&self.net.nodename_file) };
        let Err(error) = fs::metadata(file) else { return Ok(()) };
        let reason = if error.kind() == ErrorKind::NotFound {
            "no such file or directory".to_owned()
        } else {
            error.to_string()
        };
        Err(CniError::internal(format!(
            "stat {}: {reason}: check that the calico/node container is running and has mounted /var/lib/calico/",
            file.display()
        ))
        .with_details("without Calico's node agent, register this node with: margay node register"))
    }
}

pub(crate) use wiring::Device;

fn mesos_label(d: &mut Decoder, label: &GoJson) -> (String, String) {
    let (mut key, mut text) = (String::new(), String::new());
    let path = "args.org.apache.mesos.network_info.labels";
    d.members(label, path, "struct", |d, name, value| match name {
        "key" => d.string(&mut key, value, path),
        "value" => d.string(&mut text, value, path),
        _ => {}
    });
    (key, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<MainConf> {
        MainConf::decode(&GoJson::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn conf_is_read_as_go_does() {
        let conf = decode(
            r#"{"MTU":1410,"num_queues":0,"device_type":"netkit","readiness_gates":["http://a"],"policy_setup_timeout_seconds":2,
            "feature_control":{"floating_ips":true},"container_settings":{"allow_ip_forwarding":true},"ipam":{"TYPE":"host-local"},
            "dataplane_options":{"type":"grpc","n":1},"kubernetes":{"node_name":"n","kubeconfig":"/k"},"etcd_endpoints":"http://e:1",
            "args":{"org.apache.mesos":{"network_info":{"labels":{"labels":[{"key":"k","value":"v"}]}}}},"include_default_routes":null}"#,
        )
        .unwrap();
        assert_eq!((conf.queues(), conf.device().unwrap()), (1, Device::Netkit));
        assert_eq!((conf.readiness_gates.as_slice(), conf.policy_timeout), (&["http://a".to_owned()][..], 2));
        assert!(conf.feature_floating_ips && conf.allow_ip_forwarding && !conf.feature_ip_addrs_no_ipam);
        assert_eq!((conf.ipam_type.as_str(), conf.kubernetes_node.as_str()), ("host-local", "n"));
        assert_eq!(conf.mesos_labels, [("k".to_owned(), "v".to_owned())]);
        assert_eq!(conf.variables, [("ETCD_ENDPOINTS", "http://e:1".to_owned())]);
        assert_eq!(conf.net.store.kubeconfig, "/k");
    }

    #[test]
    fn conf_wrong_types_are_refused_in_go_words() {
        let cases = [
            (r#"{"mtu":"x"}"#, "string into Go struct field NetConf.mtu of type int"),
            (r#"{"readiness_gates":"x"}"#, "string into Go struct field NetConf.readiness_gates of type []string"),
            (
                r#"{"dataplane_options":[]}"#,
                "array into Go struct field NetConf.dataplane_options of type map[string]interface {}",
            ),
            (r#"{"require_mtu_file":1}"#, "number into Go struct field NetConf.require_mtu_file of type bool"),
        ];
        for (text, expected) in cases {
            let error = decode(text).unwrap_err();
            assert_eq!(error.message(), format!("failed to load netconf: json: cannot unmarshal {expected}"), "{text}");
        }
        let unknown = decode(r#"{"device_type":"macvlan"}"#).unwrap().device().unwrap_err();
        assert_eq!(
            unknown.message(),
            "unknown device_type \"macvlan\" in CNI config (supported: \"veth\", \"netkit\")"
        );
    }
}
