//! Tests with podman, whose containers use CNI networks.

use std::process::Command;

use crate::lab::Engine;
use crate::machine::{Boot, IDLE, Machine, Masquerade, PAGE, SERVER, addresses};

const CONTAINERS_CONF: &str = r#"
[containers]
# What podman sets by itself is more than some hosts let it.
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"

[network]
network_backend = "cni"
cni_plugin_dirs = ["/opt/cni/bin"]
"#;

const STORAGE_CONF: &str = r#"
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"#;

/// Returns why this host's podman cannot be tested: since version 5, podman is built without CNI support.
pub(crate) fn has_no_cni() -> Option<String> {
    // Without podman on the host, the tests run and fail.
    let version = Command::new("podman").arg("--version").output().ok()?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let major: u32 = version.rsplit(' ').next()?.split('.').next()?.parse().ok()?;
    (major >= 5).then(|| format!("{version}: from version 5 on podman uses netavark instead of CNI"))
}

fn machine(engine: Engine) -> Machine {
    Machine::new(engine, Masquerade::Yes)
        .with_etc("containers/containers.conf", CONTAINERS_CONF)
        .with_etc("containers/storage.conf", STORAGE_CONF)
}

impl Boot<'_> {
    /// Starts a podman container with the given name on the given network.
    fn podman_run(&self, name: &str, network: &str, options: &[&str], words: &[&str]) -> Result<String, String> {
        let group = format!("/{}", self.machine.tag);
        let start = ["podman", "run", "-d", "--cgroup-parent", &group, "--cap-add", "NET_RAW", "--name", name];
        let more = ["--network", network, "--rootfs", "/opt/rootfs"];
        self.attempt(&[&start, options, &more, words].concat())
    }

    /// Returns the global addresses of a container's interface, as seen by the container.
    fn podman_addresses(&self, name: &str) -> Vec<String> {
        let shown = self.run(&["podman", "exec", name, "ip", "-o", "addr", "show", "dev", "eth0", "scope", "global"]);
        addresses(&shown)
    }

    fn podman_pings(&self, name: &str, address: &str) {
        self.run(&["podman", "exec", name, "ping", "-c", "1", "-w", "20", address]);
    }
}

pub(crate) fn containers_reach_each_other_and_leave_nothing(engine: Engine) {
    let machine = machine(engine);
    let boot = machine.boot();
    boot.podman_run("web", "lab", &["-p", "8080:80"], &SERVER).unwrap();
    boot.podman_run("idle", "lab", &[], &IDLE).unwrap();
    let (web, idle) = (boot.podman_addresses("web"), boot.podman_addresses("idle"));
    assert_eq!((web.len(), idle.len()), (1, 1), "{web:?} {idle:?}");
    assert_ne!(web, idle);
    assert!(web[0].starts_with("10.88.0.") && idle[0].starts_with("10.88.0."), "{web:?} {idle:?}");
    assert_eq!(boot.in_use("lab"), 2);

    for target in [web[0].as_str(), "10.88.0.1"] {
        boot.podman_pings("idle", target);
    }
    boot.podman_pings("web", &idle[0]);
    for published in ["127.0.0.1:8080", "10.88.0.1:8080"] {
        assert_eq!(boot.fetch(published), PAGE);
    }

    boot.run(&["podman", "rm", "-f", "-t", "0", "web", "idle"]);
    boot.nothing_is_left();
}

/// Tests Margay's main plugin, called as `calico`, without a bridge and without Calico's agents.
pub(crate) fn routed_containers_reach_each_other_and_leave_nothing(engine: Engine) {
    let machine = machine(engine);
    let boot = machine.boot();
    // The host needs an address of its own to exchange packets with the containers.
    boot.run(&["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"]);
    boot.podman_run("web", "routed", &["-p", "8080:80"], &SERVER).unwrap();
    boot.podman_run("idle", "routed", &[], &IDLE).unwrap();
    let (web, idle) = (boot.podman_addresses("web"), boot.podman_addresses("idle"));
    assert_eq!((web.len(), idle.len()), (1, 1), "{web:?} {idle:?}");
    assert_ne!(web, idle);
    assert!(web[0].starts_with("10.90.0.") && idle[0].starts_with("10.90.0."), "{web:?} {idle:?}");
    assert_eq!(boot.in_use("routed"), 2);
    for target in [web[0].as_str(), "192.0.2.1"] {
        boot.podman_pings("idle", target);
    }
    boot.podman_pings("web", &idle[0]);
    for served in [format!("{}:80", web[0]), "192.0.2.1:8080".to_owned()] {
        assert_eq!(boot.fetch(&served), PAGE);
    }

    boot.run(&["podman", "rm", "-f", "-t", "0", "web", "idle"]);
    boot.nothing_is_left();
}

pub(crate) fn containers_keep_their_addresses_over_a_reboot(engine: Engine) {
    let machine = machine(engine);
    let before = machine.boot();
    before.podman_run("fixed", "lab", &["--ip", "10.88.0.77", "-p", "8080:80"], &SERVER).unwrap();
    before.podman_run("free", "lab", &[], &IDLE).unwrap();
    before.podman_run("lost", "lab", &[], &IDLE).unwrap();
    let (free, lost) = (before.podman_addresses("free"), before.podman_addresses("lost"));
    assert_eq!(before.podman_addresses("fixed"), ["10.88.0.77"]);
    let first = before.recorded_id().to_owned();
    drop(before);

    let after = machine.boot();
    // After the reboot, no runtime has told Margay that the containers are gone.
    assert_eq!(after.in_use("lab"), 3);
    after.run(&["podman", "start", "fixed", "free"]);
    assert_eq!(after.podman_addresses("fixed"), ["10.88.0.77"]);
    assert_eq!(after.podman_addresses("free"), free);
    after.podman_pings("free", "10.88.0.77");
    assert_eq!(after.fetch("127.0.0.1:8080"), PAGE);
    // The restarted containers' addresses are recorded with the id of the current boot; leftovers have the id of an
    // earlier boot.
    assert_eq!(after.boot_of("10.88.0.77"), after.recorded_id());
    assert_eq!(after.boot_of(&free[0]), after.recorded_id());
    what_an_earlier_boot_left(&after, &lost[0], &first);

    after.run(&["podman", "rm", "-f", "-t", "0", "fixed", "free", "lost"]);
    after.nothing_is_left();
}

/// Checks that the address of a container that was not restarted after a reboot is still assigned, and releases it.
/// After a reboot, no runtime sends DEL for a container that it does not start again.
fn what_an_earlier_boot_left(boot: &Boot<'_>, address: &str, earlier: &str) {
    assert_eq!(boot.boot_of(address), earlier);
    boot.run(&["margay", "ipam", "release", "--ip", address]);
    assert_eq!(boot.in_use("lab"), 2);
}

pub(crate) fn both_wanted_addresses_or_none(engine: Engine) {
    let machine = machine(engine);
    let boot = machine.boot();
    let wanted = ["--ip", "10.89.0.9", "--ip6", "fd00:89::9"];
    boot.podman_run("fixed", "dual", &wanted, &SERVER).unwrap();
    boot.podman_run("free", "dual", &[], &IDLE).unwrap();
    assert_eq!(boot.podman_addresses("fixed"), ["10.89.0.9", "fd00:89::9"]);
    assert_eq!(boot.podman_addresses("free").len(), 2);
    for target in ["10.89.0.9", "fd00:89::9", "10.89.0.1", "fd00:89::1"] {
        boot.podman_pings("free", target);
    }
    assert_eq!(boot.fetch("[fd00:89::9]:80"), PAGE);

    // If one of two requested addresses is already assigned, ADD assigns neither, and the error says how to find the
    // holder.
    let half = ["--ip", "10.89.0.10", "--ip6", "fd00:89::9"];
    let refused = boot.podman_run("late", "dual", &half, &IDLE).unwrap_err();
    assert!(refused.contains("margay ipam show --ip fd00:89::9"), "{refused}");
    assert_eq!((boot.in_use("dual-v4"), boot.in_use("dual-v6")), (2, 2));

    boot.run(&["podman", "rm", "-f", "-t", "0", "fixed", "free", "late"]);
    boot.nothing_is_left();
}
