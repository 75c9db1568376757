//! A test machine whose disk survives reboots, and which can be booted, and stopped as by a power cut.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::copy::copy_program;
use crate::lab::{Engine, Lab};
use testkit::machine::start_machine;
use testkit::programs::{command, plugin};

/// Maximum number of times that a condition is checked, with [`PAUSE`] between two checks.
const TRIES: u32 = 600;
const PAUSE: Duration = Duration::from_millis(50);
/// Time limit of a command on the machine, in seconds. On an idle host, a command on the test machine takes only a
/// small part of this time limit.
const TEST_TIMEOUT: &str = "60";
/// The page that a container's web server serves.
pub(crate) const PAGE: &str = "a page of the container\n";

/// The command line of a container that serves [`PAGE`] on port 80.
pub(crate) const SERVER: [&str; 6] = ["/bin/httpd", "-f", "-p", "80", "-h", "/www"];
/// The command line of a container that only sleeps.
pub(crate) const IDLE: [&str; 2] = ["/bin/sleep", "3600"];

/// A test machine that is switched off; dropping it deletes its disk.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) lab: Lab,
    /// The machine's unique name, also used for its control group (cgroup); the cgroups of its containers are inside
    /// that cgroup.
    pub(crate) tag: String,
}

impl Machine {
    /// Creates a machine with Margay and the standard CNI plugins, a store of the given engine, and three networks. The
    /// network `lab` assigns IPv4 addresses from the pool `lab` (10.88.0.0/24). The network `dual` assigns IPv4 and
    /// IPv6 addresses from the pools `dual-v4` (10.89.0.0/24) and `dual-v6` (fd00:89::/64). With `masquerade`, the
    /// bridges of `lab` and `dual` give outgoing packets the host's source address. The network `routed` has no bridge.
    /// Containers in `routed` get addresses from the pool `routed` (10.90.0.0/24), assigned by Margay's main plugin
    /// under the name `calico`.
    pub(crate) fn new(engine: Engine, masquerade: Masquerade) -> Self {
        let mut lab = Lab::new(engine);
        let disk = lab.root.path().to_owned();
        lab.store = disk.join(format!("var-lib/margay/ipam.{}", engine.name()));
        let machine = Self { lab, tag: format!("margay-{}", uuid::Uuid::new_v4().simple()) };
        for folder in ["etc/cni/net.d", "etc/containers", "etc/containerd", "opt/cni/bin", "var-lib"] {
            fs::create_dir_all(disk.join(folder)).unwrap();
        }
        install(&disk.join("opt/cni/bin"));
        files_for_containers(&disk.join("opt/rootfs"));
        let net = disk.join("etc/cni/net.d");
        let lab = json!({ "ipv4_pools": ["lab"], "routes": [{ "dst": "0.0.0.0/0" }] });
        let dual = json!({
            "ipv4_pools": ["dual-v4"], "ipv6_pools": ["dual-v6"], "assign_ipv6": "true",
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
        });
        for (file, name, ipam) in [("10-lab.conflist", "lab", lab), ("20-dual.conflist", "dual", dual)] {
            fs::write(net.join(file), conflist(engine, name, masquerade, ipam).to_string()).unwrap();
        }
        fs::write(net.join("30-routed.conflist"), routed(engine).to_string()).unwrap();
        let boot = machine.boot();
        let bridged = [("lab", "10.88.0.0/24"), ("dual-v4", "10.89.0.0/24"), ("dual-v6", "fd00:89::/64")];
        for (pool, cidr) in bridged.into_iter().chain([("routed", "10.90.0.0/24")]) {
            boot.run(&["margay", "pool", "create", pool, cidr]);
        }
        drop(boot);
        machine
    }

    /// Removes a network's configuration file from the machine's disk.
    pub(crate) fn without_network(self, file: &str) -> Self {
        fs::remove_file(self.lab.root.path().join("etc/cni/net.d").join(file)).unwrap();
        self
    }

    /// Adds a file to the folder `/etc` of the machine.
    pub(crate) fn with_etc(self, file: &str, text: &str) -> Self {
        fs::write(self.lab.root.path().join("etc").join(file), text).unwrap();
        self
    }

    /// Boots the machine; each boot has a new boot id.
    pub(crate) fn boot(&self) -> Boot<'_> {
        let disk = self.lab.root.path();
        let (id, id_file) = (uuid::Uuid::new_v4().to_string(), disk.join("boot-id"));
        fs::write(&id_file, format!("{id}\n")).unwrap();
        let script = disk.join("boot.sh");
        fs::write(&script, include_str!("boot.sh")).unwrap();
        let (first, number) = start_machine(&[], [script.as_path(), disk, &id_file]);
        Boot { machine: self, first, number, id }
    }
}

impl Drop for Machine {
    /// Removes the control groups that a container runtime left because its machine was stopped.
    fn drop(&mut self) {
        let ours = |path: &&PathBuf| path.to_string_lossy().contains(&self.tag);
        for path in cgroups().iter().rev().filter(ours) {
            let _ = fs::remove_dir(path);
        }
    }
}

/// Whether packets that leave a bridge get the host's address as their source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Masquerade {
    Yes,
    No,
}

fn conflist(engine: Engine, name: &str, masquerade: Masquerade, mut ipam: Value) -> Value {
    ipam["type"] = "margay-ipam".into();
    json!({
        "cniVersion": "1.0.0",
        "name": name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": format!("{name}0"),
                "isGateway": true,
                "ipMasq": masquerade == Masquerade::Yes,
                "capabilities": { "ips": true },
                "datastore_type": engine.name(),
                "datastore_path": format!("/var/lib/margay/ipam.{}", engine.name()),
                "ipam": ipam,
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    })
}

fn routed(engine: Engine) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "routed",
        "plugins": [
            {
                "type": "calico",
                "datastore_type": engine.name(),
                "datastore_path": format!("/var/lib/margay/ipam.{}", engine.name()),
                "ipam": { "type": "calico-ipam", "ipv4_pools": ["routed"] },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    })
}

/// Copies the CNI plugins and `margay` to the folder in which ctr searches for plugins.
fn install(to: &Path) {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
    let standard = folders.iter().map(Path::new).find(|folder| folder.join("bridge").exists());
    let standard = standard.expect("the standard plugins are missing: scripts/setup test installs them");
    for plugin in ["bridge", "portmap", "loopback"] {
        copy_program(standard.join(plugin), &to.join(plugin));
    }
    copy_program(plugin(), &to.join("margay-ipam"));
    for name in ["calico", "calico-ipam"] {
        symlink("margay-ipam", to.join(name)).unwrap();
    }
    let margay = command();
    assert!(margay.exists(), "{} is missing: cargo build --profile ci -p margay-cli builds it", margay.display());
    copy_program(margay, &to.join("margay"));
}

/// Creates the files of a container image: busybox, and a page for the container's web server.
fn files_for_containers(root: &Path) {
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::create_dir_all(root.join("www")).unwrap();
    let busybox = ["/usr/bin/busybox", "/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    let busybox = busybox.expect("busybox is missing: scripts/setup test installs it");
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    for name in ["httpd", "ip", "ping", "sh", "sleep"] {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    fs::write(root.join("www/page"), PAGE).unwrap();
    fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Lists all control groups (cgroups), outer groups before inner groups.
fn cgroups() -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("/sys/fs/cgroup")];
    let mut next = 0;
    while let Some(folder) = found.get(next) {
        let inner = fs::read_dir(folder).into_iter().flatten().flatten();
        let inner = inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path());
        let inner: Vec<_> = inner.collect();
        found.extend(inner);
        next += 1;
    }
    found
}

/// A running test machine; dropping it stops the machine as by a power cut.
#[derive(Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) machine: &'a Machine,
    /// The boot id that the machine's kernel reports.
    pub(crate) id: String,
    first: Child,
    number: Pid,
}

impl Boot<'_> {
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.number.to_string(), "--mount", "--net", "--pid", "--"]);
        command.args(["env", "-i", "HOME=/root", "PATH=/opt/cni/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]);
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Runs a command on the machine until it exits, and returns its standard output, or its standard error if it
    /// failed.
    pub(crate) fn attempt(&self, words: &[&str]) -> Result<String, String> {
        let output = self.command(&[&["timeout", "-s", "KILL", TEST_TIMEOUT], words].concat()).output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => Ok(said(&output.stdout)),
            false => Err(format!("{words:?} failed with {}: {}", output.status, said(&output.stderr))),
        }
    }

    /// Runs a command that must succeed on the machine, and returns the command's output.
    #[track_caller]
    pub(crate) fn run(&self, words: &[&str]) -> String {
        self.attempt(words).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Runs `margay` on the machine and parses the JSON output.
    #[track_caller]
    pub(crate) fn margay_json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.run(&[&["margay"], words, &["-o", "json"]].concat())).unwrap()
    }

    /// Fetches a web page from a web server, from inside the test machine.
    #[track_caller]
    pub(crate) fn fetch(&self, from: &str) -> String {
        let address: SocketAddr = from.parse().unwrap();
        let space = File::open(format!("/proc/{}/ns/net", self.number)).unwrap();
        let asking = thread::spawn(move || {
            setns(space, CloneFlags::CLONE_NEWNET).unwrap();
            let mut asked = None;
            // The container's web server might not listen yet, so retry.
            for _ in 0..TRIES {
                asked = Some(ask(address));
                if asked.as_ref().is_some_and(Result::is_ok) {
                    break;
                }
                thread::sleep(PAUSE);
            }
            asked.unwrap()
        });
        asking.join().unwrap().unwrap_or_else(|error| panic!("{from} is not reached: {error}"))
    }

    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let mut tries = 0..TRIES;
        while !is() {
            assert!(tries.next().is_some(), "{what}: waited for in vain");
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Boot<'_> {
    fn drop(&mut self) {
        // The machine's first process has not been waited for yet, so the kernel cannot have reused its process id. All
        // other processes of the machine end together with its first process.
        let _ = kill(self.number, Signal::SIGKILL);
        let _ = self.first.wait();
    }
}

/// Parses the addresses in the output of `ip -o addr show`, without prefix lengths.
pub(crate) fn addresses(shown: &str) -> Vec<String> {
    let words: Vec<&str> = shown.split_whitespace().collect();
    let after_inet = words.windows(2).filter(|pair| ["inet", "inet6"].contains(&pair[0])).map(|pair| pair[1]);
    after_inet.map(|cidr| cidr.split('/').next().unwrap().to_owned()).collect()
}

/// Requests the page of a web server, without a retry.
fn ask(address: SocketAddr) -> std::io::Result<String> {
    let patience = Duration::from_secs(10);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    Ok(body.to_owned())
}
