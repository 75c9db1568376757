//! Tests scans of real network namespaces that processes, open files or mounts keep alive. The tests need the command
//! `ip` and must run as root outside of any container.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Number of times, 50 ms apart, that a test checks a condition before it fails.
const TEST_TIMEOUT: u32 = 200;

/// A child process that is killed when this value is dropped, together with all processes that the child has started.
struct Ended(Child);

impl Ended {
    /// Starts a command in a process group of its own, without the test's standard streams.
    fn start(program: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().try_into().unwrap());
        let _ = killpg(group, Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// A named network namespace that is deleted when this value is dropped.
struct Named(String);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}

fn run(program: &str, arguments: &[&str]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {arguments:?} failed (this test needs root and iproute2): {said}");
}

fn scan() -> host::NetnsScan {
    host::scan().unwrap_or_else(|blind| panic!("{blind} (this test needs root)"))
}

fn seen() -> BTreeSet<IpAddr> {
    scan().addresses
}

/// Waits until a scan finds an address (if `expected`), or until a scan no longer finds the address.
fn becomes(address: &str, expected: bool) {
    let address: IpAddr = address.parse().unwrap();
    for _ in 0..TEST_TIMEOUT {
        if seen().contains(&address) == expected {
            return;
        }
        sleep(Duration::from_millis(50));
    }
    panic!("{address}: expected to be {}", if expected { "seen" } else { "gone" });
}

/// Starts a shell in a new network namespace, adds `address` to the loopback interface there, and then runs the
/// commands in `then`.
fn shell(address: &str, then: &str) -> Ended {
    let script = format!("ip link set lo up && ip address add {address} dev lo && {then}");
    Ended::start("unshare", &["--net", "sh", "-c", &script])
}

#[test]
fn scan_sees_own_namespace() {
    assert!(seen().contains(&"127.0.0.1".parse().unwrap()));
}

#[test]
fn scan_sees_namespace_held_by_process_until_it_ends() {
    let process = shell("198.18.77.1/32", "exec sleep 600");
    becomes("198.18.77.1", true);
    drop(process);
    becomes("198.18.77.1", false);
}

#[test]
fn scan_sees_namespace_held_by_mount_until_removed() {
    let name = Named(format!("margay-sight-{}", std::process::id()));
    run("ip", &["netns", "add", &name.0]);
    run("ip", &["-n", &name.0, "address", "add", "198.18.77.2/32", "dev", "lo"]);
    run("ip", &["-n", &name.0, "address", "add", "fd00:77::2/128", "dev", "lo"]);
    let found = seen();
    for address in ["198.18.77.2", "fd00:77::2"] {
        assert!(found.contains(&address.parse().unwrap()), "{address}");
    }
    drop(name);
    becomes("198.18.77.2", false);
}

/// Tests a mount that is invisible in the machine's mount namespace, as made by some container runtimes.
#[test]
fn scan_sees_mount_in_another_mount_namespace() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("hidden");
    std::fs::write(&at, "").unwrap();
    let at = at.to_str().unwrap();
    let script = format!(
        "unshare --net sh -c 'ip address add 198.18.77.3/32 dev lo; mount --bind /proc/self/ns/net {at}'; exec sleep 600"
    );
    let process = Ended::start("unshare", &["--mount", "--propagation", "private", "sh", "-c", &script]);
    becomes("198.18.77.3", true);
    assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(at), "it is hidden from us");
    drop(process);
    becomes("198.18.77.3", false);
}

#[test]
fn scan_sees_namespace_held_by_open_file() {
    let script = "unshare --net sh -c 'ip address add 198.18.77.4/32 dev lo; exec sleep 600' & inner=$!; \
        until nsenter --net=/proc/$inner/ns/net ip address show dev lo | grep -q 198.18.77.4; do sleep 0.05; done; \
        exec 9</proc/$inner/ns/net; kill $inner; wait $inner; exec sleep 600";
    let process = Ended::start("sh", &["-c", script]);
    let name = || std::fs::read_to_string(format!("/proc/{}/comm", process.0.id())).unwrap();
    // The shell that starts the test process runs `sleep` after the process in the network namespace has ended. Only a
    // file descriptor of this shell then keeps the namespace alive.
    let is_left = (0..TEST_TIMEOUT).any(|_| {
        sleep(Duration::from_millis(50));
        name().trim() == "sleep"
    });
    assert!(is_left, "the namespace was not made");
    becomes("198.18.77.4", true);
    drop(process);
    becomes("198.18.77.4", false);
}

/// Tests a network namespace whose mount point is covered by another mount: no path leads to the namespace, but the
/// namespace still exists.
#[test]
fn scan_sees_hidden_mount() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();
    let script = format!(
        "touch {at}/n && unshare --net=/{at}/n true && stat -L -c %d:%i {at}/n && mount -t tmpfs none {at} && \
         exec sleep 600"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]).process_group(0);
    let mut process = Ended(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let mut name = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut name).unwrap();
    for _ in 0..5 {
        assert!(scan().namespaces.unwrap().contains(name.trim()), "{name}");
        sleep(Duration::from_millis(100));
    }
}

/// Scans a network namespace without addresses, as in a container whose interface was given to a virtual machine or to
/// user space.
#[test]
fn scan_sees_namespace_without_addresses_until_it_ends() {
    let process = Ended::start("unshare", &["--net", "sleep", "600"]);
    let link = format!("/proc/{}/ns/net", process.0.id());
    let own = host::network_namespace(Path::new("/proc/self/ns/net"));
    let other = || host::network_namespace(Path::new(&link)).filter(|name| Some(name) != own.as_ref());
    let name = (0..TEST_TIMEOUT).find_map(|_| {
        sleep(Duration::from_millis(50));
        other()
    });
    let name = name.unwrap();
    let is_there = || scan().namespaces.unwrap().contains(&name);
    assert!(is_there());
    drop(process);
    assert!((0..TEST_TIMEOUT).any(|_| !is_there()), "{name} does not go");
}

/// Tests that a scan in a container covers all network namespaces that were created in the container, and no others.
#[test]
fn scan_in_container_sees_only_what_is_in_it() {
    let test = std::env::current_exe().unwrap();
    let inside = |wrapper: &[&str]| {
        let done = Command::new(wrapper[0])
            .args(&wrapper[1..])
            .arg(&test)
            .args(["--exact", "scan_part_that_runs_in_container", "--nocapture"])
            .env("INSIDE", "1")
            .output()
            .unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{wrapper:?}: {said}");
    };
    inside(&["unshare", "--pid", "--fork", "--mount-proc", "--net"]);
    // The container that this script starts has its own user namespace, like an unprivileged container.
    let own = "unshare --user --map-root-user --mount --pid --fork --mount-proc --net sh -c";
    // The container must not see the mounts of the machine's network namespaces.
    let script = "mount -t tmpfs none /run && exec \"$@\"";
    inside(&own.split(' ').chain([script, "sh"]).collect::<Vec<_>>());
}

#[test]
fn scan_part_that_runs_in_container() {
    if std::env::var_os("INSIDE").is_none() {
        // Without the variable `INSIDE`, this test runs on the host. `scan_in_container_sees_only_what_is_in_it` sets
        // `INSIDE` and runs this test in containers.
        assert_eq!(scan().within, None);
        return;
    }
    let sight = scan();
    let pid = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let within = sight.within.unwrap();
    assert_eq!(pid.to_str().unwrap(), format!("pid:[{within}]"));
    let own = host::network_namespace(Path::new("/proc/self/ns/net")).unwrap();
    let (name, recorded) = own.split_once('/').unwrap();
    assert_eq!(recorded, within);
    // The scan must find the container's own network namespace. The scan may also find network namespaces that are kept
    // alive by mounts.
    assert!(sight.namespaces.unwrap().contains(name), "{own}");
}

#[test]
fn scan_says_so_when_not_privileged() {
    let status = std::env::current_exe().unwrap();
    let without = |drop: &[&str]| {
        let done = Command::new("setpriv")
            .args(drop)
            .arg(&status)
            .args(["--exact", "scan_sees_own_namespace", "--nocapture"])
            .output()
            .unwrap();
        assert!(!done.status.success(), "it must not see everything: {done:?}");
        format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
    };
    let said = without(&["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
    assert!(said.contains("CAP_SYS_ADMIN missing"), "{said}");
    let said = without(&["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]);
    assert!(said.contains("CAP_SYS_PTRACE missing"), "{said}");
    // `unshare --user` runs in the machine's process id namespace, but in a new user namespace.
    let done = Command::new("unshare")
        .args(["--user", "--map-root-user"])
        .arg(&status)
        .args(["--exact", "scan_sees_own_namespace", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("has other users than the machine"), "{said}");
    // An empty file system on `/proc` hides the processes of the test's process id namespace.
    let done = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"])
        .arg(&status)
        .args(["--exact", "scan_sees_own_namespace", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("has no /proc of its own"), "{said}");
}
