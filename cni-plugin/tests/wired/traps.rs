//! The traps of Calico's plugin that no case of the recording shows: each call here must do better.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::call::Came;
use crate::carrier::{Served, serve};
use crate::own::{nothing_left, set_and_run, succeed};
use crate::record::case;
use crate::replay::Stage;
use crate::{Kind, Mode, Test};

/// A server that accepts each connection and never answers.
const SILENT: &str = "127.0.0.1:8002";
/// The most that a call may take whose deadline is 10 s.
const DEADLINE: Duration = Duration::from_secs(14);
/// How many ADDs a racing Felix has to win against one of them.
const RACES: u32 = 40;

/// All tests, by name.
pub(crate) fn all() -> impl Iterator<Item = (String, Test)> {
    let on = |kind: Kind, case: &'static str, name: &str, test: fn(&mut Stage)| -> (String, Test) {
        let name = format!("traps/{}/{name}", kind.name());
        (name, Box::new(move || set_and_run(case, kind, Mode::InProcess, test)))
    };
    [
        on(Kind::Etcd, "plain", "a_silent_etcd", a_silent_etcd),
        on(Kind::Etcd, "pod", "a_silent_kubernetes_api", a_silent_kubernetes_api),
        on(Kind::Redb, "pod", "a_silent_kubernetes_api", a_silent_kubernetes_api),
        on(Kind::Etcd, "pod", "del_of_a_pod_goes_on", del_of_a_pod_goes_on),
        on(Kind::Sled, "pod", "del_of_a_pod_goes_on", del_of_a_pod_goes_on),
        on(Kind::Etcd, "dual-stack", "felix_was_faster", felix_was_faster),
    ]
    .into_iter()
}

/// The first call of the stage's case, with some of it replaced.
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
    let came = stage.call(step).run(DEADLINE);
    assert_eq!(came.outcome["exit"], 1, "after {:?}: {} {}", begun.elapsed(), came.outcome, came.stderr);
    came
}

/// ADD and DEL end at their deadline, with the code that has the runtime try again.
fn a_silent_etcd(stage: &mut Stage) {
    let _server = silent();
    for verb in ["ADD", "DEL"] {
        let endpoints = ("stdin", "etcd_endpoints", json!(format!("http://{SILENT}")));
        let came = fails_in_time(stage, &first_call("plain", &[("env", "CNI_COMMAND", json!(verb)), endpoints]));
        assert_eq!(came.outcome["stdout"]["code"], 11, "{verb}: {}", came.outcome);
    }
    nothing_left(stage, "after both");
}

/// A pod whose Kubernetes API does not answer gets nothing, and its DEL, which does not need the API, succeeds.
fn a_silent_kubernetes_api(stage: &mut Stage) {
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
    assert_eq!(stage.call(&del).run(DEADLINE).outcome["exit"], 0);
}

/// The namespace cannot be entered, which DEL reports: endpoint and address are gone all the same.
fn del_of_a_pod_goes_on(stage: &mut Stage) {
    succeed(&stage.call(&first_call("pod", &[])).run(DEADLINE));
    let del = ("env", "CNI_COMMAND", json!("DEL"));
    let no_namespace = ("env", "CNI_NETNS", json!("<files>/nodename"));
    let came = fails_in_time(stage, &first_call("pod", &[del.clone(), no_namespace]));
    let message = came.outcome["stdout"]["msg"].as_str().unwrap();
    assert!(message.contains("unknown FS magic"), "{message}");
    let look = stage.look();
    assert_eq!(look["etcd"], json!({"documents": {}, "ipam": {"addresses": {}, "handles": {}}}));
    assert_eq!(stage.call(&first_call("pod", &[del])).run(DEADLINE).outcome["exit"], 0);
    nothing_left(stage, "after the second DEL");
}

/// Felix adds the host's route to the first address before the plugin does. The route to the second one is not forgotten.
fn felix_was_faster(stage: &mut Stage) {
    let (round, done) = (AtomicU32::new(0), AtomicBool::new(false));
    let felix = || {
        let mut first = 0;
        while !done.load(Ordering::Relaxed) {
            let address = address(round.load(Ordering::Relaxed));
            let route = ["route", "add", &address, "dev", "calic1", "scope", "link"];
            let added = Command::new("ip").args(route).output().unwrap();
            first += u32::from(added.status.success());
        }
        first
    };
    let first = thread::scope(|scope| {
        let felix = scope.spawn(felix);
        let add_and_del = || {
            for number in 0..RACES {
                round.store(number, Ordering::Relaxed);
                let came = stage.call(&first_call("dual-stack", &[])).run(DEADLINE);
                let result = succeed(&came);
                assert_eq!(result["ips"][0]["address"], format!("{}/32", address(number)));
                let look = stage.look();
                let routes = look["host"]["interfaces"]["calic1"]["routes"].as_array().unwrap();
                assert_eq!(routes.len(), 3, "round {number}: {routes:?}");
                let del = first_call("dual-stack", &[("env", "CNI_COMMAND", json!("DEL"))]);
                assert_eq!(stage.call(&del).run(DEADLINE).outcome["exit"], 0);
            }
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(add_and_del));
        done.store(true, Ordering::Relaxed);
        let first = felix.join().unwrap();
        outcome.map_or_else(|panic| std::panic::resume_unwind(panic), |()| first)
    });
    assert!(first > 0, "Felix was never faster: {RACES} ADDs have shown nothing");
}

/// The IPv4 address that the container gets in a round.
fn address(round: u32) -> String {
    format!("10.65.166.{}", 128 + round)
}
