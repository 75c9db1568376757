//! Tests of the main plugin beyond the recording: killed calls, concurrent calls, CHECK, GC and STATUS, and a store
//! that does not answer.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::{Value, json};

use crate::books::Lent;
use crate::call::Came;
use crate::place::{NETNS, Place, shell};
use crate::record::case;
use crate::replay::Stage;
use crate::{Kind, Mode, NamedTest, Test};

/// Number of test rounds with killed calls on each store; `MARGAY_CRASH_ROUNDS` overrides this number.
const KILLS: u64 = 100;
/// Number of ADDs that run at the same time.
const CALLERS: usize = 16;
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The store key of the WorkloadEndpoint of container `c1`.
const ENDPOINT: &str = "/calico/resources/v3/projectcalico.org/workloadendpoints/default/node1-cni-c1-eth0";

/// Returns all tests of this module, each with its name.
pub(crate) fn all() -> impl Iterator<Item = (String, Test)> {
    let on = |kind: Kind, mode: Mode, (name, test): NamedTest| -> (String, Test) {
        let name = format!("own/{}/{name}", kind.name());
        (name, Box::new(move || set_and_run("plain", kind, mode, test)))
    };
    [
        on(Kind::Etcd, Mode::InProcess, named!(kills_leave_nothing_after_del)),
        on(Kind::Redb, Mode::InProcess, named!(kills_leave_nothing_after_del)),
        on(Kind::Etcd, Mode::InProcess, named!(containers_at_once_get_one_address_each)),
        on(Kind::Redb, Mode::InProcess, named!(containers_at_once_get_one_address_each)),
        on(Kind::Redb, Mode::Child, named!(ipam_in_child_gets_store)),
        on(Kind::Etcd, Mode::InProcess, named!(check_names_what_differs)),
        on(Kind::Sled, Mode::InProcess, named!(check_names_what_differs)),
        on(Kind::Etcd, Mode::InProcess, named!(gc_removes_what_is_not_listed)),
        on(Kind::Redb, Mode::InProcess, named!(gc_removes_what_is_not_listed)),
        on(Kind::Etcd, Mode::InProcess, named!(status)),
        on(Kind::Sled, Mode::InProcess, named!(status)),
        on(Kind::Redb, Mode::InProcess, named!(containers_reach_each_other)),
        on(Kind::Redb, Mode::InProcess, named!(prefix_is_routed_to_its_container)),
        on(Kind::Sled, Mode::Child, named!(prefix_is_routed_to_its_container)),
        on(Kind::Redb, Mode::InProcess, named!(prefix_never_goes_to_another_program)),
        on(Kind::Redb, Mode::InProcess, named!(nat_outgoing)),
        on(Kind::Sled, Mode::Child, named!(nat_outgoing)),
        on(Kind::Etcd, Mode::InProcess, named!(nat_outgoing_is_left_to_felix)),
        on(Kind::Redb, Mode::InProcess, named!(nat_outgoing_is_left_to_felix_on_its_node)),
        on(Kind::Redb, Mode::InProcess, named!(nat_outgoing_works_with_nodename_file)),
    ]
    .into_iter()
}

/// Runs a test on a machine with the setup of a recorded case.
pub(crate) fn set_and_run(name: &str, kind: Kind, mode: Mode, test: fn(&mut Stage)) -> Result<(), String> {
    let root = tempfile::tempdir().unwrap();
    let etcd = (kind == Kind::Etcd).then(Lent::take);
    let running = || {
        let mut stage = Stage::set(case(name).unwrap(), kind, mode, root.path(), etcd.as_ref());
        test(&mut stage);
    };
    // Use a separate thread, since a thread that has entered the case's namespaces cannot leave them again.
    let ran = thread::scope(|scope| scope.spawn(running).join());
    ran.map_err(|panic| crate::said(&*panic))
}

/// Returns a plugin call on the network `net1` with CNI version 1.1.0, and with additional fields in the network
/// configuration.
pub(crate) fn call(stage: &Stage, verb: &str, container: &str, netns: &str, more: &Value) -> crate::call::Call {
    let mut stdin = json!({
        "cniVersion": "1.1.0", "name": "net1", "type": "calico", "datastore_type": "etcdv3",
        "etcd_endpoints": "http://<etcd>", "nodename_file": "<files>/nodename", "ipam": {"type": "calico-ipam"},
    });
    stdin.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    stage.call(&json!({
        "env": {
            "CNI_COMMAND": verb, "CNI_CONTAINERID": container, "CNI_NETNS": format!("{NETNS}/{netns}"),
            "CNI_IFNAME": "eth0", "CNI_PATH": "<bin>",
        },
        "stdin": stdin,
    }))
}

fn run(stage: &Stage, verb: &str, container: &str, netns: &str) -> Came {
    call(stage, verb, container, netns, &json!({})).run(patient(TEST_TIMEOUT))
}

#[track_caller]
pub(crate) fn succeed(came: &Came) -> &Value {
    assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    &came.outcome["stdout"]
}

/// Checks that nothing remains of deleted containers, except the profile of their network.
#[track_caller]
pub(crate) fn nothing_left(stage: &Stage, what: &str) {
    let scan = stage.scan();
    let documents = scan["etcd"]["documents"].as_object().unwrap();
    let left: Vec<_> = documents.keys().filter(|key| !key.ends_with("/profiles/net1")).collect();
    assert!(left.is_empty(), "{what}: {left:?}");
    assert_eq!(scan["etcd"]["ipam"], json!({"addresses": {}, "handles": {}}), "{what}");
    assert_eq!(scan["host"]["links"], json!([]), "{what}");
    for (name, container) in scan["netns"].as_object().unwrap() {
        assert_eq!(container["interfaces"], json!({}), "{what}: {name}");
        assert_eq!(container["routes"], json!([]), "{what}: {name}");
    }
}

/// Kills ADDs (and in every second round also DELs) at random moments; after the next DEL, nothing of the container may
/// remain.
fn kills_leave_nothing_after_del(stage: &mut Stage) {
    let time = |verb: &str| {
        let begun = Instant::now();
        succeed(&run(stage, verb, "warm", "a"));
        begun.elapsed()
    };
    let (mut add, mut del) = (time("ADD"), time("DEL"));
    let rounds = std::env::var("MARGAY_CRASH_ROUNDS").map_or(KILLS, |rounds| rounds.parse().unwrap());
    let mut cut_short = 0;
    for round in 0..rounds {
        let id = format!("k{round}");
        // The speed of the machine varies, so the test updates its estimate of a call's duration after each call.
        let kill = |verb: &str, whole: &mut Duration| {
            let came = call(stage, verb, &id, "a", &json!({})).run(whole.mul_f64(fastrand::f64()));
            let was_killed = came.outcome["exit"] != 0;
            *whole = whole.mul_f64(if was_killed { 1.05 } else { 0.9 });
            was_killed
        };
        cut_short += u64::from(kill("ADD", &mut add));
        if round % 2 == 1 {
            kill("DEL", &mut del);
        }
        let ended = run(stage, "DEL", &id, "a");
        assert_eq!(ended.outcome["exit"], 0, "round {round}: {} {}", ended.outcome, ended.stderr);
        nothing_left(stage, &format!("round {round}"));
    }
    assert!(cut_short * 4 > rounds, "of {rounds} ADDs only {cut_short} were cut short");
}

/// Tests that concurrent ADDs get different addresses, and that concurrent DELs release all of them.
fn containers_at_once_get_one_address_each(stage: &mut Stage) {
    let names: Vec<String> = (0..CALLERS).map(|caller| format!("m{caller}")).collect();
    names.iter().for_each(|name| Place::add_netns(name));
    let all = |verb: &str| -> Vec<Came> {
        let calls: Vec<_> = names.iter().map(|name| call(stage, verb, name, name, &json!({}))).collect();
        thread::scope(|scope| {
            let running: Vec<_> =
                calls.iter().map(|call| scope.spawn(move || call.run(patient(TEST_TIMEOUT)))).collect();
            running.into_iter().map(|call| call.join().unwrap()).collect()
        })
    };
    let added = all("ADD");
    let addresses: BTreeSet<String> =
        added.iter().map(|came| succeed(came)["ips"][0]["address"].as_str().unwrap().to_owned()).collect();
    assert_eq!(addresses.len(), CALLERS);
    let scan = stage.scan();
    assert_eq!(scan["host"]["links"].as_array().unwrap().len(), CALLERS);
    assert_eq!(scan["etcd"]["ipam"]["addresses"].as_object().unwrap().len(), CALLERS);
    all("DEL").iter().for_each(|came| assert_eq!(came.outcome["exit"], 0, "{}", came.stderr));
    nothing_left(stage, "after all DELs");
}

/// Tests that an IPAM plugin in another process can open the embedded store while the main plugin is running.
fn ipam_in_child_gets_store(stage: &mut Stage) {
    let begun = Instant::now();
    succeed(&run(stage, "ADD", "c1", "a"));
    assert!(stage.scan()["etcd"]["documents"][ENDPOINT].is_object());
    assert_eq!(run(stage, "DEL", "c1", "a").outcome["exit"], 0);
    assert!(begun.elapsed() < patient(Duration::from_secs(10)), "one of the two has waited for the other");
    nothing_left(stage, "after DEL");
}

fn check_names_what_differs(stage: &mut Stage) {
    let result = succeed(&run(stage, "ADD", "c1", "a")).clone();
    let check =
        |stage: &Stage| call(stage, "CHECK", "c1", "a", &json!({"prevResult": result})).run(patient(TEST_TIMEOUT));
    let fine = check(stage);
    assert_eq!((&fine.outcome["exit"], &fine.outcome["stdout_text"]), (&json!(0), &json!("OK\n")), "{}", fine.stderr);
    let breaks = [
        ("echo 0 >/proc/sys/net/ipv4/conf/calic1/proxy_arp", "net.ipv4.conf.calic1.proxy_arp on the host is 0"),
        ("ip link set calic1 down", "calic1 on the host is down"),
        ("ip -n a route del default", "the route to 0.0.0.0/0 by eth0 is missing in the container"),
        ("ip -n a addr flush dev eth0", "is missing on eth0 in the container"),
    ];
    for (line, expected) in breaks {
        shell(line);
        let details = failed(&check(stage));
        assert!(details.contains(expected), "{expected} is not in {details}");
    }
    stage.books.delete(ENDPOINT);
    let details = failed(&check(stage));
    assert!(details.contains("no endpoint is stored for node1-cni-c1-"), "{details}");
    assert_eq!(run(stage, "DEL", "c1", "a").outcome["exit"], 0);
    let details = failed(&check(stage));
    assert!(details.contains("IPAM: "), "{details}");
}

#[track_caller]
fn failed(came: &Came) -> String {
    assert_eq!(came.outcome["exit"], 1, "{}", came.outcome);
    came.outcome["stdout"]["details"].as_str().unwrap().to_owned()
}

/// Tests that GC removes endpoint, interface and address of attachments that are not in the runtime's list, but keeps
/// recent attachments.
fn gc_removes_what_is_not_listed(stage: &mut Stage) {
    Place::add_netns("b");
    succeed(&run(stage, "ADD", "c1", "a"));
    succeed(&run(stage, "ADD", "c2", "b"));
    let gc = |stage: &Stage, valid: &[&str]| {
        let valid: Vec<Value> = valid.iter().map(|id| json!({"containerID": id, "ifname": "eth0"})).collect();
        let came = call(stage, "GC", "", "", &json!({"cni.dev/valid-attachments": valid})).run(patient(TEST_TIMEOUT));
        assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    };
    gc(stage, &[]);
    assert_eq!(stage.scan()["host"]["links"], json!(["calic1", "calic2"]), "both are younger than a minute");
    stage.age_all(Duration::from_secs(3600));
    gc(stage, &["c2"]);
    let scan = stage.scan();
    assert_eq!(scan["host"]["links"], json!(["calic2"]));
    assert_eq!(scan["etcd"]["documents"].get(ENDPOINT), None);
    assert_eq!(scan["etcd"]["ipam"]["addresses"].as_object().unwrap().len(), 1);
    assert_eq!(scan["netns"]["a"]["interfaces"], json!({}));
    gc(stage, &[]);
    nothing_left(stage, "after GC with an empty list");
}

fn status(stage: &mut Stage) {
    let came = call(stage, "STATUS", "", "", &json!({})).run(patient(TEST_TIMEOUT));
    assert_eq!((&came.outcome["exit"], &came.outcome["stdout_text"]), (&json!(0), &json!("")), "{}", came.stderr);
    let says_so = came.stderr.contains("Felix cannot use a single-node store, so network policies have no effect");
    assert_eq!(says_so, !stage.is_on_etcd(), "{}", came.stderr);
    let no_pool = json!({"ipam": {"type": "calico-ipam", "ipv4_pools": ["nowhere"]}});
    let came = call(stage, "STATUS", "", "", &no_pool).run(patient(TEST_TIMEOUT));
    assert_eq!(came.outcome["stdout"]["code"], 50, "{} {}", came.outcome, came.stderr);
}

/// Tests that containers reach each other and the host, although the host has none of Calico's agents and no default
/// route.
fn containers_reach_each_other(stage: &mut Stage) {
    Place::add_netns("b");
    shell("ip addr add 192.0.2.1/32 dev lo");
    succeed(&run(stage, "ADD", "c1", "a"));
    let address = succeed(&run(stage, "ADD", "c2", "b"))["ips"][0]["address"].as_str().unwrap().to_owned();
    let address = address.split('/').next().unwrap();
    for target in [address, "192.0.2.1"] {
        shell(&format!("ip netns exec a ping -c 1 -W 5 {target}"));
    }
}

/// Creates a pool of prefixes, and returns the `ipam` object of a network that uses this pool.
fn ipam_of_prefixes(stage: &Stage) -> Value {
    let pool = json!({
        "kind": "IPPool", "apiVersion": "projectcalico.org/v3",
        "metadata": {"name": "prefixes", "annotations": {"margay.io/prefix-length": "64"}},
        "spec": {"cidr": "2001:db8:7::/48", "assignmentMode": "Manual"},
    });
    let key = "/calico/resources/v3/projectcalico.org/ippools/prefixes";
    stage.books.put_all(&BTreeMap::from([(key.to_owned(), pool)]));
    json!({"type": "calico-ipam", "assign_ipv6": "true", "ipv6_pools": ["prefixes"]})
}

/// Tests that ADD fails if a network with an external data plane assigns prefixes, because the data plane would not
/// route the prefixes. ADD must fail before it calls the data plane, and no address may stay assigned.
fn prefix_never_goes_to_another_program(stage: &mut Stage) {
    let ipam = ipam_of_prefixes(stage);
    let options = json!({"type": "grpc", "socket": "unix:///nowhere"});
    let refused =
        call(stage, "ADD", "c1", "a", &json!({"ipam": ipam, "dataplane_options": options})).run(patient(TEST_TIMEOUT));
    let text = "the program of dataplane_options routes single addresses, and 2001:db8:7:";
    assert!(refused.outcome.to_string().contains(text), "{}", refused.outcome);
    assert_eq!(stage.scan()["etcd"]["ipam"], json!({"addresses": {}, "handles": {}}));
}

/// Tests that the host routes a whole prefix to its container, and that the container rejects packets to unused
/// addresses of the prefix.
fn prefix_is_routed_to_its_container(stage: &mut Stage) {
    let ipam = ipam_of_prefixes(stage);
    let added = call(stage, "ADD", "c1", "a", &json!({"ipam": ipam})).run(patient(TEST_TIMEOUT));
    let result = succeed(&added);
    let prefix = result["margay.io/prefixes"][0].as_str().unwrap().strip_suffix("::/64").unwrap();
    assert_eq!(result["ips"][1]["address"], format!("{prefix}::1/64"), "{result}");
    shell("ip -6 addr add 2001:db8:9::1/128 dev lo nodad");
    let ping = |host: &str| format!("ping -6 -c 1 -W 5 -I 2001:db8:9::1 {host}");
    // On a busy machine, neighbour discovery may take longer than one packet waits for it.
    let reach = |host: &str| shell(&format!("for _ in 1 2 3 4 5; do {} && exit; done; exit 1", ping(host)));
    reach(&format!("{prefix}::1"));
    shell(&format!("ip netns exec a ip -6 addr add {prefix}:ab::5/128 dev eth0 nodad"));
    reach(&format!("{prefix}:ab::5"));
    let refused = format!("{} | grep -q -i unreachable", ping(&format!("{prefix}:ab::6")));
    shell(&format!("! ping -6 -c 1 -W 1 -I 2001:db8:9::1 {prefix}:ab::6 >/dev/null; {refused}"));
    // Pass on only the result fields that CNI defines, as a runtime does.
    let mut known = result.clone();
    known.as_object_mut().unwrap().remove("margay.io/prefixes").unwrap();
    let again = json!({"ipam": ipam, "prevResult": known});
    succeed(&call(stage, "CHECK", "c1", "a", &again).run(patient(TEST_TIMEOUT)));
    shell(&format!("ip -6 route del {prefix}::/64"));
    let lost = call(stage, "CHECK", "c1", "a", &again).run(patient(TEST_TIMEOUT));
    let text = format!("the route to {prefix}::/64 by calic1 is missing on the host");
    assert!(lost.outcome.to_string().contains(&text), "{}", lost.outcome);
    assert_eq!(call(stage, "DEL", "c1", "a", &json!({"ipam": ipam})).run(patient(TEST_TIMEOUT)).outcome["exit"], 0);
    shell(&format!("! ip -6 route | grep {prefix}"));
    let scan = stage.scan();
    assert_eq!(scan["etcd"]["ipam"], json!({"addresses": {}, "handles": {}}));
    assert_eq!(scan["host"]["links"], json!([]));
}

/// Tests `natOutgoing`: containers reach a network that has no route to the containers, and still reach each other
/// without masquerading.
fn nat_outgoing(stage: &mut Stage) {
    make_world();
    shell("echo 0 >/proc/sys/net/ipv4/ip_forward");
    let add = |stage: &Stage, container: &str, netns: &str| {
        let address = succeed(&run(stage, "ADD", container, netns))["ips"][0]["address"].as_str().unwrap().to_owned();
        address.split('/').next().unwrap().to_owned()
    };
    let first = add(stage, "c1", "a");
    shell("! ip netns exec a ping -c 1 -W 1 192.0.2.2");
    assert_eq!(forwarding(), "0", "natOutgoing is not set yet");

    set_nat_outgoing(stage, true);
    Place::add_netns("b");
    add(stage, "c2", "b");
    assert_eq!(forwarding(), "1");
    for netns in ["a", "b"] {
        shell(&format!("ip netns exec {netns} ping -c 1 -W 5 192.0.2.2"));
    }
    shell(&format!("ip netns exec b ping -c 1 -W 5 {first}"));

    set_nat_outgoing(stage, false);
    Place::add_netns("c");
    add(stage, "c3", "c");
    shell("! ip netns exec a ping -c 1 -W 1 192.0.2.2");
}

/// Tests that the plugin neither masquerades nor enables forwarding if the store is etcd.
fn nat_outgoing_is_left_to_felix(stage: &mut Stage) {
    make_world();
    set_nat_outgoing(stage, true);
    shell("echo 0 >/proc/sys/net/ipv4/ip_forward");
    succeed(&run(stage, "ADD", "c1", "a"));
    assert_eq!(forwarding(), "0");
    shell("echo 1 >/proc/sys/net/ipv4/ip_forward");
    shell("! ip netns exec a ping -c 1 -W 1 192.0.2.2");
}

/// Tests that, on a node of a Calico cluster, the plugin changes neither forwarding nor masquerading for Margay's own
/// network. Felix writes the MTU file.
fn nat_outgoing_is_left_to_felix_on_its_node(stage: &mut Stage) {
    std::fs::write("/var/lib/calico/nodename", "node1").unwrap();
    std::fs::write("/var/lib/calico/mtu", "1450").unwrap();
    nat_outgoing_is_left_to_felix(stage);
}

/// Tests that the node name file alone, which `margay node register` writes as well, is no sign of Felix.
fn nat_outgoing_works_with_nodename_file(stage: &mut Stage) {
    std::fs::write("/var/lib/calico/nodename", "node1").unwrap();
    nat_outgoing(stage);
}

pub(crate) fn make_world() {
    Place::add_netns("world");
    shell(
        "ip link add up0 type veth peer name eth0 netns world; ip address add 192.0.2.1/24 dev up0; ip link set up0 up; \
         ip -n world address add 192.0.2.2/24 dev eth0; ip -n world link set eth0 up; ip netns exec world ping -c 1 -W 5 192.0.2.1",
    );
}

fn set_nat_outgoing(stage: &Stage, wanted: bool) {
    let mut pools = stage.books.all();
    pools.retain(|key, _| key.contains("/ippools/"));
    assert!(!pools.is_empty());
    pools.values_mut().for_each(|pool| pool["spec"]["natOutgoing"] = json!(wanted));
    stage.books.put_all(&pools);
}

pub(crate) fn forwarding() -> String {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap().trim().to_owned()
}
