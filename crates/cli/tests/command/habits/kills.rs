//! Tests that `margay` commands can be killed at any moment and run again.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use ipam_core::model::Owner;
use kv::Deadline;

use crate::common::{Lab, TEST_TIMEOUT};
use crate::habits::files::stored;
use crate::habits::split::addresses;

const ROUNDS: u32 = 16;

fn start(lab: &Lab, args: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &lab.location.to_string()]).args(args.split(' ')).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

/// Runs a `margay` command repeatedly on copies of the store, and kills it each time at some point of its run. After
/// each kill, `look` checks the store.
fn kill_often(lab: &Lab, args: &str, mut look: impl FnMut(&Lab)) {
    let (store, kept) = (lab.location.path().unwrap().to_owned(), lab.folder().join("kept"));
    copy(&store, &kept);
    let began = Instant::now();
    let done = start(lab, args).wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut whole = began.elapsed();
    let mut killed = 0;
    for round in 0..ROUNDS {
        copy(&kept, &store);
        let mut child = start(lab, args);
        // Each test round kills the command at a different point of its measured duration.
        let part = (f64::from(round) + fastrand::f64()) / f64::from(ROUNDS);
        let until = whole.mul_f64(part);
        thread::sleep(until);
        child.kill().unwrap();
        match child.wait().unwrap().success() {
            false => killed += 1,
            // If a command completes before the kill, its measured duration was too long, because the machine was busy
            // during the measurement.
            true => whole = whole.min(until),
        }
        look(lab);
    }
    assert!(killed > ROUNDS / 4, "only {killed} of {ROUNDS} were killed in time");
}

fn count(lab: &Lab, part: &str) -> usize {
    stored(lab).keys().filter(|key| key.contains(part)).count()
}

#[test]
fn deletion_is_finished_by_next_when_killed() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/18").answer();
        let deadline = Deadline::after(TEST_TIMEOUT);
        lab.with_ipam(async |ipam| {
            let claimed =
                ipam.claim_affinity(&Owner::host("a"), "10.65.0.0/19".parse().unwrap(), deadline).await.unwrap();
            assert_eq!(claimed.claimed.len(), 128);
        });
        let mut midway = 0;
        kill_often(&lab, "delete ippool main", |lab| {
            let (blocks, affinities) = (count(lab, "/assignment/"), count(lab, "/ipam/v2/host/"));
            assert_eq!(blocks, affinities, "a block goes with its affinity");
            let pools = lab.margay("pool list -o json").json();
            match pools["pools"].get(0) {
                Some(pool) => assert!(pool["disabled"] == true || blocks == 128, "{blocks} of an enabled pool"),
                None => assert_eq!(blocks, 0, "the pool goes last"),
            }
            midway += usize::from(blocks > 0 && blocks < 128);
            lab.margay("delete ippool main -s").answer();
            assert_eq!((count(lab, "/block/"), count(lab, "/ippools/")), (0, 0));
        });
        assert!(midway > 0, "no kill came midway");
    }
}

#[test]
fn split_is_finished_by_next_when_killed() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        for container in ["c1", "c2"] {
            lab.assign("net", container);
        }
        let before = addresses(&lab);
        kill_often(&lab, "ipam split 512 --name main", |lab| {
            let (pools, is_there) = (count(lab, "/ippools/"), count(lab, "/ippools/main") == 1);
            assert!(pools == 1 || (is_there && pools <= 513) || pools == 512, "{pools}");
            if is_there {
                let pool = &lab.margay("get ippool main -o json").json();
                assert!(pools == 1 || pool["spec"]["disabled"] == true, "two pools assign the same addresses");
                if pool["spec"]["disabled"] == true {
                    let other = lab.margay("ipam split 256 --name main").failure();
                    assert!(other.contains("is being split into 512 parts: finish that first"), "{other}");
                }
                lab.margay("ipam split 512 --name main").answer();
            }
            let now = stored(lab);
            let parts: Vec<_> = now.iter().filter(|(key, _)| key.contains("/ippools/")).collect();
            assert_eq!(parts.len(), 512);
            assert!(parts.iter().all(|(key, value)| key.contains("/split-main-") && !value.contains("margay.io")));
            assert_eq!(addresses(lab), before);
        });
        assert!(lab.assign("net", "c3").starts_with("10.65."));
    }
}
