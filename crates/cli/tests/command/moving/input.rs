//! Tests imports of unusable files: empty files, files of another kind, and files that are not text.

use std::fs;

use datastore::Location;

use crate::moving::fill::{Places, at};

/// Runs `margay import`, and returns the first line of its report and the lines about records that were not imported.
fn taken(location: &Location, args: &[&str]) -> (String, Vec<String>) {
    let done = at(location, args);
    let mut lines = done.out.lines().map(str::to_owned);
    let first = lines.next().unwrap_or_else(|| panic!("{}", done.err));
    let left_out: Vec<String> = lines.map(|line| line.replace("left out: ", "")).collect();
    assert_eq!(done.code, u8::from(!left_out.is_empty()), "{}", done.err);
    (first, left_out)
}

/// Returns whether `ipam show` reports that the address is in use.
fn is_held(location: &Location, address: &str) -> bool {
    at(location, &["ipam", "show", "--ip", address]).out.contains("is in use")
}

#[test]
fn host_local_files_are_left_out_without_container() {
    let places = Places::new();
    for location in [places.sled("a"), places.redb("b")] {
        at(&location, &["pool", "create", "lab", "10.22.0.0/24", "--manual", "--gateway", "10.22.0.1"]).answer();
        at(&location, &["pool", "create", "lab6", "fd22::/120", "--manual", "--gateway", "fd22::1"]).answer();
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| fs::write(folder.path().join(name), content).unwrap();
        file("10.22.0.2", b"aaaa\r\neth0");
        file("fd22::2", b"aaaa\r\neth0\r\n");
        file("10.22.0.3", b"aaaa\n");
        let wrong: [(&str, &[u8], &str); 13] = [
            ("10.22.0.10", b"", "its file cannot be used: it is empty"),
            ("10.22.0.11", b" \r\n", "its file cannot be used: it is empty"),
            ("10.22.0.12", &[0; 70], "its file cannot be used: it holds nothing but zero bytes"),
            ("fd22::12", &[0; 70], "its file cannot be used: it holds nothing but zero bytes"),
            ("10.22.0.13", b"\xff\xff\xff", "its file cannot be used: it is not UTF-8"),
            ("10.22.0.14", b"\xef\xbb\xbfaaaa\r\neth0", "its file cannot be used: it begins with a byte order mark"),
            ("10.22.0.15", b"\xff\xfea\0a\0", "its file cannot be used: it begins with a byte order mark"),
            ("10.22.0.16", &[b'a'; 5000], "its file cannot be used: it has more than 4096 bytes"),
            ("10.22.0.17", b"x y\r\neth0", "its container's id is none that a runtime gives"),
            ("10.22.0.18", b"aaaa\0\0\r\neth0", "its container's id is none that a runtime gives"),
            ("10.22.0.19", b"\r\neth0", "its container's id is none that a runtime gives"),
            ("10.22.0.20", b"aaaa\r\neth0:1", "\"eth0:1\" is no interface's name"),
            ("10.22.0.21", b"aaaa\r\nan-interface-name", "\"an-interface-name\" is no interface's name"),
        ];
        for (name, content, _) in wrong {
            file(name, content);
        }
        fs::create_dir(folder.path().join("10.22.0.22")).unwrap();
        let args = ["import", "host-local", folder.path().to_str().unwrap(), "--network", "lab", "--node", "node1"];
        for dry in [&["--dry-run"][..], &[]] {
            let (first, left_out) = taken(&location, &[&args[..], dry].concat());
            assert!(first.contains("over 3 addresses in network lab"), "{first}");
            assert_eq!(left_out.len(), wrong.len() + 1, "{left_out:#?}");
            for (address, _, why) in wrong {
                let line = left_out.iter().find(|line| {
                    line.starts_with(&format!("{address}:")) || line.starts_with(&format!("{address} of "))
                });
                assert!(line.is_some_and(|line| line.ends_with(why)), "{address}: {why}: {left_out:#?}");
            }
            assert!(left_out.iter().any(|line| line == "10.22.0.22: its file cannot be used: it is no regular file"));
        }
        assert!(is_held(&location, "10.22.0.2") && is_held(&location, "fd22::2") && is_held(&location, "10.22.0.3"));
        for (address, ..) in wrong {
            assert!(!is_held(&location, address), "{address}");
        }
    }
}

#[test]
fn podman_containers_are_left_out_without_id_or_address() {
    let places = Places::new();
    let (location, file) = (places.redb("a"), places.path("inspect.json"));
    at(&location, &["pool", "create", "lab", "10.22.0.0/24", "--manual"]).answer();
    let args = ["import", "podman", file.to_str().unwrap(), "--network", "lab", "--node", "node1"];
    let in_lab = |id: &str, v4: &str| {
        format!(
            r#"{{"Id":"{id}","NetworkSettings":{{"Networks":{{"lab":{{"IPAddress":{v4},"GlobalIPv6Address":null}}}}}}}}"#
        )
    };
    let containers = [
        in_lab("c1", r#""10.22.0.2""#),
        in_lab("", r#""10.22.0.10""#),
        in_lab("x y", r#""10.22.0.11""#),
        in_lab("c4", r#""10.22.0.300""#),
        // The containers from `c5` to `c10` are not running, so podman records no address for them.
        in_lab("c5", r#""""#),
        in_lab("c6", "null"),
        r#"{"Id":"c7","NetworkSettings":null}"#.to_owned(),
        r#"{"Id":"c8","NetworkSettings":{"Networks":null}}"#.to_owned(),
        r#"{"Id":"c9","NetworkSettings":{"Networks":{"lab":null}}}"#.to_owned(),
        r#"{"Id":"c10"}"#.to_owned(),
    ];
    fs::write(&file, format!("[{}]", containers.join(","))).unwrap();
    let (first, left_out) = taken(&location, &args);
    assert!(first.contains("over 1 address in network lab"), "{first}");
    let expected = [
        "container c4: \"10.22.0.300\" is no address",
        "10.22.0.10 of container : its container's id is none that a runtime gives",
        "10.22.0.11 of container x y: its container's id is none that a runtime gives",
    ];
    assert_eq!(left_out, expected);

    let other = at(&location, &["import", "podman", file.to_str().unwrap(), "--network", "lba"]).failure();
    assert!(other.contains("none of its containers is in network lba; they are in lab"), "{other}");
    fs::write(&file, "[]").unwrap();
    assert!(at(&location, &args).answer().contains("took over 0 addresses"));
    for (content, why) in [
        (&b""[..], "it is empty"),
        (b"\0\0", "it holds nothing but zero bytes"),
        (b"\xef\xbb\xbf[]", "it begins with a byte order mark"),
        (b"\xff\xfe[\0]\0", "it begins with a byte order mark"),
        (b"\x1f\x8b\x08", "it is compressed with gzip"),
        (b"[\"\xff\"]", "it is not UTF-8"),
    ] {
        fs::write(&file, content).unwrap();
        let said = at(&location, &args).failure();
        assert!(said.contains(&format!("is no list of containers: {why}")), "{content:?}: {said}");
    }
}

#[test]
fn whereabouts_records_are_left_out_without_container() {
    let places = Places::new();
    let (location, file) = (places.redb("a"), places.path("records.yaml"));
    at(&location, &["pool", "create", "lab", "10.22.0.0/24", "--manual"]).answer();
    let args = ["import", "whereabouts", file.to_str().unwrap(), "--network", "lab", "--node", "node1"];
    let records = r#"
kind: List
metadata: null
items:
- kind: IPPool
  metadata: {name: 10.22.0.0-24}
  spec:
    range: 10.22.0.0/24
    allocations:
      "2": {id: c1, podref: shop/web-0, ifname: net1}
      "10": {id: "", podref: shop/web-0}
      "11": {id: "x y", podref: shop/web-0}
      "12": {id: "a\0", podref: shop/web-0}
      "13": {id: c2, podref: shop/web-0, ifname: net1/2}
      "14": null
      "15": {id: null, podref: null, ifname: null}
- {kind: IPPool, metadata: null, spec: {range: 10.23.0.0/24, allocations: null}}
- {kind: ConfigMap, metadata: null, spec: null}
"#;
    fs::write(&file, records).unwrap();
    let (first, left_out) = taken(&location, &args);
    assert!(first.contains("over 1 address in network lab"), "{first}");
    let id = "its container's id is none that a runtime gives";
    let mut expected = vec![
        "10.22.0.10: its container is not recorded".to_owned(),
        "10.22.0.14: its container is not recorded".to_owned(),
        "10.22.0.15: its container is not recorded".to_owned(),
        format!("10.22.0.12 of container a\\u{{0}}: {id}"),
        format!("10.22.0.11 of container x y: {id}"),
        "10.22.0.13 of container c2: \"net1/2\" is no interface's name".to_owned(),
    ];
    expected.sort();
    assert_eq!(
        {
            let mut sorted = left_out;
            sorted.sort();
            sorted
        },
        expected
    );

    // Write a new input file with two pods: `web-0` on no node, and `web-1` on node1.
    let pods = "- {kind: Pod, metadata: {namespace: shop, name: web-0}, spec: {nodeName: \"\"}}\n- {kind: Pod, metadata: {namespace: shop, name: web-1}, spec: {nodeName: node1}}\n";
    fs::write(&file, records.to_owned() + pods).unwrap();
    let (_, left_out) = taken(&location, &args);
    for line in [
        "10.22.0.2 of container c1: its pod shop/web-0 is on no node",
        "10.22.0.14 of container : its pod is not recorded",
    ] {
        assert!(left_out.iter().any(|found| found == line), "{line}: {left_out:#?}");
    }
    for (content, why) in [
        (&b""[..], "it has no IPPool of the whereabouts plugin"),
        (b"kind: List\nitems: null\n", "it has no IPPool of the whereabouts plugin"),
        (b"\0\0", "it holds nothing but zero bytes"),
        (b"\xff\xfe[\0]\0", "it begins with a byte order mark"),
        (b"\x1f\x8b\x08", "it is compressed with gzip"),
        (b"kind: \xff\n", "it is not UTF-8"),
        (b"kind: IPPool\nspec: {range: \"\"}\n", "the range  of IPPool  is not a CIDR"),
    ] {
        fs::write(&file, content).unwrap();
        let said = at(&location, &args).failure();
        assert!(said.contains(why), "{content:?}: {said}");
    }
}

#[test]
fn whereabouts_range_may_have_bounds_or_host_bits() {
    let places = Places::new();
    let file = places.path("records.yaml");
    let records = "kind: IPPool\nmetadata: {name: a}\nspec:\n  range: 10.22.0.0/24\n  allocations:\n    \
        \"5\": {id: c5}\n    \"9\": {id: c9}\n    \"20\": {id: c20}\n";
    fs::write(&file, records).unwrap();
    let import = |name: &str, ranges: &[&str]| {
        let location = places.redb(name);
        at(&location, &["pool", "create", "lab", "10.22.0.0/24", "--manual"]).answer();
        let mut args = vec!["import", "whereabouts", file.to_str().unwrap(), "--network", "lab", "--node", "node1"];
        for range in ranges {
            args.extend(["--range", range]);
        }
        at(&location, &args).answer();
        ["10.22.0.5", "10.22.0.9", "10.22.0.20"].map(|address| is_held(&location, address))
    };
    assert_eq!(import("a", &["10.22.0.77/24"]), [true, true, true]);
    assert_eq!(import("b", &["10.22.0.6-10.22.0.15/24"]), [false, true, false]);
    assert_eq!(import("c", &["10.22.0.1-10.22.0.5/24", "10.22.0.16-10.22.0.20/24"]), [true, false, true]);
    let refused = at(
        &places.redb("a"),
        &["import", "whereabouts", file.to_str().unwrap(), "--network", "lab", "--range", "10.21.0.1-10.22.0.5/24"],
    );
    assert!(refused.failure().contains("10.21.0.1 is not in 10.22.0.0/24"));
}

#[test]
fn input_files_say_so_when_not_text() {
    let places = Places::new();
    let (location, file) = (places.redb("a"), places.path("file"));
    at(&location, &["pool", "create", "lab", "10.22.0.0/24", "--manual"]).answer();
    let path = file.to_str().unwrap();
    let json = br#"{"apiVersion":"projectcalico.org/v3","kind":"IPPool","metadata":{"name":"c"},"spec":{"cidr":"10.24.0.0/24"}}"#;
    let utf16: Vec<u8> = [0xff, 0xfe].into_iter().chain(json.iter().flat_map(|byte| [*byte, 0])).collect();
    for (content, why) in [
        (&b""[..], "it is empty"),
        (b"\0\0", "it holds nothing but zero bytes"),
        (&utf16, "it begins with a byte order mark"),
        (b"\x1f\x8b\x08", "it is compressed with gzip"),
        (b"\xc3\x28", "it is not UTF-8"),
    ] {
        fs::write(&file, content).unwrap();
        for args in [&["import", path][..], &["store", "restore", path], &["ipam", "release", "--from-report", path]] {
            let said = at(&location, args).failure();
            assert!(said.contains(why), "{args:?} of {content:?}: {said}");
        }
        let said = at(&location, &["apply", "-f", path]).failure();
        let why = if content.is_empty() { "No resources specified" } else { why };
        assert!(said.contains(why), "{content:?}: {said}");
    }
    // Like calicoctl, `margay apply` accepts a document that begins with the UTF-8 byte order mark.
    fs::write(&file, [b"\xef\xbb\xbf", &json[..]].concat()).unwrap();
    at(&location, &["apply", "-f", path]).answer();
    let said = at(&location, &["ipam", "release", "--from-report", path]).failure();
    assert!(said.contains("is no report: it begins with a byte order mark"), "{said}");
}

#[test]
fn configuration_says_so_when_not_text() {
    let places = Places::new();
    let file = places.path("calicoctl.cfg");
    let folder = places.path("net.d");
    fs::create_dir(&folder).unwrap();
    for (content, why) in [
        (&b""[..], "it is empty"),
        (b"\0\0", "it holds nothing but zero bytes"),
        (b"\xff\xfek\0", "it begins with a byte order mark"),
        (b"kind: \xff", "it is not UTF-8"),
    ] {
        fs::write(&file, content).unwrap();
        let said = crate::common::margay(["--config", file.to_str().unwrap(), "pool", "list"]).failure();
        // For an empty file, the error message equals Calico's message.
        let words = if content.is_empty() { "unknown APIVersion ''" } else { why };
        assert!(said.contains(words), "{content:?}: {said}");
        fs::write(folder.join("10-lab.conflist"), content).unwrap();
        let said = crate::common::margay(["--cni-conf-dir", folder.to_str().unwrap(), "pool", "list"]).failure();
        assert!(said.contains(why), "{content:?}: {said}");
    }
    fs::write(folder.join("10-lab.conflist"), b"\xef\xbb\xbf{\"plugins\":[]}").unwrap();
    let said = crate::common::margay(["--cni-conf-dir", folder.to_str().unwrap(), "pool", "list"]).failure();
    assert!(said.contains("10-lab.conflist: it begins with a byte order mark"), "{said}");
}
