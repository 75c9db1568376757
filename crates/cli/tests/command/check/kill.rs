//! Tests that `margay ipam check` can be killed in the middle of a repair and run again.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::check::{check, put};
use crate::common::Lab;

const DAMAGES: usize = 400;
const ROUNDS: u32 = 8;

/// Starts `margay ipam check` as a process that repairs all findings.
fn repair(lab: &Lab) -> std::process::Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &lab.location.to_string(), "--cni-conf-dir", "/nowhere", "ipam", "check"]);
    command.args(["--repair", "--apply"]).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Writes handles under which no address is held, and a handle with too low a count.
fn damage(lab: &Lab) {
    let handles: Vec<String> = (0..DAMAGES).map(|number| format!("/calico/ipam/v2/handle/stray{number:04}")).collect();
    let value = r#"{"block":{"10.65.0.64/26":1},"deleted":false}"#;
    put(lab, &handles.iter().map(|key| (key.as_str(), value)).collect::<Vec<_>>());
    put(lab, &[("/calico/ipam/v2/handle/net.c1", r#"{"block":{},"deleted":false}"#)]);
}

#[test]
fn repair_is_carried_on_when_killed() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let ip = lab.assign("net", "c1");
        damage(&lab);
        let began = Instant::now();
        assert!(repair(&lab).wait().unwrap().success());
        let whole = began.elapsed();
        let mut part_done = 0;
        for round in 0..ROUNDS {
            damage(&lab);
            let mut child = repair(&lab);
            // The kills are spread over the duration of a repair.
            thread::sleep(whole.mul_f64(f64::from(round + 1) / f64::from(ROUNDS + 1)).max(Duration::from_millis(1)));
            child.kill().unwrap();
            child.wait().unwrap();
            let left = check(&lab, "-o json");
            let left: serde_json::Value = serde_json::from_str(&left.out).unwrap();
            let problems = left["problems"].as_u64().unwrap();
            part_done += u64::from(problems > 0 && problems <= DAMAGES as u64);
            assert!(left["findings"].as_array().unwrap().iter().all(|finding| finding["repairable"] == true), "{left}");
            let text = check(&lab, "--repair --apply").answer();
            assert!(text.ends_with("Check complete; found 0 problems.\n"), "{text}");
        }
        assert!(part_done > 0, "none of {ROUNDS} was killed in the middle");
        assert!(lab.margay(&format!("ipam show --ip {ip}")).answer().contains("Handle ID: net.c1"));
    }
}
