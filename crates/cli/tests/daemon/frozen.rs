//! Tests that plugins wait for a busy daemon, but continue without a frozen daemon.

use std::fs;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use ::power::{Disk, Image, Mounted, Syncs};
use conformance::patient;
use nix::sys::signal::Signal;
use wire::FROZEN_TIMEOUT;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Running, wait_until};

const POOL: &str = "10.83.0.0/24";

/// Creates a test environment whose store is on a disk on which syncs can hang.
fn lab_on_disk(engine: &'static str) -> (Lab, Disk, Mounted) {
    let mut lab = Lab::new(engine);
    let folder = lab.root().join("disk");
    fs::create_dir(&folder).unwrap();
    let disk = Disk::new(Image::default(), Syncs::Kept);
    let mounted = disk.mount(&folder).unwrap();
    lab.move_to(&folder);
    lab.margay(&format!("pool create lab {POOL}")).ok();
    (lab, disk, mounted)
}

/// Starts some plugins while disk syncs hang, and waits until they have given up on the daemon and wait for the store
/// lock.
fn calls_that_leave(lab: &Lab) -> Vec<Running> {
    let calls = vec![lab.add("c1").start(), lab.add("c2").start(), lab.del("c0").start()];
    let queue = lab.store.join("queue");
    for call in &calls {
        let files = format!("/proc/{}/fd", call.pid());
        wait_until("the plugin has left the daemon", || {
            let links = fs::read_dir(&files).unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            links.into_iter().any(|link| link == queue)
        });
    }
    calls
}

#[test]
fn hung_sync_ends_and_costs_no_call() {
    for engine in ENGINES {
        let (lab, disk, _mounted) = lab_on_disk(engine);
        let mut daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        disk.hang();
        let calls = calls_that_leave(&lab);
        disk.go_on();
        for call in calls {
            let ended = call.end().ok().alone("received no answer");
            assert!(ended.took >= FROZEN_TIMEOUT, "{ended:?}");
        }
        let mut held: Vec<_> = lab.held().into_values().collect();
        held.sort();
        assert_eq!(held, ["net1.c1", "net1.c2"]);
        lab.is_in_order();
        lab.add("after").ok().by_daemon();
        daemon.runs();
    }
}

#[test]
fn hung_sync_costs_no_call_when_daemon_is_killed() {
    for engine in ENGINES {
        let (lab, disk, _mounted) = lab_on_disk(engine);
        let daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        disk.hang();
        let calls = calls_that_leave(&lab);
        daemon.signal(Signal::SIGKILL);
        disk.go_on();
        daemon.wait();
        calls.into_iter().for_each(|call| _ = call.end().ok());
        let mut held: Vec<_> = lab.held().into_values().collect();
        held.sort();
        assert_eq!(held, ["net1.c1", "net1.c2"]);
        lab.is_in_order();
    }
}

#[test]
fn hung_sync_leaves_status_quick() {
    for engine in ENGINES {
        let (lab, disk, _mounted) = lab_on_disk(engine);
        let _daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        disk.hang();
        let add = lab.add("c1").start();
        sleep(Duration::from_millis(200));
        let status = crate::programs::Call::new("STATUS", "", &lab.conf()).run();
        assert!(status.took < patient(FROZEN_TIMEOUT), "{status:?}");
        disk.go_on();
        add.end().ok();
    }
}

#[test]
fn frozen_daemon_is_waited_for_when_pause_is_short() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        daemon.signal(Signal::SIGSTOP);
        let calls = [lab.add("c1").start(), lab.add("c2").start(), lab.del("c0").start()];
        sleep(FROZEN_TIMEOUT / 2);
        daemon.signal(Signal::SIGCONT);
        calls.into_iter().for_each(|call| _ = call.end().ok().by_daemon());
        daemon.runs();
    }
}

#[test]
fn frozen_daemon_is_left_by_every_call() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        daemon.signal(Signal::SIGSTOP);
        let calls = calls_that_leave(&lab);
        daemon.signal(Signal::SIGCONT);
        for call in calls {
            let ended = call.end().ok().alone("opening the store directly");
            assert!(ended.took >= FROZEN_TIMEOUT, "{ended:?}");
        }
        assert_eq!(lab.held().len(), 2);
        lab.is_in_order();
    }
}

#[test]
fn plugins_wait_while_another_process_has_store() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("c0").ok().by_daemon();
        let calls = lab.held_open(async |_| {
            let calls = [lab.add("c1").start(), lab.del("c0").start()];
            sleep(FROZEN_TIMEOUT * 2);
            calls
        });
        calls.into_iter().for_each(|call| _ = call.end().ok().by_daemon());
        daemon.runs();
    }
}

#[test]
fn plugins_wait_when_daemon_has_no_room() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut command = Command::new("sh");
        let script = "ulimit -n 160 && exec \"$0\" --store \"$1\" serve";
        command.args(["-c", script, env!("CARGO_BIN_EXE_margay"), &lab.url()]);
        command.stdin(Stdio::null()).env_clear();
        let mut daemon = Daemon::start_as(&lab, command);
        daemon.wait_to_greet(&lab);
        // The store is locked until all plugin calls are queued, so that the daemon receives the calls together.
        let calls: Vec<_> = lab.held_open(async |_| {
            let calls = (0..24).map(|number| lab.add(&format!("c{number}")).start()).collect();
            sleep(Duration::from_millis(500));
            calls
        });
        calls.into_iter().for_each(|call| _ = call.end().ok().by_daemon());
        assert_eq!(lab.held().len(), 24);
        daemon.runs();
    }
}
