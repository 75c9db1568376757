//! Tests the replay itself: it must accept the recorded outcome of a call and report any other.

use std::fs;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::{Value, json};

use crate::call::{Call, Came};
use crate::edits::expected;
use crate::exceptions::{EACH, EXCEPTIONS, Exception, ON_ETCD_ONLY, Steps};
use crate::matching::{Bindings, differences};
use crate::place::{Forwarding, Place, shell};
use crate::record::{case, is_call, record};
use crate::replay::{Stage, play};
use crate::stand_in::as_recorded;
use crate::{Kind, Mode, SLOW, Test, said};

/// Recorded cases whose plugin calls the stand-in plugin can carry out.
const STOOD_IN_FOR: [&str; 19] = [
    "cni-version-0.1.0",
    "cni-version-0.3.1",
    "cni-version-1.0.0",
    "dual-stack",
    "host-interface-exists",
    "host-local-ranges-routes",
    "host-local-subnet",
    "host-local-two-ipv4",
    "ip-forwarding",
    "ip-forwarding-off-again",
    "ipv6-disabled-in-netns",
    "ipv6-disabled-on-host",
    "ipv6-only",
    "many-in-order",
    "plain",
    "pod",
    "pod-dual-stack",
    "pod-without-policy",
    "queues",
];

/// Returns all tests of this module, each with its name.
pub(crate) fn all() -> impl Iterator<Item = (String, Test)> {
    let stood_in_for = STOOD_IN_FOR.iter().map(|name| {
        let test: Test = Box::new(|| play(case(name).unwrap(), Kind::Etcd, Mode::Child, &as_recorded));
        (format!("harness/stand_in/{name}"), test)
    });
    let others: [(&str, fn()); 8] = [
        ("stores", each_store_is_read),
        ("setups", each_case_begins_as_recorded),
        ("exceptions", exceptions_are_of_the_recording),
        ("needless", a_needless_exception_is_told),
        ("differences", each_difference_is_told),
        ("placeholders", placeholders_stand_for_what_they_say),
        ("patience", a_call_that_takes_too_long_is_killed_with_all_it_started),
        ("traces", a_case_leaves_nothing),
    ];
    let others = others.map(|(name, check)| {
        let check = move || std::panic::catch_unwind(AssertUnwindSafe(check)).map_err(|panic| said(&*panic));
        let test: Test = Box::new(check);
        (format!("harness/{name}"), test)
    });
    stood_in_for.chain(others)
}

fn each_store_is_read() {
    for (kind, mode) in [(Kind::Sled, Mode::InProcess), (Kind::Redb, Mode::Child), (Kind::Etcd, Mode::InProcess)] {
        for name in ["plain", "pod"] {
            play(case(name).unwrap(), kind, mode, &as_recorded).unwrap();
        }
    }
}

/// Tests the setup of each recorded case without a plugin call: the case's documents, files, API objects and network
/// namespaces exist, and nothing else.
fn each_case_begins_as_recorded() {
    let etcd = crate::books::Lent::take();
    for one in &record().cases {
        let root = tempfile::tempdir().unwrap();
        let scan = || {
            let stage = Stage::set(one, Kind::Etcd, Mode::Child, root.path(), Some(&etcd));
            let stored = stage.books.all();
            assert_eq!(stored, one.documents(), "{}", one.name);
            for (path, text) in &one.setup.files {
                assert_eq!(&fs::read_to_string(stage.place.text(path)).unwrap(), text);
            }
            let nodename = fs::read_to_string(stage.place.text("<files>/nodename")).ok();
            assert_eq!(nodename, one.setup.nodename_file, "{}", one.name);
            stored.keys().for_each(|key| stage.books.delete(key));
        };
        std::thread::scope(|scope| scope.spawn(scan).join()).unwrap();
    }
}

/// Tests that each entry of `EXCEPTIONS` names existing steps of the recording and changes their expected outcome.
fn exceptions_are_of_the_recording() {
    for name in ON_ETCD_ONLY.iter().map(|(name, _)| name).chain(&SLOW) {
        assert!(case(name).is_some(), "there is no case {name}");
    }
    for exception in EXCEPTIONS.iter().filter(|exception| exception.case != EACH) {
        assert!(exception.reason.len() > 10, "{exception} has no reason");
        let steps = &case(exception.case).unwrap_or_else(|| panic!("{exception}: the case does not exist")).steps;
        let (first, last) = match exception.steps {
            Steps::All => (1, steps.len()),
            Steps::One(step) => (step, step),
            Steps::From(first) => (first, steps.len()),
        };
        assert!(first <= last && last <= steps.len(), "{exception}: the step does not exist");
        let changes = |number: usize| {
            let step = &steps[number - 1];
            let state = json!({"etcd": {}, "host": {}, "host_local_files": {}, "netns": {}});
            let before = [&state, step].into_iter().find(|state| is_call(step) && state.get("host").is_some());
            let expect = |exceptions: &[&Exception]| {
                expected(step, exception.case, before.unwrap_or(&state), exceptions, Mode::Child, (Kind::Etcd, ""))
            };
            // Entries of `EXCEPTIONS` apply in order; an entry may change an outcome that an earlier entry has changed.
            let above: Vec<&Exception> = EXCEPTIONS
                .iter()
                .take_while(|other| !std::ptr::eq(*other, exception))
                .filter(|other| other.is_for(exception.case, number, Kind::Etcd))
                .collect();
            let with: Vec<&Exception> = above.iter().copied().chain([exception]).collect();
            !is_call(step) || expect(&with).unwrap() != expect(&above).unwrap()
        };
        assert!((first..=last).any(changes), "{exception} changes nothing");
    }
}

/// Falsifies one result of the stand-in plugin, and returns the differences that the replay reports.
fn reported(lie: impl Fn(&mut Stage, &mut Came, &Value) + Sync + 'static) -> String {
    let plugin = move |stage: &mut Stage, call: &Call, step: &Value| {
        let mut came = as_recorded(stage, call, step);
        if step["do"] == "ADD" {
            lie(stage, &mut came, step);
        }
        came
    };
    play(case("dual-stack").unwrap(), Kind::Etcd, Mode::Child, &plugin).unwrap_err()
}

fn each_difference_is_told() {
    let setting =
        |path: &'static str| reported(move |_, _, _| fs::write(format!("/proc/sys/net/{path}"), "0").unwrap());
    let line = |line: &'static str| reported(move |_, _, _| shell(line));
    let key = "/calico/resources/v3/projectcalico.org/workloadendpoints/default/node1-cni-c1-eth0";
    let endpoint = |lie: fn(&mut Value)| {
        reported(move |stage, _, _| {
            let mut endpoint = stage.books.all().remove(key).unwrap();
            lie(&mut endpoint);
            stage.books.put_all(&[(key.to_owned(), endpoint)].into());
        })
    };
    let tellings = [
        (reported(|_, came, _| came.outcome["exit"] = 1.into()), "exit\n    - 0\n    + 1"),
        (
            reported(|_, came, _| came.outcome["stdout"]["ips"][0]["interface"] = 0.into()),
            "stdout > ips > 0 > interface",
        ),
        (reported(|_, came, _| came.stdin.clear()), "ipam_calls > 0 > stdin"),
        (setting("ipv4/conf/calic1/proxy_arp"), "host > interfaces > calic1 > sysctls > ipv4/conf/<if>/proxy_arp"),
        (setting("ipv6/conf/calic1/forwarding"), "host > interfaces > calic1 > sysctls > ipv6/conf/<if>/forwarding"),
        (line("ip route del 10.65.166.128"), "host > interfaces > calic1 > routes"),
        (line("ip link set calic1 mtu 1400"), "host > interfaces > calic1 > link > mtu"),
        (line("ip neigh add proxy 10.1.2.3 dev calic1"), "host > interfaces > calic1 > neighbours"),
        (line("ip link add more0 type veth peer name more1"), "host > links > 1\n    - nothing\n    + \"more0\""),
        (line("ip -n a addr add 10.1.2.3/32 dev eth0"), "netns > a > interfaces > eth0 > addresses"),
        (line("ip -n a link set eth0 address 02:00:00:00:00:01"), "netns > a > interfaces > eth0 > link > address"),
        (line("ip -n a -6 route add fd99::/64 dev eth0"), "netns > a > routes"),
        (line("ip netns add more"), "netns > more"),
        (line("mkdir -p /var/lib/cni/networks/n; echo >/var/lib/cni/networks/n/10.1.2.3"), "host_local_files > "),
        (endpoint(|it| it["spec"]["node"] = "node2".into()), "spec > node\n    - \"node1\"\n    + \"node2\""),
        (endpoint(|it| it["metadata"]["uid"] = "1".into()), "metadata > uid"),
        (endpoint(|it| it["spec"]["mac"] = "02:00:00:00:00:01".into()), "stdout > interfaces > 1 > mac"),
        (
            reported(|stage, _, _| stage.books.delete("/calico/resources/v3/projectcalico.org/ippools/six")),
            "etcd > deleted",
        ),
    ];
    for (report, expected) in tellings {
        assert!(report.contains("dual-stack, step 1 of 2, \"ADD\""), "{report}");
        assert!(report.contains(expected), "{expected} is not told in:\n{report}");
    }
}

/// Tests that the replay reports an entry of `EXCEPTIONS` as unnecessary if the plugin still has the recorded outcome.
fn a_needless_exception_is_told() {
    for name in ["ipam-fails", "cluster-information-without-flag"] {
        let report = play(case(name).unwrap(), Kind::Etcd, Mode::Child, &as_recorded).unwrap_err();
        assert!(report.contains("without the exception for") || report.contains("is not needed"), "{report}");
    }
}

fn placeholders_stand_for_what_they_say() {
    let is =
        |pattern: &str, text: &str| differences(&json!(pattern), &json!(text), &mut Bindings::default()).is_empty();
    let all = [
        ("<mac:1>", "aa:bb:cc:00:11:22", "aa:bb:cc:00:11"),
        ("<uid:1>", "00000000-0000-4000-8000-000000000001", "00000000-0000-1000-8000-000000000001"),
        ("<time>", "2026-11-24T03:00:00Z", "2026-11-24 03:00:00"),
        ("<link-local>/64", "fe80::a8bb:ccff:fe00:1122/64", "fe80::1/64"),
        ("Ifindex: <ifindex>, Dst", "Ifindex: 12, Dst", "Ifindex: , Dst"),
        ("error: <nil>", "error: <nil>", "error: nil"),
        ("panicked\n<stack>", "panicked\nat 1\nat 2", "panic"),
        ("failed: invalid character 'x' after", "failed: it is no JSON", "it failed: invalid character 'x' after"),
        ("\"mac\": \"<mac:1>\",", "\"mac\": \"aa:bb:cc:00:11:22\",", "\"mac\": \"aa:bb:cc:00:11:22\""),
    ];
    for (pattern, text, other) in all {
        assert!(is(pattern, text), "{pattern} {text}");
        assert!(!is(pattern, other), "{pattern} {other}");
    }
    // Within a case, each placeholder stands for one string, and different placeholders stand for different strings.
    let (one, two) = ("02:00:00:00:00:01", "02:00:00:00:00:02");
    let pair = |first: &str, second: &str| json!([first, second]);
    let differ = |pattern: Value, came: Value| differences(&pattern, &came, &mut Bindings::default()).len();
    assert_eq!(differ(pair("<mac:1>", "<mac:1>"), pair(one, one)), 0);
    assert_eq!(differ(pair("<mac:1>", "<mac:1>"), pair(one, two)), 1);
    assert_eq!(differ(pair("<mac:1>", "<mac:2>"), pair(one, two)), 0);
    assert_eq!(differ(pair("<mac:1>", "<mac:2>"), pair(one, one)), 1);
}

fn a_call_that_takes_too_long_is_killed_with_all_it_started() {
    let root = tempfile::tempdir().unwrap();
    let (plugin, still) = (root.path().join("bin/calico"), root.path().join("still"));
    fs::create_dir(root.path().join("bin")).unwrap();
    fs::write(&plugin, format!("#!/bin/sh\n(sleep 2; echo >{}) &\necho begun; sleep 60\n", still.display())).unwrap();
    fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let call = Call::of(&json!({"env": {}, "stdin": {}}), root.path());
    let begun = Instant::now();
    let came = call.run(Duration::from_secs(1));
    assert_eq!(came.outcome, json!({"exit": "killed after 1 s", "stdout_text": "begun\n"}));
    assert!(begun.elapsed() < patient(Duration::from_secs(10)));
    std::thread::sleep(Duration::from_secs(3));
    assert!(!still.exists(), "what the call had started went on");
}

/// Tests that replaying a case leaves the mounts and the host name unchanged, and leaves no folder behind.
fn a_case_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().to_owned();
    let name = nix::unistd::gethostname().unwrap();
    let inside = || {
        Place::enter(&path, Mode::Child, Forwarding::On);
        Place::add_netns("a");
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        assert!(mounts.contains(path.to_str().unwrap()) && nix::unistd::gethostname().unwrap() != name);
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
    assert_eq!(nix::unistd::gethostname().unwrap(), name);
    root.close().unwrap();
}
