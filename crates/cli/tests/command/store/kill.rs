//! Tests that backups and restores can be killed at any moment.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use datastore::Location;

use crate::common::{Lab, margay};
use crate::store::content::{Content, beside, blocks, content, folder, other, start, write};

const ROUNDS: u32 = 30;
const BLOCKS: usize = 400;

/// Runs `margay` until it ends, and returns how long it ran.
fn measure(location: &Location, args: &[&str]) -> Duration {
    let began = Instant::now();
    let done = start(location, args).wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    began.elapsed()
}

/// Kills a `margay` process at some point of its run, and returns whether the process was still running.
fn kill_within(mut child: Child, whole: Duration, round: u32) -> bool {
    // Each test round kills the process at a different point of its measured duration.
    let part = f64::from(round) / f64::from(ROUNDS) + fastrand::f64() / f64::from(ROUNDS);
    thread::sleep(whole.mul_f64(part));
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

fn restore(location: &Location, file: &Path, replace: &[&str]) {
    let (url, file) = (location.to_string(), file.display().to_string());
    let done = margay(["--store", &url, "store", "restore", &file].into_iter().chain(replace.iter().copied()));
    assert_eq!(done.code, 0, "{}", done.err);
}

#[test]
fn backup_leaves_whole_file_or_none_when_killed() {
    for lab in Lab::each() {
        write(&lab.location, blocks(BLOCKS));
        let expected = content(&lab.location);
        let file = lab.folder().join("backup");
        let args = ["store", "backup", file.to_str().unwrap()];
        let whole = measure(&lab.location, &args);
        fs::remove_file(&file).unwrap();
        let target = other(&lab);
        let mut killed = 0;
        for round in 0..ROUNDS {
            killed += u32::from(kill_within(start(&lab.location, &args), whole, round));
            if file.exists() {
                restore(&target, &file, &["--replace"]);
                assert_eq!(content(&target), expected);
                fs::remove_file(&file).unwrap();
            }
        }
        assert!(killed > ROUNDS / 4, "only {killed} of {ROUNDS} were killed in time");
        assert_eq!(content(&lab.location), expected);
        lab.margay(&format!("store backup {}", file.display())).answer();
        assert!(!lab.folder().join("backup.partial").exists(), "the next one clears up");
    }
}

#[test]
fn restore_leaves_whole_or_previous_store_when_killed() {
    for lab in Lab::each() {
        write(&lab.location, blocks(BLOCKS));
        let expected = content(&lab.location);
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let target = other(&lab);
        let args = ["store", "restore", file.to_str().unwrap()];
        let whole = measure(&target, &args);
        let gone = || fs::remove_dir_all(folder(&target)).unwrap();
        gone();
        let mut killed = 0;
        for round in 0..ROUNDS {
            killed += u32::from(kill_within(start(&target, &args), whole, round));
            let found = folder(&target).exists();
            if found {
                assert_eq!(content(&target), expected, "round {round}");
                gone();
            } else {
                let missing = margay(["--store", &target.to_string(), "pool", "list"]).failure();
                assert!(missing.contains("there is no store at"), "{missing}");
            }
        }
        assert!(killed > ROUNDS / 4, "only {killed} of {ROUNDS} were killed in time");
        restore(&target, &file, &[]);
        assert!(beside(&target).is_empty(), "the next one clears up: {:?}", beside(&target));
    }
}

#[test]
fn replacement_leaves_one_of_both_stores_when_killed() {
    for lab in Lab::each() {
        write(&lab.location, blocks(BLOCKS));
        let new = content(&lab.location);
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let old: Content = [(b"old".to_vec(), b"1".to_vec())].into();
        let target = other(&lab);
        let args = ["store", "restore", "--replace", file.to_str().unwrap()];
        let fresh = || {
            let _ = fs::remove_dir_all(folder(&target).parent().unwrap());
            write(&target, [("old".to_owned(), b"1".to_vec())]);
        };
        fresh();
        let whole = measure(&target, &args);
        let (mut killed, mut replaced) = (0, 0);
        for round in 0..ROUNDS {
            fresh();
            killed += u32::from(kill_within(start(&target, &args), whole, round));
            let found = content(&target);
            assert!(found == old || found == new, "round {round}: {} keys", found.len());
            if found == new {
                replaced += 1;
                let aside = folder(&target).with_extension("replaced-1");
                assert_eq!(content(&target.moved_to(aside)), old, "the old store was lost");
            }
        }
        assert!(killed > ROUNDS / 4, "only {killed} of {ROUNDS} were killed in time, {replaced} replaced");
    }
}

#[test]
fn compaction_loses_nothing_when_killed() {
    for lab in Lab::each() {
        for _ in 0..3 {
            write(&lab.location, blocks(BLOCKS));
        }
        let expected = content(&lab.location);
        let kept = lab.folder().join("kept");
        copy(folder(&lab.location), &kept);
        let whole = measure(&lab.location, &["store", "compact"]);
        let mut killed = 0;
        for round in 0..ROUNDS {
            fs::remove_dir_all(folder(&lab.location)).unwrap();
            copy(&kept, folder(&lab.location));
            killed += u32::from(kill_within(start(&lab.location, &["store", "compact"]), whole, round));
            assert_eq!(content(&lab.location), expected, "round {round}");
            lab.margay("store verify").answer();
        }
        assert!(killed > ROUNDS / 4, "only {killed} of {ROUNDS} were killed in time");
    }
}

fn copy(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(copied.success());
}
