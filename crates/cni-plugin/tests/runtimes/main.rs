//! Tests with real container runtimes on test machines. Containers get addresses from Margay, keep these addresses over
//! a reboot, and leave nothing behind.
//!
//! A test machine is a set of Linux namespaces with its own folders, so the host stays unchanged. As on a real host, a
//! reboot of a test machine ends all processes and loses the network and everything in memory, but keeps the disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod containerd;
mod cri;
mod machine;
mod podman;
mod remains;

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use testkit::copy;
use testkit::lab::{self, ENGINES, Engine};

/// The name of a test, and the test's function, which takes the engine of the store.
type Test = (&'static str, fn(Engine));

const PODMAN: [Test; 4] = [
    ("podman_containers_reach_each_other_and_leave_nothing", podman::containers_reach_each_other_and_leave_nothing),
    ("podman_containers_keep_addresses_after_reboot", podman::containers_keep_their_addresses_over_a_reboot),
    ("podman_gets_both_wanted_addresses_or_none", podman::both_wanted_addresses_or_none),
    ("podman_runs_containers_on_routed_network", podman::routed_containers_reach_each_other_and_leave_nothing),
];

const CONTAINERD: [Test; 4] = [
    ("ctr_containers_reach_each_other_and_leave_nothing", containerd::containers_reach_each_other_and_leave_nothing),
    ("ctr_container_gets_addresses_back_after_reboot", containerd::gets_its_addresses_back_after_a_reboot),
    ("ctr_runs_containers_on_routed_network", containerd::routed_containers_reach_each_other_and_leave_nothing),
    ("cri_pods_get_routed_addresses_and_leave_nothing", cri::pods_get_routed_addresses_and_leave_nothing),
];

fn main() -> ExitCode {
    let here = cannot_here();
    let podman = here.clone().or_else(podman::has_no_cni);
    let trials = trials(&PODMAN, podman.as_deref()).chain(trials(&CONTAINERD, here.as_deref()));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// Returns all given tests, each on every engine. Tests that cannot run on this host are listed as ignored, with the
/// reason.
fn trials<'a>(tests: &'a [Test], ignored: Option<&'a str>) -> impl Iterator<Item = Trial> + 'a {
    tests.iter().flat_map(|&(name, test)| ENGINES.map(|engine| (name, test, engine))).map(
        move |(name, test, engine)| {
            let trial = Trial::test(format!("{name}_on_{}", engine.name()), move || {
                test(engine);
                Ok(())
            });
            match ignored {
                Some(reason) => trial.with_kind(reason).with_ignored_flag(true),
                None => trial,
            }
        },
    )
}

/// Returns the reason why this host cannot run containers at all, if there is one. If a system package that the tests
/// need is missing, the tests run and fail; they are not skipped.
fn cannot_here() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("containers with networks need root".to_owned());
    }
    let rule = "iptables -t nat -A OUTPUT -m addrtype --dst-type LOCAL -m comment --comment probe -j ACCEPT";
    let probes = [
        ("namespaces", "true"),
        ("overlay file systems", "mount -t overlay -o ro,lowerdir=/etc:/usr none /tmp"),
        ("bridges", "ip link add probe0 type bridge"),
        ("interfaces in pairs", "ip link add probe0 type veth peer name probe1"),
        ("what portmap needs of iptables", rule),
    ];
    probes.into_iter().find_map(|(what, command)| {
        let unshare = ["--mount", "--net", "--pid", "--fork", "sh", "-c", command];
        let probe = Command::new("unshare").args(unshare).output();
        let probe = probe.expect("unshare is missing: scripts/setup test installs it");
        let said = String::from_utf8_lossy(&probe.stderr);
        (!probe.status.success()).then(|| format!("no {what} here: {}", said.trim().replace('\n', "; ")))
    })
}
