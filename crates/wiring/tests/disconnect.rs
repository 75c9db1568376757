//! Tests that a second process removes a container's interface, and each way in which that process can fail.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use support::{Netns, on_a_host, shell};
use wiring::{Error, StartRemover, disconnect, has_interface, remove_interface};

fn main() -> ExitCode {
    let root = nix::unistd::geteuid().is_root();
    let test = |name: &str, test: fn()| {
        let trial = Trial::test(name, move || on_a_host(test).map_err(Failed::from));
        if root { trial } else { trial.with_kind("networks of their own need root").with_ignored_flag(true) }
    };
    let tests = vec![
        test("removal_runs_in_another_process", removal_runs_in_another_process),
        test("removal_replaces_process_that_fails", removal_replaces_process_that_fails),
        test("removal_reports_refusal_of_kernel", removal_reports_refusal_of_kernel),
        test("removal_ends_at_deadline_when_process_hangs", removal_ends_at_deadline_when_process_hangs),
        test("removal_starts_no_process_when_nothing_is_there", removal_starts_no_process_when_nothing_is_there),
        test("removal_succeeds_when_repeated", removal_succeeds_when_repeated),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// Creates a container with the interface `eth0`, whose peer `up0` is on the host.
fn container() -> Netns {
    let container = Netns::new();
    shell(&format!("ip link add up0 type veth peer name eth0 netns {}", container.0.id()));
    container
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn has_eth0(container: &Netns) -> bool {
    has_interface(&container.path(), "eth0", soon()).unwrap()
}

fn run(script: &str) -> io::Result<Child> {
    Command::new("sh").args(["-c", script]).spawn()
}

#[track_caller]
fn is_gone_with(start: StartRemover) {
    let container = container();
    assert!(has_eth0(&container));
    disconnect(&container.path(), "eth0", soon(), start).unwrap();
    assert!(!has_eth0(&container));
    shell("! ip link show up0 2>/dev/null");
}

fn removal_runs_in_another_process() {
    is_gone_with(|interface| Command::new("ip").args(["link", "del", interface]).spawn());
}

fn removal_replaces_process_that_fails() {
    is_gone_with(|_| Err(io::ErrorKind::NotFound.into()));
    is_gone_with(|_| run("exit 0"));
    is_gone_with(|_| run("kill -9 $$"));
}

fn removal_reports_refusal_of_kernel() {
    let container = container();
    let error = disconnect(&container.path(), "eth0", soon(), |_| run("exit 1")).unwrap_err();
    assert!(error.to_string().contains("operation not permitted"), "{error}");
    assert!(has_eth0(&container));
}

fn removal_ends_at_deadline_when_process_hangs() {
    let container = container();
    let deadline = Instant::now() + Duration::from_millis(300);
    let error = disconnect(&container.path(), "eth0", deadline, |_| run("exec sleep 2")).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
}

fn removal_starts_no_process_when_nothing_is_there() {
    let container = Netns::new();
    let start: StartRemover = |_| panic!("a process was started");
    disconnect(&container.path(), "eth0", soon(), start).unwrap();
    disconnect("/no/such/namespace".as_ref(), "eth0", soon(), start).unwrap();
    disconnect("".as_ref(), "eth0", soon(), start).unwrap();
}

fn removal_succeeds_when_repeated() {
    let container = container();
    container.inside(|| {
        assert_eq!(remove_interface("eth0"), 0);
        assert_eq!(remove_interface("eth0"), 0);
        // The kernel refuses to remove a loopback interface.
        assert_ne!(remove_interface("lo"), 0);
    });
    shell("! ip link show up0 2>/dev/null");
}
