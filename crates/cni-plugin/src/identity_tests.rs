use std::fs;

use super::*;
use crate::args::AddressForm;
use crate::env::Environment;
use crate::gojson::Json;

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
    NetConf::decode(&Json::parse(json.as_bytes()).unwrap()).unwrap()
}

fn identity(json: &str, args: &str, changes: &[(&str, &str)]) -> Identity {
    let mut env =
        BTreeMap::from([("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0"), ("CNI_PATH", "/x")]);
    env.extend(changes.iter().copied());
    let call = Call::from_environment(&env.into_iter().collect::<Environment>()).unwrap();
    Identity::new(&conf(json), &call, &Args::parse(args, AddressForm::Bare).unwrap(), &host())
}

#[test]
fn where_the_nodes_name_comes_from() {
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
    assert_eq!(named(&endless, ""), "host-1", "what is so long is no name");
    let by_default = Host { nodename_file: full, ..host() };
    assert_eq!(by_default.node(&conf("{}")), "node7");
    assert_eq!(by_default.node(&conf(r#"{"nodename_file":"/no/such/file"}"#)), "host-1");
}

#[test]
fn what_is_recorded() {
    let pod = identity(r#"{"name":"net.1","nodename":"n1"}"#, "K8S_POD_NAME=cart;K8S_POD_NAMESPACE=shop", &[]);
    let attributes: Vec<_> = pod.attributes(host().now).into_iter().collect();
    let expected = [
        ("margay.io/boot", "191b29e2"),
        ("margay.io/ifname", "eth0"),
        ("margay.io/net", "net.1"),
        ("namespace", "shop"),
        ("node", "n1"),
        ("pod", "cart"),
        ("timestamp", "2026-11-21 02:41:03.956790656 +0000 UTC"),
    ];
    assert_eq!(attributes, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    assert_eq!((pod.attachment.handle().as_str(), pod.old_handle().as_str()), ("net.1.c1", "shop.cart"));
    assert_eq!(pod.namespace, "shop");

    let plain = identity(r#"{"name":"a","nodename":"n1"}"#, "K8S_POD_NAME=cart", &[]);
    assert_eq!((plain.namespace.as_str(), plain.old_handle().as_str()), ("default", "c1"));
    assert!(!plain.attributes(host().now).contains_key("pod"));
    // A file that is no namespace is not recorded as one.
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
fn names_of_endpoints() {
    let refused = |json: &str, args: &str, changes: &[(&str, &str)]| {
        let error = identity(json, args, changes).check_endpoint_name().unwrap_err();
        let start = "error constructing WorkloadEndpoint name: error with field ";
        error.message().strip_prefix(start).unwrap().to_owned()
    };
    identity(r#"{"nodename":"a-b"}"#, "", &[("CNI_CONTAINERID", "c-1")]).check_endpoint_name().unwrap();
    assert_eq!(refused(r#"{"nodename":"-a"}"#, "", &[]), "node = '-a' (field must not begin with a '-')");
    assert_eq!(refused("{}", "", &[("CNI_CONTAINERID", "c-")]), "containerID = 'c-' (field must not end with a '-')");
    assert_eq!(refused("{}", "", &[("CNI_IFNAME", "-")]), "endpoint = '-' (field must not begin with a '-')");
    let pod = "K8S_POD_NAME=p-;K8S_POD_NAMESPACE=n";
    // The container id of a pod is no part of the name.
    assert_eq!(refused("{}", pod, &[("CNI_CONTAINERID", "c-")]), "pod = 'p-' (field must not end with a '-')");
    let mut nameless = identity("{}", "", &[]);
    nameless.attachment.node.clear();
    assert_eq!(
        nameless.check_endpoint_name().unwrap_err().message(),
        "error constructing WorkloadEndpoint name: error with field node (field should be assigned)"
    );
    assert_eq!(nameless.check_node().unwrap_err().code().number(), 7);
}
