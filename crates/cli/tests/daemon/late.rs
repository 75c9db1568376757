//! Tests that no ADD takes effect too late: an ADD whose runtime has called DEL or timed out must leave no address
//! assigned.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use agent::{Answer, Verb, VerbRequest};
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use kv::Deadline;
use wire::FrameKind;

use crate::daemon::{Daemon, connect};
use crate::lab::{ENGINES, Lab, ipam_on};
use crate::programs::{Running, TEST_TIMEOUT, wait_until};

const POOL: &str = "10.71.0.0/24";

fn attachment(container: &str) -> Attachment {
    Attachment {
        network: "net1".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: "node-1".into(),
        boot: None,
    }
}

fn request(container: &str) -> AssignRequest {
    AssignRequest::new(attachment(container), RequestedAddresses::any(1, 0))
}

/// Waits until a plugin has sent its request to the daemon. While the plugin connects, another process must have the
/// store lock, so that the request stays unanswered.
fn wait_until_taken(plugin: &mut Running) {
    let files = format!("/proc/{}/fd", plugin.pid());
    wait_until("the plugin has a connection", || {
        let links = fs::read_dir(&files).unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.into_iter().any(|link| link.to_string_lossy().starts_with("socket:"))
    });
    // The plugin sends its request immediately after it has connected.
    sleep(Duration::from_millis(200));
    assert!(!plugin.is_over(), "the plugin ended while the store lock was held");
}

/// Checks that no address is assigned at the time of the call, nor one second later.
#[track_caller]
fn nothing_comes(lab: &Lab) {
    lab.nothing_is_held();
    sleep(Duration::from_secs(1));
    lab.nothing_is_held();
    lab.is_in_order();
}

#[test]
fn add_of_killed_plugin_is_dropped() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let _daemon = Daemon::start(&lab);
        lab.held_open(async |open| {
            let mut plugin = lab.add("c1").start();
            wait_until_taken(&mut plugin);
            assert_eq!(lab.waiting().await, 1, "the daemon alone waits for the lock");
            assert!(plugin.kill());
            let released =
                ipam_on(open).release_attachment(&attachment("c1"), &[], Deadline::after(TEST_TIMEOUT)).await;
            assert!(released.unwrap().is_empty(), "there was nothing yet");
        });
        nothing_comes(&lab);
    }
}

#[test]
fn del_through_daemon_comes_after_add_of_killed_plugin() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let _daemon = Daemon::start(&lab);
        let del = lab.held_open(async |_| {
            let mut plugin = lab.add("c1").start();
            wait_until_taken(&mut plugin);
            assert!(plugin.kill());
            let mut del = lab.del("c1").start();
            wait_until_taken(&mut del);
            assert_eq!(lab.waiting().await, 1, "the daemon alone waits for the lock");
            del
        });
        del.end().ok().by_daemon();
        nothing_comes(&lab);
    }
}

#[test]
fn callers_get_addresses_beside_killed_ones() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let _daemon = Daemon::start(&lab);
        let alive = lab.held_open(async |_| {
            let mut plugins: Vec<_> = (0..12).map(|number| lab.add(&format!("c{number}")).start()).collect();
            plugins.iter_mut().for_each(wait_until_taken);
            let mut alive = Vec::new();
            for (number, plugin) in plugins.into_iter().enumerate() {
                if number % 3 == 0 {
                    assert!(plugin.kill());
                } else {
                    alive.push((number, plugin));
                }
            }
            alive
        });
        for (number, plugin) in alive {
            let address = plugin.end().ok().by_daemon().address();
            assert_eq!(lab.held().get(&address), Some(&format!("net1.c{number}")));
        }
        assert_eq!(lab.held().len(), 8);
        lab.is_in_order();
    }
}

#[test]
fn request_is_dropped_when_its_time_is_over() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let _daemon = Daemon::start(&lab);
        // The client waits for an answer longer than the time limit in its request.
        let asked = |container: &str, millis| {
            let within = Duration::from_millis(millis);
            VerbRequest { within, lock_file: "/run/none".into(), verb: Verb::Add(Box::new(request(container).into())) }
        };
        let (late, in_time) = (connect(&lab).unwrap(), connect(&lab).unwrap());
        let (late, in_time) = lab.held_open(async |_| {
            let ask = |connection: wire::DaemonConnection, asked: VerbRequest| {
                std::thread::spawn(move || connection.ask::<Answer>(FrameKind::Verb, &asked, TEST_TIMEOUT))
            };
            let asking = (ask(late, asked("late", 300)), ask(in_time, asked("in-time", 60_000)));
            sleep(Duration::from_millis(900));
            asking
        });
        let late = late.join().unwrap();
        assert!(late.is_err(), "{late:?}");
        assert!(matches!(in_time.join().unwrap(), Ok(Answer::Assigned(_))));
        let held: Vec<_> = lab.held().into_values().collect();
        assert_eq!(held, ["net1.in-time"]);
    }
}

#[test]
fn client_killed_at_any_moment_holds_nothing_after_del() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        let begun = Instant::now();
        lab.add("first").ok().by_daemon();
        let whole = begun.elapsed();
        lab.del("first").ok().by_daemon();
        let mut killed = 0;
        for round in 0..60 {
            let plugin = lab.add("c1").start();
            // The plugin is killed after up to twice the duration of a plugin call, at a different time in each round.
            sleep(whole.mul_f64(f64::from(round) / 30.0 * fastrand::f64().max(0.5)));
            killed += u32::from(plugin.kill());
            lab.del("c1").ok();
            // Every second round reads the store's files after the DEL: no address may be assigned, even if the daemon
            // carried out the killed plugin's ADD.
            if round % 2 == 0 {
                lab.nothing_is_held();
            }
        }
        assert!(killed > 5, "only {killed} were killed in time");
        daemon.runs();
        nothing_comes(&lab);
    }
}
