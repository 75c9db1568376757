//! Tests of the host lock, a lock file that Calico's plugins also lock.

use std::collections::BTreeSet;
use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use crate::lab::Lab;
use crate::process::{Call, Outcome};

const GOES_ON: &str = "another process holds the IPAM lock file of this host; continuing without the lock";

#[test]
fn host_lock_is_waited_for() {
    let lab = Lab::start();
    lab.add("c0").ok();
    let held = File::open(lab.lock_file()).unwrap();
    held.lock().unwrap();
    let add = lab.add("c1");
    let child = add.start(add.command());
    // The test holds the host lock for 700 ms: far longer than an ADD takes without waiting, and far shorter than the
    // lock timeout.
    thread::sleep(Duration::from_millis(700));
    assert!(!lab.books().held.values().any(|handle| handle == "net1.c1"), "it has not waited");
    held.unlock().unwrap();
    let outcome = add.wait(child);
    assert_eq!(outcome.exit, 0, "{outcome:?}");
    assert!(!outcome.stderr.contains(GOES_ON), "{outcome:?}");
}

#[test]
fn host_lock_is_skipped_after_two_seconds_when_kept() {
    let lab = Lab::start();
    lab.add("c0").ok();
    let held = File::open(lab.lock_file()).unwrap();
    held.lock().unwrap();
    for call in [lab.add("c1"), lab.del("c1")] {
        let begun = Instant::now();
        let outcome = call.ok();
        assert!(begun.elapsed() >= Duration::from_secs(2), "{outcome:?}");
        assert!(outcome.stderr.contains(GOES_ON), "{outcome:?}");
    }
    let check = lab.add("c0").with("CNI_COMMAND", "CHECK").ok();
    assert!(!check.stderr.contains(GOES_ON), "CHECK takes no lock: {check:?}");
}

#[test]
fn host_lock_is_skipped_when_host_cannot_lock() {
    let lab = Lab::start();
    let mut conf = lab.conf();
    conf["ipam_lock_file"] = "/proc/no-such-folder/lock".into();
    let outcome = Call::new("ADD", "c1", &conf).ok();
    let goes_on = "cannot lock the IPAM lock file of this host; continuing without the lock";
    assert!(outcome.stderr.contains(goes_on), "{outcome:?}");
    lab.del("c1").ok();
    lab.nothing_is_left();
}

#[test]
fn host_lock_gives_many_at_once_one_address_each() {
    const CALLERS: usize = 16;
    let lab = Lab::start();
    // Giving each caller its own lock file simulates callers that time out while they wait for the host lock.
    for lock in ["shared", "own"] {
        let calls = |verb: &str, caller: usize| -> Vec<Outcome> {
            let mut conf = lab.conf();
            if lock == "own" {
                conf["ipam_lock_file"] = lab.root.path().join(caller.to_string()).to_str().unwrap().into();
            }
            (0..3).map(|round| Call::new(verb, &format!("{lock}{caller}-{round}"), &conf).ok()).collect()
        };
        let all_at_once = |verb: &str| -> Vec<Outcome> {
            thread::scope(|scope| {
                let calls = &calls;
                let running: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(move || calls(verb, caller))).collect();
                running.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
            })
        };
        let addresses: BTreeSet<_> = all_at_once("ADD").iter().map(Outcome::address).collect();
        assert_eq!(addresses.len(), 3 * CALLERS);
        assert_eq!(lab.books().held.keys().copied().collect::<BTreeSet<_>>(), addresses);
        all_at_once("DEL");
        lab.nothing_is_left();
        lab.no_notes_are_left();
    }
}
