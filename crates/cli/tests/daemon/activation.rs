//! Tests `margay serve` with a socket that systemd has created.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::patient;
use wire::FROZEN_TIMEOUT;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{TEST_TIMEOUT, wait_until};

const POOL: &str = "10.83.0.0/24";

/// Starts a daemon as systemd does: file descriptor 3 is the listening socket, and the daemon gets a socket for
/// notifications.
fn activate(lab: &Lab, listener: &UnixListener) -> Daemon {
    let script = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" --log-level debug --store \"$1\" serve";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_margay"), &lab.url()]).env_clear();
    command.env("NOTIFY_SOCKET", lab.root().join("notify"));
    command.stdin(OwnedFd::from(listener.try_clone().unwrap()));
    Daemon::start_as(lab, command)
}

/// Waits until the daemon has notified systemd of the given state.
#[track_caller]
fn wait_for(reported: &UnixDatagram, state: &str) {
    reported.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut bytes = [0; 1000];
    wait_until(state, || {
        let read = reported.recv(&mut bytes).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..read]).lines().any(|line| line == state)
    });
}

#[test]
fn systemd_socket_is_used_and_stays() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        std::fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
        let listener = UnixListener::bind(lab.socket()).unwrap();
        let reported = UnixDatagram::bind(lab.root().join("notify")).unwrap();
        for round in 0..3 {
            // The first plugin connects before the daemon runs. systemd would start the daemon because of this
            // connection.
            let first = lab.add(&format!("first{round}")).start();
            let mut daemon = activate(&lab, &listener);
            first.end().ok();
            wait_for(&reported, "READY=1");
            lab.add(&format!("second{round}")).ok().by_daemon();
            daemon.runs();
            let ended = daemon.end();
            assert_eq!(ended.code, Some(0), "{ended:?}");
            wait_for(&reported, "STOPPING=1");
            assert!(lab.socket().exists(), "the socket is gone");
        }
        assert_eq!(lab.held().len(), 6);
        // Once both systemd and the daemon have closed the socket, connections are refused.
        drop(listener);
        let begun = Instant::now();
        lab.add("after").ok();
        assert!(begun.elapsed() < patient(TEST_TIMEOUT / 10));
    }
}

#[test]
fn caller_is_served_by_daemon_that_it_starts() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        std::fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
        let listener = UnixListener::bind(lab.socket()).unwrap();
        let _told = UnixDatagram::bind(lab.root().join("notify")).unwrap();
        let callers: Vec<_> = (0..4).map(|number| lab.add(&format!("c{number}")).start()).collect();
        let mut daemon = activate(&lab, &listener);
        for caller in callers {
            let add = caller.end().ok();
            // On a busy machine, the plugin may stop waiting before the daemon has started.
            if add.took < FROZEN_TIMEOUT {
                add.by_daemon();
            }
        }
        assert_eq!(lab.held().len(), 4);
        daemon.runs();
    }
}

#[test]
fn daemon_is_ready_without_store() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        std::fs::create_dir_all(lab.socket().parent().unwrap()).unwrap();
        let listener = UnixListener::bind(lab.socket()).unwrap();
        let reported = UnixDatagram::bind(lab.root().join("notify")).unwrap();
        let _daemon = activate(&lab, &listener);
        wait_for(&reported, "READY=1");
        assert!(!lab.store.exists());
    }
}
