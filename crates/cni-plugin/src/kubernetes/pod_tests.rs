use super::*;

const OUR: &str = "cni.projectcalico.org/";

fn annotated(annotations: &[(&str, &str)]) -> BTreeMap<String, String> {
    annotations.iter().map(|(name, text)| (format!("{OUR}{name}"), (*text).to_owned())).collect()
}

fn shop(annotations: &[(&str, &str)]) -> KubeNamespace {
    KubeNamespace { name: "shop".into(), annotations: annotated(annotations), ..KubeNamespace::default() }
}

fn pod1(annotations: &[(&str, &str)]) -> KubePod {
    KubePod {
        annotations: annotated(annotations),
        node: "node1".into(),
        service_account: "default".into(),
        ..KubePod::default()
    }
}

const CALICO: AllowedAnnotations<'_> =
    AllowedAnnotations { ipam: "calico-ipam", ip_addrs_no_ipam: true, floating_ips: true };
const HOST_LOCAL: AllowedAnnotations<'_> = AllowedAnnotations { ipam: "host-local", ..CALICO };

fn facts(annotations: &[(&str, &str)]) -> PodFacts {
    PodFacts::new(&shop(&[]), pod1(annotations), &CALICO).unwrap()
}

#[track_caller]
fn refused(annotations: &[(&str, &str)], allowed: &AllowedAnnotations<'_>, text: &str) {
    let error = PodFacts::new(&shop(&[]), pod1(annotations), allowed).unwrap_err();
    assert_eq!((error.code().number(), error.message()), (999, text), "{annotations:?}");
}

/// The pod of the test case `pod`, for which the output of Calico's plugin was recorded.
const POD: &str = r#"{"kind":"Pod","metadata":{"name":"pod1","labels":{"app":"web","tier":"front"},"annotations":null,"generateName":"pod-"},
    "spec":{"nodeName":"node1","containers":[{"name":"c","ports":[{"name":"http","containerPort":8080,"protocol":"TCP"},
    {"containerPort":9090},{"containerPort":5353,"hostPort":53,"hostIP":"10.1.2.3","protocol":"UDP"},
    {"name":"odd","containerPort":7,"protocol":"QUIC"},{"name":"none"}]},{"name":"d","ports":[{"name":"sctp","containerPort":99,
    "protocol":"SCTP"},{"name":"noproto","containerPort":98}]}],"serviceAccountName":"seller",
    "initContainers":[{"name":"e","ports":[{"name":"init","containerPort":1,"protocol":"TCP"}]},{"name":"f"}]}}"#;

#[test]
fn pod_endpoint_is_made_of_its_parts() {
    let facts = PodFacts::new(&shop(&[]), KubePod::from_json(POD.as_bytes()).unwrap(), &CALICO).unwrap();
    let labels: Vec<_> = facts.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let expected = [
        "app=web",
        "projectcalico.org/namespace=shop",
        "projectcalico.org/orchestrator=k8s",
        "projectcalico.org/serviceaccount=seller",
        "tier=front",
    ];
    assert_eq!(labels, expected);
    assert_eq!((facts.generate_name.as_str(), facts.service_account.as_str()), ("pod-", "seller"));
    assert_eq!(facts.profiles, ["kns.shop", "ksa.shop.seller"]);
    let port = |name: &str, protocol, port, host_port, host_ip: &str| KubePort {
        name: name.into(),
        protocol,
        port,
        host_port,
        host_ip: host_ip.into(),
    };
    let expected = [
        port("http", "TCP", 8080, 0, ""),
        port("", "UDP", 5353, 53, "10.1.2.3"),
        port("sctp", "SCTP", 99, 0, ""),
        port("noproto", "TCP", 98, 0, ""),
        port("init", "TCP", 1, 0, ""),
    ];
    assert_eq!(facts.ports, expected);
    assert_eq!(facts.nats(&["10.65.0.1".parse().unwrap()]).unwrap(), []);
    assert!(facts.ipam_conf(&GoJson::Null).unwrap().is_none());
}

#[test]
fn pod_account_is_optional_and_may_have_long_name() {
    let with = |account: String| {
        let pod = KubePod { service_account: account, ..pod1(&[]) };
        let facts = PodFacts::new(&shop(&[]), pod, &CALICO).unwrap();
        (facts.profiles.len(), facts.labels.contains_key("projectcalico.org/serviceaccount"))
    };
    assert_eq!(with(String::new()), (1, false));
    assert_eq!(with("a".repeat(62)), (2, true));
    assert_eq!(with("a".repeat(63)), (2, false));
}

#[test]
fn pod_objects_need_metadata_and_right_types() {
    for text in [
        "",
        "{}",
        "[]",
        "null",
        "<html>",
        r#"{"metadata":null}"#,
        r#"{"metadata":{"labels":["a"]}}"#,
        r#"{"metadata":{"annotations":{"a":1}}}"#,
        r#"{"metadata":{},"spec":{"containers":{}}}"#,
        r#"{"metadata":{},"spec":{"containers":[{"ports":[{"containerPort":65536}]}]}}"#,
        r#"{"metadata":{},"spec":{"podCIDRs":"10.0.0.0/8"}}"#,
        r#"{"metadata":{}"#,
    ] {
        assert_eq!(KubePod::from_json(text.as_bytes()), None, "{text}");
        assert_eq!(KubeNamespace::from_json("shop", text.as_bytes()), None, "{text}");
    }
    let empty = br#"{"metadata":{},"spec":null}"#;
    assert_eq!(KubePod::from_json(empty), Some(KubePod::default()));
    let namespace = br#"{"metadata":{"labels":{"a":"b"},"annotations":{"c":"d"}}}"#;
    let namespace = KubeNamespace::from_json("shop", namespace).unwrap();
    assert_eq!((&*namespace.labels["a"], &*namespace.annotations["c"]), ("b", "d"));
}

#[test]
fn pod_must_be_on_node_but_not_particular_one() {
    let pod = KubePod { node: "node9".into(), ..pod1(&[]) };
    PodFacts::new(&shop(&[]), pod, &CALICO).unwrap();
    let error = PodFacts::new(&shop(&[]), KubePod::default(), &CALICO).unwrap_err();
    assert_eq!(error.message(), "error with field node (field should be assigned)");
}

#[test]
fn pod_pools_beat_those_of_namespace() {
    let namespace = shop(&[("ipv4pools", r#"["b-other"]"#), ("ipv6pools", r#"["six"]"#)]);
    let pools = |annotations: &[(&str, &str)], allowed: &AllowedAnnotations<'_>| {
        let facts = PodFacts::new(&namespace, pod1(annotations), allowed).unwrap();
        (facts.pools_v4.map(|pools| pools.join(",")), facts.pools_v6.map(|pools| pools.join(",")))
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(pools(&[], &CALICO), (some("b-other"), some("six")));
    assert_eq!(pools(&[("ipv4pools", r#"["a-main"]"#)], &CALICO), (some("a-main"), some("six")));
    assert_eq!(pools(&[("ipv4pools", "[]"), ("ipv6pools", "")], &CALICO), (some(""), some("six")));
    assert_eq!(pools(&[("ipv4pools", "x")], &HOST_LOCAL), (None, None));
    refused(&[("ipv4pools", "10.66.0.0/24")], &CALICO, "invalid character '.' after top-level value");
}

#[test]
fn pod_families_are_chosen_by_name() {
    let families = |text| facts(&[("ipFamilies", text)]).families;
    assert_eq!(families(r#"["IPv6"]"#), Some((false, true)));
    assert_eq!(families(r#"["IPv6","IPv4"]"#), Some((true, true)));
    assert_eq!(families("[]"), Some((false, false)));
    assert_eq!(families(""), None);
    let namespace = shop(&[("ipFamilies", r#"["IPv6","IPv4"]"#)]);
    assert_eq!(PodFacts::new(&namespace, pod1(&[]), &CALICO).unwrap().families, Some((true, true)));
    refused(&[("ipFamilies", r#"["ipv4"]"#)], &CALICO, r#"error parsing ipFamilies: ["ipv4"]"#);
    refused(&[("ipFamilies", "IPv4")], &CALICO, "invalid character 'I' looking for beginning of value");
}

#[test]
fn pod_choice_goes_to_ipam_plugin() {
    let conf =
        r#"{"name":"k8s-net","ipam":{"type":"calico-ipam","assign_ipv4":"true","ipv4_pools":["a-main"]},"mtu":1440}"#;
    let conf = GoJson::parse(conf.as_bytes()).unwrap();
    let facts = facts(&[("ipv4pools", r#"["b-other"]"#), ("ipFamilies", r#"["IPv6"]"#)]);
    let expected = r#"{"ipam":{"assign_ipv4":"false","assign_ipv6":"true","ipv4_pools":["b-other"],"type":"calico-ipam"},"mtu":1440,"name":"k8s-net"}"#;
    assert_eq!(facts.ipam_conf(&conf).unwrap().unwrap().to_string(), expected);
    let error = facts.ipam_conf(&GoJson::parse(br#"{"IPAM":{}}"#).unwrap()).unwrap_err();
    assert_eq!(error.message(), "data on stdin was of unexpected type");
}

#[test]
fn pod_wanted_addresses_are_one_per_family() {
    let both = r#"["10.65.1.5","fd80:24e2:f998:72d6::5"]"#;
    let addresses: [IpAddr; 2] = ["10.65.1.5".parse().unwrap(), "fd80:24e2:f998:72d6::5".parse().unwrap()];
    assert_eq!(facts(&[("ipAddrs", both)]).ip_addrs.unwrap(), addresses);
    assert_eq!(facts(&[("ipAddrsNoIpam", both)]).ip_addrs_no_ipam.unwrap(), addresses);
    let nothing = facts(&[("ipAddrs", ""), ("ipAddrsNoIpam", "")]);
    assert!(nothing.ip_addrs.is_none() && nothing.ip_addrs_no_ipam.is_none());
    for (text, error) in [
        (
            "10.65.1.5",
            "failed to parse IPs 10.65.1.5 for annotation \"cni.projectcalico.org/ipAddrs\": failed to parse '10.65.1.5' as JSON: \
             invalid character '.' after top-level value",
        ),
        ("[]", "annotation \"cni.projectcalico.org/ipAddrs\" specified but empty"),
        (r#"["x"]"#, "invalid IP format: x"),
        (
            r#"["10.65.1.5","10.65.1.6"]"#,
            "cannot have more than one IPv4 address for \"cni.projectcalico.org/ipAddrs\" annotation",
        ),
        (
            r#"["10.65.1.5","::ffff:10.65.1.6"]"#,
            "cannot have more than one IPv4 address for \"cni.projectcalico.org/ipAddrs\" annotation",
        ),
        (
            r#"["fd80:24e2:f998:72d6::5","fd80:24e2:f998:72d6::6"]"#,
            "cannot have more than one IPv6 address for \"cni.projectcalico.org/ipAddrs\" annotation",
        ),
    ] {
        refused(&[("ipAddrs", text)], &CALICO, error);
    }
    refused(
        &[("ipAddrs", r#"["10.65.1.5"]"#)],
        &HOST_LOCAL,
        "ipAddrs is not compatible with configured IPAM: host-local",
    );
    refused(
        &[("ipAddrsNoIpam", r#"["10.65.1.5"]"#)],
        &HOST_LOCAL,
        "ipAddrsNoIpam is not compatible with configured IPAM: host-local",
    );
    refused(
        &[("ipAddrsNoIpam", r#"["10.65.1.5"]"#)],
        &AllowedAnnotations { ip_addrs_no_ipam: false, ..CALICO },
        "requested feature is not enabled: ip_addrs_no_ipam",
    );
    refused(
        &[("ipAddrsNoIpam", "x")],
        &CALICO,
        "failed to parse IPs x for annotation \"cni.projectcalico.org/ipAddrsNoIpam\": failed to parse 'x' as JSON: invalid character \
         'x' looking for beginning of value",
    );
    refused(
        &[("ipAddrsNoIpam", r#"["10.65.1.5"]"#), ("ipAddrs", r#"["10.65.1.5"]"#)],
        &CALICO,
        "can't have both annotations: 'ipAddrs' and 'ipAddrsNoIpam' in use at the same time",
    );
}

#[test]
fn pod_hardware_address_is_read_with_every_ipam() {
    let facts = PodFacts::new(&shop(&[]), pod1(&[("hwAddr", "CA-FE-CA-FE-CA-FE")]), &HOST_LOCAL).unwrap();
    let mac = facts.mac.unwrap();
    assert_eq!((mac.text.as_str(), mac.bytes.len()), ("ca:fe:ca:fe:ca:fe", 6));
    let mac = self::facts(&[("hwAddr", "0011.2233.4455.6677")]).mac.unwrap();
    assert_eq!((mac.text.as_str(), mac.bytes.len()), ("00:11:22:33:44:55:66:77", 8));
    refused(
        &[("hwAddr", "invalid MAC address")],
        &CALICO,
        "failed to parse MAC address invalid MAC address provided via cni.projectcalico.org/hwAddr: address invalid MAC address: invalid \
         MAC address",
    );
    refused(
        &[("hwAddr", "")],
        &CALICO,
        "failed to parse MAC address  provided via cni.projectcalico.org/hwAddr: invalid MAC address",
    );
}

#[test]
fn pod_floating_addresses_lead_to_pod_addresses() {
    let addresses: Vec<IpAddr> =
        ["10.66.0.128", "fd80::a680", "10.66.0.129"].map(|text| text.parse().unwrap()).to_vec();
    let facts = facts(&[("floatingIPs", r#"["10.99.0.5","FD80::99"]"#)]);
    let nats = facts.nats(&addresses).unwrap();
    assert_eq!(nats, [(addresses[2], "10.99.0.5".to_owned()), (addresses[1], "FD80::99".to_owned())]);
    let error = facts.nats(&addresses[..1]).unwrap_err();
    assert_eq!(error.message(), "the floating IP FD80::99 needs a pod with an IPv6 address");
    let error = facts.nats(&addresses[1..2]).unwrap_err();
    assert_eq!(error.message(), "the floating IP 10.99.0.5 needs a pod with an IPv4 address");
    for text in ["[]", ""] {
        assert!(self::facts(&[("floatingIPs", text)]).nats(&addresses).unwrap().is_empty());
    }
    refused(
        &[("floatingIPs", "x")],
        &CALICO,
        "failed to parse 'x' as JSON: invalid character 'x' looking for beginning of value",
    );
    refused(&[("floatingIPs", r#"["nonsense"]"#)], &CALICO, "the floating IP nonsense is no address");
    refused(
        &[("floatingIPs", r#"["10.65.200.1"]"#)],
        &AllowedAnnotations { floating_ips: false, ..CALICO },
        "requested feature is not enabled: floating_ips",
    );
}

#[test]
fn pod_source_prefixes_are_networks() {
    let prefixes = |text| facts(&[("allowedSourcePrefixes", text)]).allowed_source_prefixes;
    assert_eq!(prefixes(r#"["8.8.8.8/32","1.1.1.1/24"]"#), ["8.8.8.8/32", "1.1.1.0/24"]);
    assert!(prefixes("").is_empty() && prefixes("[]").is_empty());
    refused(
        &[("allowedSourcePrefixes", r#"["8.8.8.8"]"#)],
        &CALICO,
        "failed to parse '8.8.8.8' as a CIDR: invalid CIDR address: 8.8.8.8",
    );
    refused(
        &[("allowedSourcePrefixes", "8.8.8.8/32")],
        &CALICO,
        "failed to parse '8.8.8.8/32' as JSON: invalid character '.' after top-level value",
    );
}

#[test]
fn pod_errors_come_in_calico_order() {
    let mut annotations = vec![
        ("allowedSourcePrefixes", "x"),
        ("ipv4pools", "x"),
        ("ipv6pools", "x"),
        ("ipFamilies", r#"["x"]"#),
        ("ipAddrs", r#"["x"]"#),
        ("hwAddr", "x"),
        ("floatingIPs", r#"["x"]"#),
    ];
    for text in [
        "failed to parse 'x' as JSON: invalid character 'x' looking for beginning of value",
        "invalid character 'x' looking for beginning of value",
        "invalid character 'x' looking for beginning of value",
        r#"error parsing ipFamilies: ["x"]"#,
        "invalid IP format: x",
        "failed to parse MAC address x provided via cni.projectcalico.org/hwAddr: address x: invalid MAC address",
        "the floating IP x is no address",
    ] {
        refused(&annotations, &CALICO, text);
        annotations.remove(0);
    }
}

#[test]
fn pod_has_profile_of_network_when_not_read() {
    let facts = PodFacts::of_network("net1");
    assert_eq!(facts.profiles, ["net1"]);
    assert!(facts.labels.is_empty() && facts.ports.is_empty());
}
