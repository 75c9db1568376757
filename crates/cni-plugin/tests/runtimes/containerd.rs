//! Tests with containerd, where `ctr run --cni` connects containers to networks.

use std::io::Read;
use std::process::{Child, Stdio};

use crate::lab::Engine;
use crate::machine::{Boot, IDLE, Machine, Masquerade, PAGE, SERVER, addresses};

const CONFIG: &str = r#"
version = 2
# Only Kubernetes asks it for anything.
disabled_plugins = ["io.containerd.grpc.v1.cri"]
"#;

/// Returns a test machine with only one network configuration, since ctr uses the first network that it finds.
/// Masquerading is off, because ctr does not pass the network namespace of an ended container to the bridge plugin.
/// Without the network namespace, the bridge plugin does not remove its masquerading rules on DEL.
fn machine(engine: Engine, network: &str) -> Machine {
    let all = ["10-lab.conflist", "20-dual.conflist", "30-routed.conflist"];
    let machine = Machine::new(engine, Masquerade::No).with_etc("containerd/config.toml", CONFIG);
    all.into_iter().filter(|other| *other != network).fold(machine, Machine::without_network)
}

/// A running container and its `ctr run` process, which must keep running to remove the container's network at the end.
#[derive(Debug)]
struct Running {
    id: &'static str,
    run: Child,
}

impl Boot<'_> {
    fn start_containerd(&self) -> Child {
        let mut command = self.command(&["containerd", "--config", "/etc/containerd/config.toml"]);
        let daemon = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.wait_until("containerd", || self.attempt(&["ctr", "version"]).is_ok());
        daemon
    }

    fn ctr_run(&self, id: &'static str, words: &[&str]) -> Running {
        let group = format!("/{}/{id}", self.machine.tag);
        let start = ["ctr", "run", "--rm", "--cni", "--cgroup", &group, "--rootfs", "/opt/rootfs", id];
        let all = [&start, words].concat();
        let mut run = self.command(&all).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        self.wait_until("a container that runs", || {
            if let Some(status) = run.try_wait().unwrap() {
                let mut said = String::new();
                run.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("{all:?} has ended with {status}: {said}");
            }
            self.ctr_tasks().iter().any(|(task, _, state)| task == id && state == "RUNNING")
        });
        Running { id, run }
    }

    /// Lists containerd's tasks: each with its container, first process and status.
    fn ctr_tasks(&self) -> Vec<(String, String, String)> {
        let shown = self.run(&["ctr", "tasks", "ls"]);
        let words = shown.lines().map(|line| line.split_whitespace().map(str::to_owned));
        words.filter_map(|mut words| Some((words.next()?, words.next()?, words.next()?))).collect()
    }

    /// Returns the global addresses of a container's interface, as seen in the container's network namespace.
    fn ctr_addresses(&self, container: &Running) -> Vec<String> {
        let task = self.ctr_tasks().into_iter().find(|(id, ..)| id == container.id).unwrap();
        // Do not use `ctr tasks exec`: about one call in a hundred succeeds but loses the command's output.
        let enter = ["nsenter", "--target", &task.1, "--net", "ip", "-o", "addr", "show", "dev", "eth0"];
        addresses(&self.run(&[&enter[..], &["scope", "global"]].concat()))
    }

    /// Pings an address from inside a container's network namespace.
    fn ctr_pings(&self, container: &Running, address: &str) {
        let start = ["ctr", "tasks", "exec", "--exec-id", "ping", container.id];
        self.run(&[&start[..], &["/bin/ping", "-c", "1", "-w", "20", address]].concat());
    }

    /// Ends a container, and waits until ctr has removed the container's network.
    fn ctr_end(&self, mut container: Running) {
        self.run(&["ctr", "tasks", "kill", "--signal", "SIGKILL", container.id]);
        self.wait_until("the end of a container", || container.run.try_wait().unwrap().is_some());
    }
}

pub(crate) fn containers_reach_each_other_and_leave_nothing(engine: Engine) {
    let machine = machine(engine, "10-lab.conflist");
    let boot = machine.boot();
    let mut daemon = boot.start_containerd();
    let (web, idle) = (boot.ctr_run("web", &SERVER), boot.ctr_run("idle", &IDLE));
    let (of_web, of_idle) = (boot.ctr_addresses(&web), boot.ctr_addresses(&idle));
    assert_eq!((of_web.len(), of_idle.len()), (1, 1), "{of_web:?} {of_idle:?}");
    assert_ne!(of_web, of_idle);
    assert!(of_web[0].starts_with("10.88.0.") && of_idle[0].starts_with("10.88.0."), "{of_web:?} {of_idle:?}");
    assert_eq!(boot.in_use("lab"), 2);

    for target in [of_web[0].as_str(), "10.88.0.1"] {
        boot.ctr_pings(&idle, target);
    }
    boot.ctr_pings(&web, &of_idle[0]);
    // ctr cannot publish a port, so fetch the web page from the container's own address.
    assert_eq!(boot.fetch(&format!("{}:80", of_web[0])), PAGE);

    boot.ctr_end(web);
    assert_eq!(boot.in_use("lab"), 1);
    boot.ctr_end(idle);
    boot.nothing_is_left();
    drop(boot);
    daemon.wait().unwrap();
}

/// Tests Margay's main plugin, called as `calico`, without a bridge and without Calico's agents.
pub(crate) fn routed_containers_reach_each_other_and_leave_nothing(engine: Engine) {
    let machine = machine(engine, "30-routed.conflist");
    let boot = machine.boot();
    boot.run(&["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"]);
    let mut daemon = boot.start_containerd();
    let (web, idle) = (boot.ctr_run("web", &SERVER), boot.ctr_run("idle", &IDLE));
    let (of_web, of_idle) = (boot.ctr_addresses(&web), boot.ctr_addresses(&idle));
    assert!(of_web[0].starts_with("10.90.0.") && of_idle[0].starts_with("10.90.0."), "{of_web:?} {of_idle:?}");
    assert_eq!(boot.in_use("routed"), 2);
    for target in [of_web[0].as_str(), "192.0.2.1"] {
        boot.ctr_pings(&idle, target);
    }
    assert_eq!(boot.fetch(&format!("{}:80", of_web[0])), PAGE);

    boot.ctr_end(web);
    boot.ctr_end(idle);
    boot.nothing_is_left();
    drop(boot);
    daemon.wait().unwrap();
}

pub(crate) fn gets_its_addresses_back_after_a_reboot(engine: Engine) {
    let machine = machine(engine, "20-dual.conflist");
    let before = machine.boot();
    let mut daemon = before.start_containerd();
    let (mut web, mut idle) = (before.ctr_run("web", &SERVER), before.ctr_run("idle", &IDLE));
    let (of_web, of_idle) = (before.ctr_addresses(&web), before.ctr_addresses(&idle));
    assert_eq!((of_web.len(), of_idle.len()), (2, 2), "{of_web:?} {of_idle:?}");
    let first = before.recorded_id().to_owned();
    drop(before);
    for child in [&mut daemon, &mut web.run, &mut idle.run] {
        child.wait().unwrap();
    }

    let after = machine.boot();
    let mut daemon = after.start_containerd();
    assert_eq!((after.in_use("dual-v4"), after.in_use("dual-v6")), (2, 2));
    // After the reboot, containerd still lists the containers, but cannot restart them with a network, so remove and
    // rerun them.
    after.run(&["ctr", "containers", "rm", web.id, idle.id]);
    // Start the containers in a different order than before the reboot, so that they would swap addresses if Margay did
    // not keep them.
    let idle = after.ctr_run("idle", &IDLE);
    assert_eq!(after.ctr_addresses(&idle), of_idle);
    for address in &of_web {
        assert_eq!(after.boot_of(address), first);
    }
    let web = after.ctr_run("web", &SERVER);
    assert_eq!(after.ctr_addresses(&web), of_web);
    for address in of_web.iter().chain(&of_idle) {
        assert_eq!(after.boot_of(address), after.recorded_id());
    }
    for target in &of_web {
        after.ctr_pings(&idle, target);
    }

    after.ctr_end(web);
    after.ctr_end(idle);
    after.nothing_is_left();
    drop(after);
    daemon.wait().unwrap();
}
