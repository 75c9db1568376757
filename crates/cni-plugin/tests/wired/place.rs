//! The machine on which a recorded case is replayed. The machine is a thread with its own network, mounts and host
//! name, which vanish when the thread ends.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::statfs;
use serde_json::{Value, json};

use crate::record::{record, replaced};
use crate::spy::PLUGINS;
use crate::{Mode, kubernetes};

/// The address of a test case's etcd in the case's own network namespace.
pub(crate) const ETCD: &str = "127.0.0.1:2379";
/// The host name of the machine on which the recording was made.
const HOST_NAME: &str = "Recorder.Example";
/// The folder of the named network namespaces.
pub(crate) const NETNS: &str = "/run/netns";

/// Whether the host of a test case forwards IPv4 packets. While the recording was made, the host and its new network
/// namespaces forwarded IPv4 packets, until one case turned forwarding off for all later cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forwarding {
    On,
    Off,
}

impl Forwarding {
    /// Returns whether the host forwarded IPv4 packets when the given case was recorded.
    pub(crate) fn of(case: &str) -> Self {
        let place = |name: &str| record().cases.iter().position(|case| case.name == name);
        if place(case) > place("netns-of-the-host") { Self::Off } else { Self::On }
    }
}

/// The files and paths of a test case's machine.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) root: PathBuf,
    /// Pairs of a placeholder and the string for which it stands.
    texts: Vec<(String, String)>,
}

impl Place {
    /// Simulates a separate machine: moves the calling thread to new network, mount and UTS namespaces. `root` is an
    /// empty folder, which becomes the machine's disk.
    pub(crate) fn enter(root: &Path, mode: Mode, forwarding: Forwarding) -> Self {
        for folder in ["bin", "files", PLUGINS, "var-lib/calico", "var-lib/cni", "var-log"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS).unwrap();
        let none: Option<&Path> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        for (from, to) in [("var-lib", "/var/lib"), ("var-log", "/var/log")] {
            mount(Some(&root.join(from)), to, none, MsFlags::MS_BIND, none).unwrap();
        }
        mount(none, "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=755")).unwrap();
        nix::unistd::sethostname(HOST_NAME).unwrap();
        shell("ip link set lo up");
        set_as_recorded(forwarding);

        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let mut texts = vec![
            ("<etcd>".to_owned(), ETCD.to_owned()),
            ("<api>".to_owned(), format!("http://{}", kubernetes::ADDRESS)),
            ("<bin>".to_owned(), text(root.join("bin"))),
            ("<files>".to_owned(), text(root.join("files"))),
        ];
        texts.extend(["a", "b", "c"].map(|name| (format!("<netns:{name}>"), format!("{NETNS}/{name}"))));
        // The recording was made on an ext4 file system, and one recorded error contains the file system type's number
        // in hexadecimal.
        let kind = statfs(root).unwrap().filesystem_type().0;
        texts.push(("/plain\": ef53".to_owned(), format!("/plain\": {kind:x}")));
        let place = Self { root: root.to_owned(), texts };
        place.install(mode);
        fs::write(root.join("files/kubeconfig"), place.kubeconfig().to_string()).unwrap();
        place
    }

    /// Installs the plugins where the main plugin searches for them, each IPAM plugin behind a wrapper (spy) that
    /// records its calls.
    fn install(&self, mode: Mode) {
        let (bin, plugins) = (self.root.join("bin"), self.root.join(PLUGINS));
        // One binary contains all plugins, and the name under which the binary is called selects the plugin.
        let main = env!("CARGO_BIN_EXE_margay-ipam");
        symlink(main, bin.join("calico")).unwrap();
        symlink(main, plugins.join("calico-ipam")).unwrap();
        symlink(host_local(), plugins.join("host-local")).unwrap();
        for (name, script) in &record().ipam_plugins {
            let path = plugins.join(name);
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        let spy = std::env::current_exe().unwrap();
        for plugin in plugins.read_dir().unwrap() {
            let name = plugin.unwrap().file_name();
            let of_the_main_plugin = mode == Mode::InProcess && name == "calico-ipam";
            symlink(if of_the_main_plugin { Path::new(main) } else { &spy }, bin.join(&name)).unwrap();
        }
    }

    fn kubeconfig(&self) -> Value {
        self.concrete(&json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "<api>"}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}]}))
    }

    /// Replaces the recording's placeholders in a JSON value with their strings.
    pub(crate) fn concrete(&self, value: &Value) -> Value {
        let texts: Vec<(&str, &str)> = self.texts.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
        replaced(value, &texts)
    }

    pub(crate) fn text(&self, text: &str) -> String {
        self.texts.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    }

    /// Creates a named network namespace as a runtime does, with only the interface `lo`, which is up.
    pub(crate) fn add_netns(name: &str) {
        shell(&format!("ip netns add {name}"));
        within(name, || {
            set_as_recorded(Forwarding::On);
            shell("ip link set lo up");
        });
    }

    /// Runs a recorded shell command in the namespaces of this machine.
    pub(crate) fn run(&self, line: &str) {
        // By default a veth interface has one queue per processor, and the recording was made with two processors.
        let two = "numtxqueues 2 numrxqueues 2";
        let pair = format!("{two} type veth peer {two} name ");
        shell(&self.text(line).replace("type veth peer name ", &pair));
        for name in line.split("ip netns add ").skip(1) {
            let name = name.split([' ', ';']).next().unwrap();
            within(name, || set_as_recorded(Forwarding::On));
        }
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = PathBuf::from(self.text(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// Runs a function in the network namespace with the given name.
pub(crate) fn within<T: Send>(name: &str, run: impl FnOnce() -> T + Send) -> T {
    let space = File::open(Path::new(NETNS).join(name)).unwrap();
    let inside = || {
        setns(space, CloneFlags::CLONE_NEWNET).unwrap();
        run()
    };
    std::thread::scope(|scope| scope.spawn(inside).join().unwrap())
}

/// Gives a new network namespace the settings that network namespaces had on the machine of the recording. By default,
/// a new network namespace inherits the IPv4 settings of the machine that runs the tests.
fn set_as_recorded(forwarding: Forwarding) {
    for name in ["proxy_arp", "route_localnet", "rp_filter"] {
        for interface in ["all", "default", "lo"] {
            fs::write(format!("/proc/sys/net/ipv4/conf/{interface}/{name}"), "0").unwrap();
        }
    }
    // Writing `ip_forward` also sets the forwarding default for new interfaces.
    let value = if forwarding == Forwarding::On { "1" } else { "0" };
    fs::write("/proc/sys/net/ipv4/ip_forward", value).unwrap();
}

/// Runs a shell command in the calling thread's namespaces.
#[track_caller]
pub(crate) fn shell(line: &str) {
    let output = Command::new("sh").args(["-c", line]).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

fn host_local() -> PathBuf {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
    let found = folders.map(|folder| Path::new(folder).join("host-local")).into_iter().find(|path| path.exists());
    found.expect("host-local is missing: scripts/setup test installs it")
}
