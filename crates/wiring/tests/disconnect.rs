//! Removing a container's interface with a second process, which may fail in every way.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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
        test("another_process_removes_it", another_process_removes_it),
        test("a_process_that_does_not_do_it_is_replaced", a_process_that_does_not_do_it_is_replaced),
        test("a_refusal_of_the_kernel_is_the_error", a_refusal_of_the_kernel_is_the_error),
        test("a_process_that_hangs_ends_at_the_deadline", a_process_that_hangs_ends_at_the_deadline),
        test("nothing_to_remove_starts_no_process", nothing_to_remove_starts_no_process),
        test("the_process_itself_removes_it_once", the_process_itself_removes_it_once),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// A container with the interface `eth0`, whose other end `up0` is on the host.
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

fn another_process_removes_it() {
    is_gone_with(|interface| Command::new("ip").args(["link", "del", interface]).spawn());
}

fn a_process_that_does_not_do_it_is_replaced() {
    is_gone_with(|_| Err(io::ErrorKind::NotFound.into()));
    is_gone_with(|_| run("exit 0"));
    is_gone_with(|_| run("kill -9 $$"));
}

fn a_refusal_of_the_kernel_is_the_error() {
    let container = container();
    let error = disconnect(&container.path(), "eth0", soon(), |_| run("exit 1")).unwrap_err();
    assert!(error.to_string().contains("operation not permitted"), "{error}");
    assert!(has_eth0(&container));
}

fn a_process_that_hangs_ends_at_the_deadline() {
    let container = container();
    let deadline = Instant::now() + Duration::from_millis(300);
    let error = disconnect(&container.path(), "eth0", deadline, |_| run("exec sleep 2")).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
}

fn nothing_to_remove_starts_no_process() {
    let container = Netns::new();
    let start: StartRemover = |_| panic!("a process was started");
    disconnect(&container.path(), "eth0", soon(), start).unwrap();
    disconnect("/no/such/namespace".as_ref(), "eth0", soon(), start).unwrap();
    disconnect("".as_ref(), "eth0", soon(), start).unwrap();
}

fn the_process_itself_removes_it_once() {
    let container = container();
    container.inside(|| {
        assert_eq!(remove_interface("eth0"), 0);
        assert_eq!(remove_interface("eth0"), 0);
        // The kernel removes no loopback.
        assert_ne!(remove_interface("lo"), 0);
    });
    shell("! ip link show up0 2>/dev/null");
}
