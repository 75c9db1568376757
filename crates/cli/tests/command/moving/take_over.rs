//! Tests that `margay import` takes over the addresses of host-local, podman and whereabouts.

use std::fs;

use crate::moving::fill::{Places, assign, at, release};
use crate::store::content::write;

#[test]
fn take_over_from_host_local_and_back() {
    let places = Places::new();
    for location in [places.sled("a"), places.redb("b")] {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        file("lock", "");
        file("last_reserved_ip.0", "10.99.0.7");
        file("10.99.0.5", "c1\r\neth0");
        file("fd99::5", "c1\r\neth0");
        file("10.99.0.6", "c1\r\neth1");
        file("10.99.0.7", "c2");
        at(&location, &["pool", "create", "lab", "10.99.0.0/16", "--gateway", "10.99.0.1"]).answer();
        at(&location, &["pool", "create", "lab6", "fd99::/112"]).answer();
        let path = folder.path().to_str().unwrap();
        let args = ["import", "host-local", path, "--network", "lab", "--node", "node1"];
        let dry = at(&location, &[&args[..], &["--dry-run"]].concat()).answer();
        assert!(dry.contains("Would take over 4 addresses in network lab for node node1"), "{dry}");
        assert!(at(&location, &["ipam", "show", "--ip", "10.99.0.5"]).answer().contains("not assigned"));
        let json = at(&location, &[&args[..], &["-o", "json"]].concat()).json();
        assert_eq!((&json["taken_over"], &json["there_already"]), (&4.into(), &0.into()), "{json}");

        // In the second run of the import, some of host-local's files cannot be taken over.
        file("10.99.0.1", "c3\r\neth0");
        file("10.88.0.1", "c4\r\neth0");
        file("10.99.0.8", "");
        file("notes", "");
        let taken = assign(&location, "mine").unwrap();
        file(&taken, "c5\r\neth0");
        let done = at(&location, &args);
        assert_eq!(done.code, 1);
        for words in [
            "0 addresses",
            "4 addresses were taken over before",
            "10.99.0.1 of container c3: address 10.99.0.1 is reserved",
            "10.88.0.1 of container c4: The provided IP address is not in a configured pool",
            "10.99.0.8: its file cannot be used: it is empty",
            "notes: its name is no address",
            &format!("{taken} of container c5: resource already exists"),
        ] {
            assert!(done.out.contains(words), "{words}: {}", done.out);
        }

        // The test releases the addresses of a taken-over container as the plugin's DEL does.
        let freed: Vec<_> = release(&location, "c1").unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(freed, ["10.99.0.5", "fd99::5"], "the addresses of eth1 stay");
        assert_eq!(release(&location, "c2").unwrap().len(), 1);
    }
}

#[test]
fn take_over_from_podman() {
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/16"]).answer();
    let file = places.path("inspect.json");
    let network = |ip: &str| serde_json::json!({"IPAddress": ip, "GlobalIPv6Address": ""});
    let containers = serde_json::json!([
        {"Id": "c1", "NetworkSettings": {"Networks": {"lab": network("10.99.0.9")}}},
        {"Id": "c2", "NetworkSettings": {"Networks": {"lab": network("10.99.0.10"), "other": network("10.1.0.1")}}},
        {"Id": "c3", "NetworkSettings": {"Networks": {"other": network("10.1.0.2")}}},
    ]);
    fs::write(&file, containers.to_string()).unwrap();
    let args = ["import", "podman", file.to_str().unwrap(), "--network", "lab", "--node", "node1"];
    let done = at(&location, &args);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(
        done.out.contains("took over 1 address in") && done.out.contains("container c2: it is in several"),
        "{}",
        done.out
    );
    assert_eq!(release(&location, "c1").unwrap().len(), 1);
    fs::write(&file, "{}").unwrap();
    let said = at(&location, &args).failure();
    assert!(said.contains("is no list of containers"), "{said}");
}

#[test]
fn take_over_from_podman_with_real_containers() {
    let places = Places::new();
    let inspected = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/podman/inspect.json");
    let from = |file, network| ["import", "podman", file, "--network", network, "--node", "node1"];
    // In podman's output, the container with this id is in several networks.
    let both = "container 4a9333997bb94eb1c0f49a33c0618aeaae40988c82dbdfbf24cc09bfc1035d18: it is in several networks";
    for location in [places.sled("a"), places.redb("b")] {
        at(&location, &["pool", "create", "lab", "10.99.0.0/16", "--gateway", "10.99.0.1"]).answer();
        at(&location, &["pool", "create", "dual", "10.98.0.0/24", "--gateway", "10.98.0.1"]).answer();
        at(&location, &["pool", "create", "dual6", "fd99::/112", "--gateway", "fd99::1"]).answer();
        let dry = at(&location, &[&from(inspected, "lab")[..], &["--dry-run"]].concat());
        assert_eq!(dry.code, 1, "{}", dry.err);
        assert!(dry.out.contains("Would take over 47 addresses in network lab for node node1"), "{}", dry.out);
        for (network, addresses) in [("lab", "47 addresses"), ("dual", "2 addresses")] {
            let done = at(&location, &from(inspected, network));
            assert_eq!(done.code, 1, "{}", done.err);
            let said = format!("Successfully took over {addresses} in network {network} for node node1");
            assert_eq!(done.out.lines().count(), 2, "{}", done.out);
            assert!(done.out.starts_with(&said) && done.out.contains(both), "{}", done.out);
        }
        let fixed = at(&location, &["ipam", "show", "--ip", "10.99.3.7"]).answer();
        assert!(fixed.contains("in use"), "{fixed}");
        let again = at(&location, &from(inspected, "lab"));
        assert!(
            again.out.contains("took over 0 addresses") && again.out.contains("47 addresses were"),
            "{}",
            again.out
        );

        // The test releases the address of a taken-over container as the plugin's DEL does.
        let freed = release(&location, "c1324005fc4bccdd9628c293f2bebdad61429af3e919e934417c38c5d460fe16").unwrap();
        assert_eq!(freed.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.99.3.7"]);
    }
}

#[test]
fn take_over_of_podman_file_names_right_command() {
    let places = Places::new();
    let path = places.path("ipam.db");
    // The first page of a bbolt file consists of a header of 16 bytes, the magic number and further data.
    let page: Vec<u8> = [&[0; 16][..], &0xED0C_DAED_u32.to_le_bytes(), &[0; 4076]].concat();
    fs::write(&path, page).unwrap();
    let said = at(&places.sled("a"), &["import", "podman", path.to_str().unwrap(), "--network", "lab"]).failure();
    assert!(said.contains("ipam.db is podman's own file"), "{said}");
    assert!(said.contains("podman inspect $(podman ps -q) | margay import podman - --network lab"), "{said}");
}

/// The output of kubectl for networks that whereabouts manages.
const RECORDS: &str = r#"
apiVersion: v1
kind: List
items:
- apiVersion: whereabouts.cni.cncf.io/v1alpha1
  kind: IPPool
  metadata: {name: 10.99.0.0-24, namespace: kube-system, resourceVersion: "7"}
  spec:
    range: 10.99.0.0/24
    allocations:
      "5": {id: c1, podref: shop/web-0, ifname: eth0}
      "6": {id: c2, podref: shop/web-1, ifname: eth0}
      "7": {id: c3, podref: shop/gone, ifname: eth0}
      "256": {id: c4, podref: shop/web-0, ifname: eth0}
      "9": {id: c5, podref: shop/web-2}
- apiVersion: whereabouts.cni.cncf.io/v1alpha1
  kind: IPPool
  metadata: {name: fd99---120, namespace: kube-system}
  spec: {range: "fd99::/120", allocations: {"5": {id: c1, podref: shop/web-0, ifname: eth0}}}
- apiVersion: whereabouts.cni.cncf.io/v1alpha1
  kind: IPPool
  metadata: {name: 10.1.0.0-16, namespace: kube-system}
  spec: {range: 10.1.0.0/16, allocations: {"9": {id: other, podref: shop/web-0, ifname: net2}}}
- apiVersion: whereabouts.cni.cncf.io/v1alpha1
  kind: OverlappingRangeIPReservation
  metadata: {name: 10.99.0.5, namespace: kube-system}
  spec: {containerid: c1, podref: shop/web-0}
"#;
const PODS: &str = r#"
- {apiVersion: v1, kind: Pod, metadata: {namespace: shop, name: web-0}, spec: {nodeName: node1, containers: []}}
- {apiVersion: v1, kind: Pod, metadata: {namespace: shop, name: web-1}, spec: {nodeName: node2}}
- {apiVersion: v1, kind: Pod, metadata: {namespace: shop, name: web-2}, spec: {}}
"#;

#[test]
fn take_over_from_whereabouts_for_node_of_each_pod() {
    let places = Places::with_etcd();
    let cluster = places.etcd();
    let node = |name: &str| {
        (
            format!("/calico/resources/v3/projectcalico.org/nodes/{name}"),
            format!(r#"{{"metadata":{{"name":"{name}"}}}}"#).into_bytes(),
        )
    };
    write(&cluster, ["node1", "node2"].into_iter().map(node));
    for location in [cluster, places.sled("a"), places.redb("b")] {
        at(&location, &["pool", "create", "lab", "10.99.0.0/24", "--manual"]).answer();
        at(&location, &["pool", "create", "lab6", "fd99::/120", "--manual"]).answer();
        let file = places.path("records.yaml");
        fs::write(&file, RECORDS.trim_end().to_owned() + PODS).unwrap();
        let is_cluster = location.path().is_none();
        let found =
            if is_cluster { "3 addresses in network lab for 2 nodes" } else { "2 addresses in network lab for 1 node" };
        let of_two = ["--range", "10.99.0.0/24", "--range", "fd99::/120", "--node", "node1"];
        let args = [&["import", "whereabouts", file.to_str().unwrap(), "--network", "lab"], &of_two[..]].concat();
        let dry = at(&location, &[&args[..], &["--dry-run"]].concat());
        assert!(dry.out.contains(&format!("Would take over {found}")), "{}{}", dry.out, dry.err);
        let done = at(&location, &args);
        assert_eq!(done.code, 1);
        let mut expected = vec![
            found,
            "left out: 256 in 10.99.0.0/24: it is not in the range",
            "left out: 10.99.0.7 of container c3: its pod shop/gone is not there any more",
            "left out: 10.99.0.9 of container c5: its pod shop/web-2 is on no node",
        ];
        if !is_cluster {
            expected
                .push("10.99.0.6 of container c2: its pod is on node node2, and this store is for one machine, node1");
        }
        for words in expected {
            assert!(done.out.contains(words), "{words}: {}", done.out);
        }
        assert!(!done.out.contains("10.1.0.9"), "{}", done.out);
        let shown = at(&location, &["ipam", "show", "--ip", "10.99.0.6"]).answer();
        for words in ["lab.c2", "node2", "web-1", "shop"] {
            assert_eq!(shown.contains(words), is_cluster, "{words}: {shown}");
        }
        // The test releases the address of container c1 as the plugin's DEL on node1 does. Container c2 is on node2, so
        // a DEL of c2 on node1 releases nothing.
        let freed: Vec<_> = release(&location, "c1").unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(freed, ["10.99.0.5", "fd99::5"]);
        assert_eq!(release(&location, "c2").unwrap().len(), 0);
    }
}

#[test]
fn take_over_from_whereabouts_without_pods_is_for_one_node() {
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/24", "--manual"]).answer();
    let file = places.path("records.yaml");
    fs::write(&file, RECORDS).unwrap();
    let args = ["import", "whereabouts", file.to_str().unwrap(), "--network", "lab", "--node", "node1"];
    let done = at(&location, &[&args[..], &["--range", "10.99.0.0/24"]].concat());
    assert!(done.out.contains("took over 4 addresses in network lab for node node1"), "{}{}", done.out, done.err);
    assert!(at(&location, &["ipam", "show", "--ip", "10.99.0.9"]).answer().contains("net1"), "the usual interface");
    assert_eq!(release(&location, "c1").unwrap().len(), 1);

    let unknown = at(&location, &[&args[..], &["--range", "10.98.0.0/24"]].concat()).failure();
    assert!(unknown.contains("it has no IPPool of the range 10.98.0.0/24; it has 10.99.0.0/24"), "{unknown}");
    // Both test networks of whereabouts assign from one address range, and only their `network_name` tells them apart.
    let two = "kind: List\nitems:\n- {kind: IPPool, metadata: {name: blue-10.99.0.0-24}, spec: {range: 10.99.0.0/24}}\n\
        - {kind: IPPool, metadata: {name: green-10.99.0.0-24}, spec: {range: 10.99.0.0/24}}\n";
    fs::write(&file, two).unwrap();
    let refused = at(&location, &args).failure();
    assert!(
        refused.contains("IPPools blue-10.99.0.0-24 and green-10.99.0.0-24 have the same range 10.99.0.0/24"),
        "{refused}"
    );
    assert!(refused.contains("hint: pass the pods and only one of these IPPools at a time"), "{refused}");
    for (text, expected) in [
        ("kind: List\nitems: []\n", "it has no IPPool of the whereabouts plugin"),
        ("kind: IPPool\nmetadata: {name: a}\nspec: {range: x}\n", "the range x of IPPool a is not a CIDR"),
        ("kind: [\n", "cannot understand"),
        ("kind: 1\n", "records.yaml: "),
        ("", "it has no IPPool of the whereabouts plugin"),
    ] {
        fs::write(&file, text).unwrap();
        let failure = at(&location, &args).failure();
        assert!(
            failure.contains(expected) && failure.contains("hint: pass the output of: kubectl get"),
            "{text}: {failure}"
        );
    }
}
