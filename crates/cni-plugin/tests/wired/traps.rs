//! Tests that Margay's main plugin is free of defects of Calico's plugin that no recorded case shows (see each test).

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::{Value, json};

use crate::call::Came;
use crate::carrier::{Served, serve};
use crate::own::{nothing_left, set_and_run, succeed};
use crate::place::{NETNS, Place, shell};
use crate::record::{Documents, case};
use crate::replay::Stage;
use crate::{Kind, Mode, NamedTest, Test};

/// The address of a test server that accepts connections and never answers.
const SILENT: &str = "127.0.0.1:8002";
/// After how long the test fails if a plugin call with a timeout of 10 s has not ended.
const DEADLINE: Duration = Duration::from_secs(14);
/// Minimum number of ADDs in which Felix must have added the container's route before the plugin does.
const RACES: u32 = 40;

/// Returns all tests of this module, each with its name.
pub(crate) fn all() -> impl Iterator<Item = (String, Test)> {
    let on = |kind: Kind, case: &'static str, (name, test): NamedTest| -> (String, Test) {
        let name = format!("traps/{}/{name}", kind.name());
        (name, Box::new(move || set_and_run(case, kind, Mode::InProcess, test)))
    };
    [
        on(Kind::Etcd, "plain", named!(call_ends_in_time_when_etcd_is_silent)),
        on(Kind::Etcd, "pod", named!(call_ends_in_time_when_kubernetes_api_is_silent)),
        on(Kind::Redb, "pod", named!(call_ends_in_time_when_kubernetes_api_is_silent)),
        on(Kind::Etcd, "pod", named!(del_of_pod_frees_all_when_namespace_is_unusable)),
        on(Kind::Sled, "pod", named!(del_of_pod_frees_all_when_namespace_is_unusable)),
        on(Kind::Etcd, "pod", named!(damaged_endpoint_keeps_no_address)),
        on(Kind::Etcd, "dual-stack", named!(add_succeeds_when_felix_is_faster)),
        on(Kind::Etcd, "plain", named!(ids_with_same_beginning_stay_apart)),
        on(Kind::Redb, "plain", named!(ids_with_same_beginning_stay_apart)),
        on(Kind::Etcd, "plain", named!(ids_with_same_beginning_stay_apart_at_once)),
        on(Kind::Etcd, "plain", named!(address_of_lost_namespace_may_go_to_another)),
        on(Kind::Redb, "plain", named!(address_of_lost_namespace_may_go_to_another)),
        on(Kind::Etcd, "pod-routes", named!(check_of_pod_with_routes)),
        on(Kind::Etcd, "pod-use-pod-cidr", named!(check_of_pod_with_pod_cidr)),
        on(Kind::Etcd, "pod-ip-addrs-no-ipam", named!(check_of_pod_without_ipam)),
        on(Kind::Etcd, "second-network", named!(check_and_gc_of_second_network)),
        on(Kind::Redb, "second-network", named!(check_and_gc_of_second_network)),
        on(Kind::Etcd, "pod-restarted", named!(gc_spares_restarted_pod)),
        on(Kind::Etcd, "pod-restarted", named!(add_of_pod_passes_del_of_its_old_container)),
        on(Kind::Redb, "pod-restarted", named!(add_of_pod_passes_del_of_its_old_container)),
        on(Kind::Etcd, "pod-restarted", named!(add_of_pod_fails_beside_its_newer_container)),
        on(Kind::Redb, "plain", named!(gc_and_del_succeed_without_store)),
        on(Kind::Etcd, "plain", named!(credentials_are_refused_when_writable_by_others)),
    ]
    .into_iter()
}

/// Returns the first plugin call of a recorded case, with some fields replaced.
fn first_call(case_name: &str, changes: &[(&str, &str, Value)]) -> Value {
    let mut step = case(case_name).unwrap().steps[0].clone();
    for (part, name, value) in changes {
        step[*part][*name] = value.clone();
    }
    step
}

fn silent() -> Served {
    serve(SILENT.parse().unwrap(), |stream| async move {
        let _open = stream;
        std::future::pending::<()>().await;
    })
}

#[track_caller]
fn fails_in_time(stage: &Stage, step: &Value) -> Came {
    let begun = Instant::now();
    let came = stage.call(step).run(patient(DEADLINE));
    assert_eq!(came.outcome["exit"], 1, "after {:?}: {} {}", begun.elapsed(), came.outcome, came.stderr);
    came
}

/// Tests that ADD and DEL end at their deadline, with the CNI error code that makes the runtime retry.
fn call_ends_in_time_when_etcd_is_silent(stage: &mut Stage) {
    let _server = silent();
    for verb in ["ADD", "DEL"] {
        let endpoints = ("stdin", "etcd_endpoints", json!(format!("http://{SILENT}")));
        let came = fails_in_time(stage, &first_call("plain", &[("env", "CNI_COMMAND", json!(verb)), endpoints]));
        assert_eq!(came.outcome["stdout"]["code"], 11, "{verb}: {}", came.outcome);
    }
    assert_eq!(stage.scan()["host"]["links"], json!([]));
    // DEL removes the interface even if the store does not answer.
    let add = first_call("plain", &[]);
    let del = first_call("plain", &[("env", "CNI_COMMAND", json!("DEL"))]);
    succeed(&stage.call(&add).run(patient(DEADLINE)));
    let mut dead = del.clone();
    dead["stdin"]["etcd_endpoints"] = json!(format!("http://{SILENT}"));
    assert_eq!(fails_in_time(stage, &dead).outcome["stdout"]["code"], 11);
    assert_eq!(stage.scan()["host"]["links"], json!([]));
    assert_eq!(stage.call(&del).run(patient(DEADLINE)).outcome["exit"], 0);
    nothing_left(stage, "after the DEL that the runtime repeats");
}

/// Tests ADD and DEL with a Kubernetes API that does not answer. The ADD fails because the Kubernetes API does not
/// answer, and leaves nothing of its container behind. DEL does not need the Kubernetes API and succeeds.
fn call_ends_in_time_when_kubernetes_api_is_silent(stage: &mut Stage) {
    let _server = silent();
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": format!("http://{SILENT}")}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}]});
    stage.place.write("<files>/kubeconfig", &config.to_string());
    let came = fails_in_time(stage, &first_call("pod", &[]));
    assert_eq!(came.outcome["stdout"]["code"], 11, "{}", came.outcome);
    assert!(!format!("{}{}", came.outcome, came.stderr).contains("secret-token"), "{}", came.stderr);
    nothing_left(stage, "after ADD");
    let del = first_call("pod", &[("env", "CNI_COMMAND", json!("DEL"))]);
    assert_eq!(stage.call(&del).run(patient(DEADLINE)).outcome["exit"], 0);
}

/// Tests DEL with a network namespace that cannot be entered. DEL fails because of the unusable network namespace, but
/// still removes the container's endpoint and address.
fn del_of_pod_frees_all_when_namespace_is_unusable(stage: &mut Stage) {
    succeed(&stage.call(&first_call("pod", &[])).run(patient(DEADLINE)));
    let del = ("env", "CNI_COMMAND", json!("DEL"));
    let no_namespace = ("env", "CNI_NETNS", json!("<files>/nodename"));
    let came = fails_in_time(stage, &first_call("pod", &[del.clone(), no_namespace]));
    let message = came.outcome["stdout"]["msg"].as_str().unwrap();
    assert!(message.contains("unknown FS magic"), "{message}");
    let scan = stage.scan();
    assert_eq!(scan["etcd"], json!({"documents": {}, "ipam": {"addresses": {}, "handles": {}}}));
    assert_eq!(stage.call(&first_call("pod", &[del])).run(patient(DEADLINE)).outcome["exit"], 0);
    nothing_left(stage, "after the second DEL");
}

/// Tests an ADD while Felix adds the host's route to the container's first address before the plugin does. Although
/// Felix has added the route to the first address, the plugin must still add the host's route to the second address.
fn add_succeeds_when_felix_is_faster(stage: &mut Stage) {
    let (add, del) = (first_call("dual-stack", &[]), first_call("dual-stack", &[("env", "CNI_COMMAND", json!("DEL"))]));
    let first = address(&stage.call(&add).run(patient(DEADLINE)));
    assert_eq!(stage.call(&del).run(patient(DEADLINE)).outcome["exit"], 0);
    // The node has one block, and each ADD gets the block's next free address.
    let expected = |round: u32| Ipv4Addr::from(u32::from(first) + 1 + round);
    let (round, done) = (AtomicU32::new(0), AtomicBool::new(false));
    let felix = || {
        let mut faster = 0;
        while !done.load(Ordering::Relaxed) {
            let address = expected(round.load(Ordering::Relaxed)).to_string();
            let route = ["route", "add", &address, "dev", "calic1", "scope", "link"];
            faster += u32::from(Command::new("ip").args(route).output().unwrap().status.success());
        }
        faster
    };
    let faster = thread::scope(|scope| {
        let felix = scope.spawn(felix);
        let race = || {
            for number in 0..RACES {
                round.store(number, Ordering::Relaxed);
                assert_eq!(address(&stage.call(&add).run(patient(DEADLINE))), expected(number));
                let scan = stage.scan();
                let routes = scan["host"]["interfaces"]["calic1"]["routes"].as_array().unwrap();
                let is_to = |route: &Value, prefix: &str| route["dst"].as_str().unwrap().starts_with(prefix);
                let has = |prefix: &str| routes.iter().any(|route| is_to(route, prefix));
                assert!(has(&expected(number).to_string()) && has("fd80:"), "round {number}: {routes:?}");
                assert_eq!(stage.call(&del).run(patient(DEADLINE)).outcome["exit"], 0);
            }
        };
        let raced = catch_unwind(AssertUnwindSafe(race));
        done.store(true, Ordering::Relaxed);
        let faster = felix.join().unwrap();
        raced.map_or_else(|panic| resume_unwind(panic), |()| faster)
    });
    assert!(faster > 0, "Felix was never faster: {RACES} ADDs have shown nothing");
}

/// Returns the first IPv4 address in the result of a plugin call.
#[track_caller]
fn address(came: &Came) -> Ipv4Addr {
    let address = succeed(came)["ips"][0]["address"].as_str().unwrap();
    address.split('/').next().unwrap().parse().unwrap()
}

/// Tests that DEL succeeds even if the pod's WorkloadEndpoint is damaged.
fn damaged_endpoint_keeps_no_address(stage: &mut Stage) {
    succeed(&stage.call(&first_call("pod", &[])).run(patient(DEADLINE)));
    let key = "/calico/resources/v3/projectcalico.org/workloadendpoints/shop/node1-k8s-pod1-eth0";
    stage.books.put_all(&Documents::from([(key.to_owned(), json!("no endpoint"))]));
    let del = first_call("pod", &[("env", "CNI_COMMAND", json!("DEL"))]);
    let came = stage.call(&del).run(patient(DEADLINE));
    assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    assert_eq!(stage.scan()["etcd"]["ipam"], json!({"addresses": {}, "handles": {}}));
    assert_eq!(stage.scan()["host"]["links"], json!([]));
}

/// Tests containers whose generated host interface names would be equal. Such a name contains the first 11 characters
/// of the container's id; one test container has exactly these 11 characters as its id, another has a longer id that
/// starts with them. One of the test's three containers is in another Kubernetes namespace.
fn ids_with_same_beginning_stay_apart(stage: &mut Stage) {
    let containers =
        [("container-10", "a", "default"), ("container-1", "b", "default"), ("container-1x", "c", "other")];
    let call = |stage: &Stage, verb: &str, (id, netns, namespace): (&str, &str, &str)| {
        let changes = [
            ("env", "CNI_COMMAND", json!(verb)),
            ("env", "CNI_CONTAINERID", json!(id)),
            ("env", "CNI_NETNS", json!(format!("{NETNS}/{netns}"))),
            ("env", "CNI_ARGS", json!(format!("IgnoreUnknown=1;CNI_TEST_NAMESPACE={namespace}"))),
        ];
        stage.call(&first_call("plain", &changes)).run(patient(DEADLINE))
    };
    Place::add_netns("b");
    Place::add_netns("c");
    for container in containers {
        succeed(&call(stage, "ADD", container));
    }
    let scan = stage.scan();
    assert_eq!(scan["host"]["links"].as_array().unwrap().len(), 3, "{}", scan["host"]["links"]);
    assert!(scan["host"]["interfaces"].get("calicontainer-1").is_some());
    for netns in ["a", "b", "c"] {
        assert_eq!(scan["netns"][netns]["interfaces"].as_object().unwrap().len(), 1, "{netns}");
    }
    // If the ADD is repeated for the container whose host interface has the default name, the interface keeps this
    // name.
    succeed(&call(stage, "ADD", containers[0]));
    assert_eq!(stage.scan()["host"]["links"].as_array().unwrap().len(), 3);
    for container in containers {
        assert_eq!(call(stage, "DEL", container).outcome["exit"], 0);
    }
    nothing_left(stage, "after all DELs");
}

/// Tests concurrent ADDs whose generated host interface names would be equal: no container takes another container's
/// interface. An ADD that races with two other ADDs for an interface name may fail, but must then leave nothing of its
/// container.
fn ids_with_same_beginning_stay_apart_at_once(stage: &mut Stage) {
    let names: Vec<String> = (0..8).map(|number| format!("the-same-start-{number}")).collect();
    names.iter().for_each(|name| Place::add_netns(name));
    let call = |verb: &str, name: &str| {
        let changes = [
            ("env", "CNI_COMMAND", json!(verb)),
            ("env", "CNI_CONTAINERID", json!(name)),
            ("env", "CNI_NETNS", json!(format!("{NETNS}/{name}"))),
        ];
        stage.call(&first_call("plain", &changes))
    };
    let calls: Vec<_> = names.iter().map(|name| call("ADD", name)).collect();
    let came: Vec<Came> = thread::scope(|scope| {
        let running: Vec<_> = calls.iter().map(|call| scope.spawn(|| call.run(patient(DEADLINE)))).collect();
        running.into_iter().map(|call| call.join().unwrap()).collect()
    });
    let scan = stage.scan();
    let mut added = 0;
    for (name, came) in names.iter().zip(&came) {
        let interfaces = scan["netns"][name]["interfaces"].as_object().unwrap().len();
        let expected = usize::from(came.outcome["exit"] == 0);
        assert_eq!(interfaces, expected, "{name}: {} {}", came.outcome, came.stderr);
        added += expected;
    }
    assert!(added > 0);
    assert_eq!(scan["host"]["links"].as_array().unwrap().len(), added);
    for name in &names {
        assert_eq!(call("DEL", name).run(patient(DEADLINE)).outcome["exit"], 0);
    }
    nothing_left(stage, "after all DELs");
}

/// Tests a container that the runtime restarts with its old id after a reboot, while another container has the old
/// address.
fn address_of_lost_namespace_may_go_to_another(stage: &mut Stage) {
    let of = |container: &str, netns: &str| {
        let netns = json!(format!("{NETNS}/{netns}"));
        first_call("plain", &[("env", "CNI_CONTAINERID", json!(container)), ("env", "CNI_NETNS", netns)])
    };
    let first = address(&stage.call(&of("c1", "a")).run(patient(DEADLINE)));
    // The kernel removes a namespace's interfaces some time after the namespace itself.
    shell("ip netns del a; while ip link show calic1 2>/dev/null; do sleep 0.02; done; ip netns add a; ip netns add b");
    // The container got no DEL: its address was released as a leftover of an earlier boot.
    stage.books.release(first.into());
    let changes = [("env", "CNI_ARGS", json!(format!("IP={first}")))];
    let mut other = of("c2", "b");
    other["env"]["CNI_ARGS"] = changes[0].2.clone();
    assert_eq!(address(&stage.call(&other).run(patient(DEADLINE))), first);
    let second = address(&stage.call(&of("c1", "a")).run(patient(DEADLINE)));
    assert_ne!(second, first, "two containers have one address");
    let scan = stage.scan();
    assert_eq!(scan["etcd"]["ipam"]["addresses"].as_object().unwrap().len(), 2);
    let endpoint = scan["etcd"]["documents"]
        .as_object()
        .unwrap()
        .iter()
        .find_map(|(key, document)| key.ends_with("node1-cni-c1-eth0").then_some(document));
    assert_eq!(endpoint.unwrap()["spec"]["ipNetworks"], json!([format!("{second}/32")]));
}

/// Calls CHECK with the result of an ADD.
#[track_caller]
fn check(stage: &Stage, mut step: Value, result: &Value) -> Came {
    step["env"]["CNI_COMMAND"] = json!("CHECK");
    step["stdin"]["prevResult"] = result.clone();
    stage.call(&step).run(patient(DEADLINE))
}

#[track_caller]
fn is_fine(came: &Came) {
    assert_eq!(came.outcome, json!({"exit": 0, "stdout_text": "OK\n"}), "{}", came.stderr);
}

/// Runs the first ADD that `wanted` accepts in a recorded case, and then CHECK.
fn add_and_check(stage: &Stage, name: &str, wanted: impl Fn(&Value) -> bool) {
    let steps = &case(name).unwrap().steps;
    let is_wanted = |step: &&Value| step["do"] == "ADD" && step["exit"] == 0 && wanted(&step["stdin"]);
    let add = steps.iter().find(is_wanted).unwrap();
    let result = succeed(&stage.call(add).run(patient(DEADLINE))).clone();
    is_fine(&check(stage, add.clone(), &result));
}

fn check_of_pod_with_routes(stage: &mut Stage) {
    add_and_check(stage, "pod-routes", |conf| conf["ipam"]["routes"].is_array());
}

fn check_of_pod_with_pod_cidr(stage: &mut Stage) {
    add_and_check(stage, "pod-use-pod-cidr", |conf| conf["ipam"].to_string().contains("usePodCidr"));
}

fn check_of_pod_without_ipam(stage: &mut Stage) {
    add_and_check(stage, "pod-ip-addrs-no-ipam", |conf| conf["feature_control"]["ip_addrs_no_ipam"] == true);
}

/// Tests a container that joins a second network without getting a second interface. CHECK succeeds for each of the
/// container's two networks, and a GC for the second network does not touch the container.
fn check_and_gc_of_second_network(stage: &mut Stage) {
    let adds: Vec<Value> = ["net1", "net2"]
        .map(|network| {
            let mut add = first_call("second-network", &[("stdin", "name", json!(network))]);
            add["stdin"]["cniVersion"] = json!("1.1.0");
            add
        })
        .into();
    let results: Vec<Value> = adds.iter().map(|add| succeed(&stage.call(add).run(patient(DEADLINE))).clone()).collect();
    for (add, result) in adds.iter().zip(&results) {
        is_fine(&check(stage, add.clone(), result));
    }
    stage.age_all(Duration::from_secs(3600));
    let gc = |network: usize| {
        let mut gc = adds[network].clone();
        gc["env"] = json!({"CNI_COMMAND": "GC", "CNI_PATH": "<bin>"});
        gc["stdin"]["cni.dev/valid-attachments"] = json!([]);
        let came = stage.call(&gc).run(patient(DEADLINE));
        assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
        stage.scan()["host"]["links"].as_array().unwrap().len()
    };
    assert_eq!(gc(1), 1, "the first network has the container");
    is_fine(&check(stage, adds[0].clone(), &results[0]));
    assert_eq!(gc(0), 0);
    let scan = stage.scan();
    assert_eq!(scan["etcd"]["ipam"]["addresses"], json!({}));
    assert!(!scan["etcd"]["documents"].to_string().contains("WorkloadEndpoint"));
}

/// Tests a restarted pod that has an hour-old WorkloadEndpoint and a new address. GC must keep the restarted pod's
/// endpoint and address, because the runtime may have made its list before the address was assigned.
fn gc_spares_restarted_pod(stage: &mut Stage) {
    let steps = &case("pod-restarted").unwrap().steps;
    succeed(&stage.call(&steps[0]).run(patient(DEADLINE)));
    stage.age_all(Duration::from_secs(3600));
    succeed(&stage.call(&steps[1]).run(patient(DEADLINE)));
    let mut gc = steps[1].clone();
    gc["env"] = json!({"CNI_COMMAND": "GC", "CNI_PATH": "<bin>"});
    gc["stdin"]["cniVersion"] = json!("1.1.0");
    gc["stdin"]["cni.dev/valid-attachments"] = json!([]);
    let came = stage.call(&gc).run(patient(DEADLINE));
    assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    let scan = stage.scan();
    assert_eq!(scan["host"]["links"].as_array().unwrap().len(), 1);
    assert!(scan["etcd"]["documents"].to_string().contains("WorkloadEndpoint"));
}

/// Makes an IPAM plugin that calls the main plugin for another step during an ADD, between the ADD's read of the store
/// and its write.
fn during_add(stage: &Stage, other: &Value) {
    let root = &stage.place.root;
    let other = stage.call(other);
    let set: Vec<String> = other.env.iter().map(|(name, value)| format!("{name}='{value}'")).collect();
    fs::write(root.join("other.json"), &other.stdin).unwrap();
    let once = root.join("once").display().to_string();
    fs::write(&once, "").unwrap();
    let script = format!(
        "#!/bin/sh\ncat >/dev/null\n[ \"$CNI_COMMAND\" = ADD ] || exit 0\n\
         if [ -e {once} ]; then rm {once}; env {} {bin}/calico <{root}/other.json >{root}/other.out || exit 9; fi\n\
         echo '{{\"cniVersion\":\"1.0.0\",\"ips\":[{{\"address\":\"10.65.166.140/32\"}}]}}'\n",
        set.join(" "),
        bin = root.join("bin").display(),
        root = root.display()
    );
    let plugin = root.join("bin/during-add");
    fs::write(&plugin, script).unwrap();
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Returns the two ADDs of a restarted pod; the IPAM plugin of the second ADD is the one that [`during_add`] makes.
fn adds_of_restarted_pod() -> [Value; 2] {
    let steps = &case("pod-restarted").unwrap().steps;
    let mut second = steps[1].clone();
    second["stdin"]["ipam"] = json!({"type": "during-add"});
    [steps[0].clone(), second]
}

/// Tests the ADD of a restarted pod while the DEL of the pod's old container deletes the pod's WorkloadEndpoint.
fn add_of_pod_passes_del_of_its_old_container(stage: &mut Stage) {
    let [first, second] = adds_of_restarted_pod();
    succeed(&stage.call(&first).run(patient(DEADLINE)));
    let mut del = first;
    del["env"]["CNI_COMMAND"] = json!("DEL");
    during_add(stage, &del);
    succeed(&stage.call(&second).run(patient(DEADLINE)));
    let documents = stage.scan()["etcd"]["documents"].to_string();
    assert!(documents.contains(second["env"]["CNI_CONTAINERID"].as_str().unwrap()), "{documents}");
    assert!(documents.contains("10.65.166.140/32"), "{documents}");
}

/// Tests an ADD of a pod during which a newer container of the same pod gets its WorkloadEndpoint. The ADD must not
/// replace that WorkloadEndpoint, and its error names the other container.
fn add_of_pod_fails_beside_its_newer_container(stage: &mut Stage) {
    let [mut newer, second] = adds_of_restarted_pod();
    newer["env"]["CNI_NETNS"] = json!("<netns:c>");
    Place::add_netns("c");
    during_add(stage, &newer);
    let came = stage.call(&second).run(patient(DEADLINE));
    assert_eq!(came.outcome["exit"], 1, "{} {}", came.outcome, came.stderr);
    let other = newer["env"]["CNI_CONTAINERID"].as_str().unwrap();
    let details = came.outcome["stdout"]["details"].as_str().unwrap();
    assert!(details.contains(other), "{}", came.outcome);
    assert!(stage.scan()["etcd"]["documents"].to_string().contains(other));
}

/// Tests GC and DEL after the store was deleted: both succeed, and DEL still removes the container's interface.
fn gc_and_del_succeed_without_store(stage: &mut Stage) {
    let mut add = first_call("plain", &[]);
    add["stdin"]["cniVersion"] = json!("1.1.0");
    succeed(&stage.call(&add).run(patient(DEADLINE)));
    fs::remove_dir_all(stage.place.root.join("store")).unwrap();
    let mut gc = add.clone();
    gc["env"] = json!({"CNI_COMMAND": "GC", "CNI_PATH": "<bin>"});
    gc["stdin"]["cni.dev/valid-attachments"] = json!([]);
    let mut del = add;
    del["env"]["CNI_COMMAND"] = json!("DEL");
    for step in [gc, del] {
        let came = stage.call(&step).run(patient(DEADLINE));
        assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    }
    shell("! ip link show calic1");
}

/// Tests that the plugin rejects a certificate authority file that other users may write to. A user who can write to
/// the certificate authority file could make the plugin trust another etcd.
fn credentials_are_refused_when_writable_by_others(stage: &mut Stage) {
    stage.place.write("<files>/ca.crt", "a certificate");
    shell(&format!("chmod 0666 {}", stage.place.root.join("files/ca.crt").display()));
    let came = fails_in_time(stage, &first_call("plain", &[("stdin", "etcd_ca_cert_file", json!("<files>/ca.crt"))]));
    let message = came.outcome["stdout"]["msg"].as_str().unwrap();
    assert!(message.contains("others than its owner may write to") && message.contains("chmod go-w"), "{message}");
    assert!(!format!("{}{}", came.outcome, came.stderr).contains("a certificate"));
    nothing_left(stage, "after ADD");
}
