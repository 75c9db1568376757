//! The messages of the service `cni.CniDataplane`, version 3 of protocol buffers. The numbers are Calico's.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

/// The request to make the interface of a container.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AddRequest {
    #[prost(string, tag = "1")]
    pub(crate) interface_name: String,
    #[prost(string, tag = "2")]
    pub(crate) netns: String,
    #[prost(string, tag = "3")]
    pub(crate) desired_host_interface_name: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) settings: Option<ContainerSettings>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) container_ips: Vec<IpConfig>,
    /// Networks.
    #[prost(string, repeated, tag = "6")]
    pub(crate) container_routes: Vec<String>,
    #[prost(message, optional, tag = "7")]
    pub(crate) workload: Option<WorkloadIds>,
    /// The texts of `dataplane_options`.
    #[prost(btree_map = "string, string", tag = "8")]
    pub(crate) dataplane_options: BTreeMap<String, String>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct ContainerSettings {
    #[prost(bool, tag = "1")]
    pub(crate) allow_ip_forwarding: bool,
    #[prost(int32, tag = "2")]
    pub(crate) mtu: i32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct IpConfig {
    #[prost(string, tag = "1")]
    pub(crate) address: String,
    #[prost(string, tag = "2")]
    pub(crate) gateway: String,
}

impl IpConfig {
    /// The address as the IPAM plugin has it: with its prefix length.
    pub(crate) fn new(address: IpNet, gateway: Option<IpAddr>) -> Self {
        // Go's text for no address.
        let gateway = gateway.map_or_else(|| "<nil>".to_owned(), |gateway| gateway.to_string());
        Self { address: address.to_string(), gateway }
    }
}

/// The owner of the interface: the endpoint, and a pod's annotations.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WorkloadIds {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) namespace: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[prost(string, tag = "5")]
    pub(crate) endpoint: String,
    #[prost(string, tag = "6")]
    pub(crate) node: String,
    #[prost(string, tag = "7")]
    pub(crate) orchestrator: String,
    #[prost(string, tag = "8")]
    pub(crate) pod: String,
    #[prost(message, repeated, tag = "9")]
    pub(crate) ports: Vec<Port>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Port {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) protocol: String,
    #[prost(uint32, tag = "3")]
    pub(crate) port: u32,
    #[prost(uint32, tag = "4")]
    pub(crate) host_port: u32,
    #[prost(string, tag = "5")]
    pub(crate) host_ip: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct AddReply {
    #[prost(bool, tag = "1")]
    pub(crate) successful: bool,
    #[prost(string, tag = "2")]
    pub(crate) error_message: String,
    #[prost(string, tag = "3")]
    pub(crate) host_interface_name: String,
    #[prost(string, tag = "4")]
    pub(crate) container_mac: String,
}

/// The request to remove the interface of a container.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DelRequest {
    #[prost(string, tag = "1")]
    pub(crate) interface_name: String,
    #[prost(string, tag = "2")]
    pub(crate) netns: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) dataplane_options: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct DelReply {
    #[prost(bool, tag = "1")]
    pub(crate) successful: bool,
    #[prost(string, tag = "2")]
    pub(crate) error_message: String,
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// A field of bytes: its number and how it is written, its length, and its content.
    fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
    }

    fn text(number: u8, text: &str) -> Vec<u8> {
        bytes(number, text.as_bytes())
    }

    /// A field with a number below 128.
    fn number(number: u8, value: u8) -> Vec<u8> {
        vec![number << 3, value]
    }

    fn pair(name: &str, value: &str) -> Vec<u8> {
        [text(1, name), text(2, value)].concat()
    }

    fn map(name: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn every_field_has_its_number() {
        let port =
            Port { name: "dns".into(), protocol: "UDP".into(), port: 53, host_port: 54, host_ip: "10.1.2.3".into() };
        let workload = WorkloadIds {
            name: "n".into(),
            namespace: "ns".into(),
            labels: map("l", "1"),
            annotations: map("a", "2"),
            endpoint: "eth0".into(),
            node: "node1".into(),
            orchestrator: "k8s".into(),
            pod: "pod1".into(),
            ports: vec![port],
        };
        let request = AddRequest {
            interface_name: "eth0".into(),
            netns: "/run/netns/a".into(),
            desired_host_interface_name: "cali1".into(),
            settings: Some(ContainerSettings { allow_ip_forwarding: true, mtu: 68 }),
            container_ips: vec![
                IpConfig::new("10.65.0.1/26".parse().unwrap(), None),
                IpConfig::new("fd00::1/122".parse().unwrap(), Some("fd00::2".parse().unwrap())),
            ],
            container_routes: vec!["0.0.0.0/0".into(), "::/0".into()],
            workload: Some(workload),
            dataplane_options: map("type", "grpc"),
        };
        let port = [text(1, "dns"), text(2, "UDP"), number(3, 53), number(4, 54), text(5, "10.1.2.3")].concat();
        let workload = [
            text(1, "n"),
            text(2, "ns"),
            bytes(3, &pair("l", "1")),
            bytes(4, &pair("a", "2")),
            text(5, "eth0"),
            text(6, "node1"),
            text(7, "k8s"),
            text(8, "pod1"),
            bytes(9, &port),
        ]
        .concat();
        let expected = [
            text(1, "eth0"),
            text(2, "/run/netns/a"),
            text(3, "cali1"),
            bytes(4, &[number(1, 1), number(2, 68)].concat()),
            bytes(5, &[text(1, "10.65.0.1/26"), text(2, "<nil>")].concat()),
            bytes(5, &[text(1, "fd00::1/122"), text(2, "fd00::2")].concat()),
            text(6, "0.0.0.0/0"),
            text(6, "::/0"),
            bytes(7, &workload),
            bytes(8, &pair("type", "grpc")),
        ]
        .concat();
        assert_eq!(request.encode_to_vec(), expected);
        let request =
            DelRequest { interface_name: "eth0".into(), netns: "/a".into(), dataplane_options: map("x", "y") };
        let expected = [text(1, "eth0"), text(2, "/a"), bytes(3, &pair("x", "y"))].concat();
        assert_eq!(request.encode_to_vec(), expected);
        let reply = [number(1, 1), text(2, "no"), text(3, "cali1"), text(4, "aa:bb")].concat();
        let expected = AddReply {
            successful: true,
            error_message: "no".into(),
            host_interface_name: "cali1".into(),
            container_mac: "aa:bb".into(),
        };
        assert_eq!(AddReply::decode(reply.as_slice()).unwrap(), expected);
        let reply = [number(1, 0), text(2, "no")].concat();
        let expected = DelReply { successful: false, error_message: "no".into() };
        assert_eq!(DelReply::decode(reply.as_slice()).unwrap(), expected);
    }
}
