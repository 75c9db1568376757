//! Tests `margay gc` on real stores and real network namespaces. The tests need root on the host, not in a container,
//! and the program `ip`.

mod container;
mod endpoints;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use kv::Deadline;
use serde_json::Value;

use crate::book::machine::Machine;
use crate::common::container::Container;
use crate::common::{Done, Lab, TEST_TIMEOUT, margay};

/// Creates a pool in a range that no machine uses. Each test uses its own address range, because all tests run in the
/// machine's network namespaces.
fn lab(lab: &Lab, range: &str) {
    lab.margay(&format!("pool create lab {range}")).answer();
}

/// The recorded id of a network namespace that does not exist.
const GONE: &str = "4:17";

/// Time limit for waiting until other tests have closed their network namespaces; longer than any test runs.
const LONGEST_TEST: Duration = Duration::from_secs(120);

/// Assigns an address with this machine's boot id to a container whose network namespace is gone.
fn assign_now(lab: &Lab, container: &str) -> String {
    assign_in(lab, container, Some(GONE))
}

/// Assigns an address with this machine's boot id to a container in the network namespace `netns`.
fn assign_in(lab: &Lab, container: &str, netns: Option<&str>) -> String {
    let attachment = Attachment {
        network: "net".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: "node1".into(),
        boot: host::short_boot(&host::boot_id().unwrap()),
    };
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    request.attributes.extend(netns.map(|netns| ("margay.io/netns".to_owned(), netns.to_owned())));
    lab.with_ipam(async |ipam| ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await).unwrap()[0].ip.to_string()
}

fn gc(lab: &Lab, args: &str) -> Done {
    lab.margay(&format!("gc --looks {} {args}", looks(lab).display()))
}

fn looks(lab: &Lab) -> PathBuf {
    lab.folder().join("run/looks")
}

/// Returns the path of the only file in which `gc` has recorded the findings of its scans.
fn looks_file(lab: &Lab) -> PathBuf {
    let mut files: Vec<PathBuf> = looks(lab).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

/// Changes the times in the file with scan findings, so that all findings look `seconds` older.
fn age_looks(lab: &Lab, seconds: u64) {
    let file = looks_file(lab);
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for look in stored["looks"].as_array_mut().unwrap() {
        let since = look["since"].as_u64().unwrap().checked_sub(seconds * 1000);
        look["since"] = since.expect("the machine was started before").into();
    }
    std::fs::write(&file, stored.to_string()).unwrap();
}

fn is_held(lab: &Lab, address: &str) -> bool {
    lab.margay(&format!("ipam show --ip {address}")).answer().contains("is in use")
}

fn list<'v>(report: &'v Value, name: &str) -> Vec<&'v str> {
    let rows = report["stores"][0][name].as_array().unwrap();
    rows.iter().map(|row| row["address"].as_str().or(row.as_str()).unwrap()).collect()
}

#[test]
fn gc_frees_leftovers_of_earlier_boot_and_keeps_live() {
    for (number, lab_) in Lab::each().iter().enumerate() {
        lab(lab_, &format!("198.18.{number}.0/24"));
        let (left, live) = (lab_.assign("net", "left"), lab_.assign("net", "live"));
        let now = assign_now(lab_, "now");
        // The address `live` is on an interface in an unnamed network namespace, which only the container's process
        // keeps alive.
        let container = Container::with(&live);
        let shown = gc(lab_, "--boot").answer();
        for text in [
            &*left,
            "of an earlier boot",
            "would free 1 address; do it with --apply",
            "1 in use",
            "1 whose network namespace is gone (margay gc --netns frees those)",
        ] {
            assert!(shown.contains(text), "{text:?}: {shown}");
        }
        assert!(!shown.contains(&format!("{live} ")), "{shown}");
        assert!(is_held(lab_, &left), "a dry run changes nothing");

        let report = gc(lab_, "--boot --apply -o json").json();
        assert_eq!(list(&report, "freed"), [left.as_str()]);
        assert_eq!(report["stores"][0]["left"]["live"], 1);
        assert!(!is_held(lab_, &left) && is_held(lab_, &live) && is_held(lab_, &now));
        drop(container);
        assert_eq!(list(&gc(lab_, "--boot --apply -o json").json(), "freed"), [live.as_str()]);
        assert!(gc(lab_, "--boot --apply").answer().contains("nothing to free"));
        assert!(is_held(lab_, &now));
    }
}

#[test]
fn gc_needs_two_scans_apart_when_namespace_is_missing() {
    for (number, lab_) in Lab::each().iter().enumerate() {
        lab(lab_, &format!("198.18.{}.0/24", 10 + number));
        let (idle, live) = (assign_now(lab_, "idle"), assign_now(lab_, "live"));
        let container = Container::with(&live);
        let first = gc(lab_, "--netns --apply").answer();
        assert!(first.contains("1 address seen unused now; run again after 60 s"), "{first}");
        assert_eq!(looks_file(lab_).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let again = gc(lab_, "--netns --apply -o json").json();
        assert_eq!((list(&again, "freed").len(), list(&again, "waiting")), (0, vec![idle.as_str()]));
        assert!(is_held(lab_, &idle));

        age_looks(lab_, 61);
        let shown = gc(lab_, "--netns").answer();
        assert!(shown.contains(&idle) && shown.contains("its namespace is gone") && is_held(lab_, &idle), "{shown}");
        assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "freed"), [idle.as_str()]);
        assert!(!is_held(lab_, &idle) && is_held(lab_, &live));

        // The process of the container `live` has ended, so this container has neither an interface nor a network
        // namespace. Earlier scans found the container's address in use, so the waiting time of `gc` begins at the next
        // scan.
        drop(container);
        assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "waiting"), [live.as_str()]);
        age_looks(lab_, 58);
        let waited = gc(lab_, "--netns --apply --wait -o json");
        assert!(waited.err.contains("looking again in"), "{}", waited.err);
        assert_eq!(list(&waited.json(), "freed"), [live.as_str()]);
    }
}

/// With KubeVirt's bridge binding, macvtap, SR-IOV, DPDK and memif, the container's interface loses its address or
/// never has one.
#[test]
fn gc_keeps_flushed_address_until_namespace_is_gone() {
    for (number, lab_) in Lab::each().iter().enumerate() {
        lab(lab_, &format!("198.18.{}.0/24", 60 + number));
        let container = Container::empty();
        let address = assign_in(lab_, "flushed", Some(&container.netns()));
        for _ in 0..2 {
            let report = gc(lab_, "--netns --apply -o json").json();
            assert_eq!((list(&report, "waiting").len(), list(&report, "freed").len()), (0, 0), "{report}");
            assert_eq!(report["stores"][0]["left"]["live"], 1, "{report}");
            age_looks(lab_, 120);
        }
        drop(container);
        // The kernel gives the lowest free inode number to the next network namespace, which may be another test's
        // namespace. Such a namespace of another test can get the removed namespace's inode number, and the address
        // then counts as live; the test therefore repeats the scans until the address counts as unused.
        let look = || {
            let until = Instant::now() + LONGEST_TEST;
            loop {
                let report = gc(lab_, "--netns --apply -o json").json();
                if report["stores"][0]["left"]["live"] != 1 {
                    return report;
                }
                assert!(Instant::now() < until, "{address} counts as live");
                thread::sleep(Duration::from_millis(100));
            }
        };
        assert_eq!(list(&look(), "waiting"), [address.as_str()]);
        assert!(is_held(lab_, &address), "one look is not enough");
        let second = (0..10).map(|_| {
            age_looks(lab_, 61);
            look()
        });
        let freed = second.into_iter().find(|report| list(report, "waiting").is_empty());
        assert_eq!(list(&freed.unwrap(), "freed"), [address.as_str()]);
    }
}

/// The address was assigned by a version of Margay that did not record network namespaces.
#[test]
fn gc_judges_by_boot_when_namespace_is_not_recorded() {
    let labs = Lab::each();
    let lab_ = &labs[1];
    lab(lab_, "198.18.62.0/24");
    let (now, damaged) = (assign_in(lab_, "now", None), assign_in(lab_, "damaged", Some("x/y")));
    let earlier = lab_.assign("net", "earlier");
    for _ in 0..2 {
        let report = gc(lab_, "--netns -o json").json();
        assert_eq!(report["stores"][0]["left"]["of_this_boot"], 2, "{report}");
        age_looks(lab_, 120);
    }
    assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "freed"), [earlier.as_str()]);
    assert!(is_held(lab_, &now) && is_held(lab_, &damaged) && !is_held(lab_, &earlier));
}

#[test]
fn gc_begins_anew_when_address_is_live_at_any_scan() {
    let labs = Lab::each();
    let lab_ = &labs[1];
    lab(lab_, "198.18.20.0/24");
    let address = assign_now(lab_, "c1");
    gc(lab_, "--netns").answer();
    age_looks(lab_, 120);
    let container = Container::with(&address);
    assert!(gc(lab_, "--netns --apply").answer().contains("nothing to free"));
    drop(container);
    assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "waiting"), [address.as_str()]);
    // Between two scans of `gc`, the address of container `c1` is released and assigned again. The new assignment has
    // the address and the handle of the old assignment, but `gc` must not take it for the old one.
    age_looks(lab_, 120);
    lab_.margay("ipam release --container c1").answer();
    lab_.with_ipam(async |ipam| {
        let attachment = Attachment {
            network: "net".into(),
            container: "c1".into(),
            interface: "eth0".into(),
            node: "node1".into(),
            boot: host::short_boot(&host::boot_id().unwrap()),
        };
        let mut request = AssignRequest::new(attachment, RequestedAddresses::these([address.parse().unwrap()]));
        request.attributes.insert("margay.io/netns".into(), GONE.into());
        ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap();
    });
    assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "waiting"), [address.as_str()]);
    assert!(is_held(lab_, &address));
}

#[test]
fn gc_ignores_scans_that_are_not_surely_its_own() {
    let labs = Lab::each();
    let lab_ = &labs[1];
    lab(lab_, "198.18.30.0/24");
    let address = assign_now(lab_, "c1");
    gc(lab_, "--netns").answer();
    age_looks(lab_, 120);
    let file = looks_file(lab_);
    let good = std::fs::read_to_string(&file).unwrap();
    let boot = host::boot_id().unwrap();
    let bad = |name: &str| {
        let report = gc(lab_, "--netns --apply -o json").json();
        assert_eq!(list(&report, "waiting"), [address.as_str()], "{name}");
        assert!(is_held(lab_, &address), "{name}");
    };
    for (name, text) in [
        ("damaged", good.replace(['{', '['], "")),
        ("cut off", good[..good.len() / 2].to_owned()),
        ("of another boot", good.replace(&boot, "00000000-0000-0000-0000-000000000000")),
        ("of another store", good.replace("redb:", "sled:")),
        ("of another form", good.replace("\"format\":1", "\"format\":2")),
    ] {
        assert_ne!(text, good, "{name}");
        std::fs::write(&file, text).unwrap();
        bad(name);
    }
    std::fs::write(&file, &good).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    bad("that others can read");
    std::fs::remove_file(&file).unwrap();
    let elsewhere = lab_.folder().join("elsewhere");
    std::fs::write(&elsewhere, &good).unwrap();
    std::fs::set_permissions(&elsewhere, std::fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&elsewhere, &file).unwrap();
    bad("behind a link");
    // `gc` uses the file with scan findings again once the path is a regular file.
    std::fs::write(&file, &good).unwrap();
    assert_eq!(list(&gc(lab_, "--netns --apply -o json").json(), "freed"), [address.as_str()]);
}

#[test]
fn gc_has_nothing_to_free_when_store_is_missing() {
    for lab_ in Lab::each() {
        let done = gc(&lab_, "--boot --netns --apply").answer();
        assert!(done.contains("there is no store at"), "{done}");
        assert!(!lab_.exists());
    }
}

#[test]
fn gc_goes_through_all_stores_of_configuration() {
    let labs = Lab::each();
    let conf = labs[0].folder().join("net.d");
    std::fs::create_dir(&conf).unwrap();
    let mut left = Vec::new();
    for (number, lab_) in labs.iter().enumerate() {
        lab(lab_, &format!("198.18.{}.0/24", 40 + number));
        left.push(lab_.assign("net", "left"));
        let (kind, path) = (["sled", "redb"][number], lab_.location.path().unwrap().display());
        let text = format!(
            r#"{{"name":"n{number}","type":"bridge","datastore_type":"{kind}","datastore_path":"{path}","ipam":{{"type":"margay-ipam"}}}}"#
        );
        std::fs::write(conf.join(format!("{number}.conf")), text).unwrap();
    }
    let none = labs[0].folder().join("none");
    let text = format!(
        r#"{{"name":"x","type":"bridge","datastore_type":"redb","datastore_path":"{}","ipam":{{"type":"margay-ipam"}}}}"#,
        none.display()
    );
    std::fs::write(conf.join("9.conf"), text).unwrap();
    let args = format!("gc --boot --apply --all-stores -o json --cni-conf-dir {}", conf.display());
    let report = margay(args.split(' ')).json();
    let stores = report["stores"].as_array().unwrap();
    assert_eq!(stores.len(), 3);
    for (store, left) in stores.iter().zip(&left) {
        assert_eq!(store["freed"][0], left.as_str());
    }
    assert_eq!((&stores[2]["missing"], none.exists()), (&Value::Bool(true), false));
    // `gc` reports a damaged store, and still scans the other stores.
    labs[1].assign("net", "again");
    let damaged = labs[0].location.path().unwrap().join("store.id");
    std::fs::write(damaged, "damaged").unwrap();
    let done = margay(args.split(' '));
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.err.contains("not every store"), "{}", done.err);
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        (&report["stores"][0]["failed"], report["stores"][1]["freed"].as_array().unwrap().len()),
        (&true.into(), 1)
    );
}

/// The machine runs Margay's systemd units but has no network that uses Margay.
#[test]
fn gc_prints_one_line_when_machine_has_no_network() {
    // The machine that runs the tests may have a store at the default path.
    let _machine = Machine::new();
    let folder = tempfile::tempdir().unwrap();
    let run = |kind: &str| {
        let args = ["gc", "--boot", "--apply", kind, "--cni-conf-dir", folder.path().to_str().unwrap()];
        margay(args.map(str::to_owned)).answer()
    };
    for (file, text) in [
        ("0.conf", r#"{"name":"x","type":"bridge","ipam":{"type":"host-local"}}"#),
        (
            "10-calico.conflist",
            r#"{"name":"k8s-pod-network","plugins":[{"type":"calico","datastore_type":"kubernetes","nodename":"n",
            "ipam":{"type":"calico-ipam"},"kubernetes":{"kubeconfig":"/etc/cni/net.d/calico-kubeconfig"}}]}"#,
        ),
    ] {
        for kind in ["--all-stores", "--local-stores"] {
            let said = run(kind);
            assert!(said.contains("takes its addresses from Margay; nothing to free"), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        std::fs::write(folder.path().join(file), text).unwrap();
    }
}

/// When a machine starts, the network is not available yet, and the systemd unit must not wait for the network.
#[test]
fn gc_at_boot_leaves_cluster_stores_to_timer() {
    let labs = Lab::each();
    lab(&labs[1], "198.18.46.0/24");
    let left = labs[1].assign("net", "left");
    let conf = labs[1].folder().join("net.d");
    std::fs::create_dir(&conf).unwrap();
    let network = |name: &str, store: &str| {
        let text = format!(r#"{{"name":"{name}","type":"bridge",{store},"ipam":{{"type":"margay-ipam"}}}}"#);
        std::fs::write(conf.join(format!("{name}.conf")), text).unwrap();
    };
    // Packets to 192.0.2.1 are dropped, so a connection attempt to this etcd would get no reply.
    network("a", r#""datastore_type":"etcdv3","etcd_endpoints":"http://192.0.2.1:2379""#);
    let args = format!("gc --boot --apply --local-stores --cni-conf-dir {}", conf.display());
    let begun = Instant::now();
    let said = margay(args.split(' ')).answer();
    assert_eq!(said.trim(), "all stores are clusters'; margay-gc.timer goes through them");
    let path = labs[1].location.path().unwrap().display();
    network("b", &format!(r#""datastore_type":"redb","datastore_path":"{path}""#));
    let report = margay(format!("{args} -o json").split(' ')).json();
    assert_eq!(list(&report, "freed"), [left.as_str()], "{report}");
    assert!(begun.elapsed() < patient(Duration::from_secs(5)), "{:?}", begun.elapsed());
}

#[test]
fn gc_frees_nothing_when_scan_is_incomplete() {
    let labs = Lab::each();
    let lab_ = &labs[1];
    lab(lab_, "198.18.50.0/24");
    let left = lab_.assign("net", "left");
    for wrapper in [
        &["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"][..],
        &["unshare", "--user", "--map-root-user"],
    ] {
        let done = wrapped(lab_, wrapper, "--boot --apply");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0), "{said}");
        assert!(said.contains("nothing was freed") && said.contains("hint: run margay gc as root"), "{said}");
        assert!(is_held(lab_, &left));
    }
}

/// Runs `margay gc` through a wrapper program, such as `unshare`, that gets the command as its arguments.
fn wrapped(lab: &Lab, wrapper: &[&str], args: &str) -> Output {
    Command::new(wrapper[0])
        .args(&wrapper[1..])
        .arg(env!("CARGO_BIN_EXE_margay"))
        .args(["--store", &lab.location.to_string(), "gc", "--looks", &looks(lab).display().to_string()])
        .args(args.split(' '))
        .output()
        .unwrap()
}

#[test]
fn gc_evidence_has_to_be_named() {
    assert!(margay(["gc"]).failure().contains("--boot"));
    assert!(margay(["gc", "--boot", "--wait"]).failure().contains("--netns"));
    assert!(margay(["gc", "--boot", "--all-stores", "--store", "sled:///a"]).failure().contains("--all-stores"));
}
