//! A Kubernetes of one node on a machine of its own: starts, kills and restarts its programs.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine;
use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::{Value, json};

use crate::machine::{Boot, Machine, NODE, NODE_ADDRESS, Part, wait_until};
use crate::network::{CONFLIST, Setup};

/// Time limit for a program or the node to become ready. The host may be busy with other work.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(180);
/// The port of the daemon's metrics.
const DAEMON_PORT: u16 = 9099;
const API: &str = "https://127.0.0.1:6443";

/// Users of the API: file name, user name, group. Each has a token of its own.
const USERS: [(&str, &str, &str); 5] = [
    ("admin", "admin", "system:masters"),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("kubelet", "system:node:node1", "system:nodes"),
    ("plugin", "margay-plugin", ""),
];

/// What the plugin may do at the API: read its pods and their namespaces.
const PLUGIN_ROLE: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: margay-plugin}
rules:
- {apiGroups: [""], resources: [pods, namespaces], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: margay-plugin}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: margay-plugin}
subjects: [{kind: User, name: margay-plugin, apiGroup: rbac.authorization.k8s.io}]
"#;

/// containerd's configuration, apart from its default. Nothing needs AppArmor or overlay mounts for one small file.
const CONTAINERD: &str = r#"
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "margay.test/pod:1"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"
"#;

/// Makes the only container image of one program, without a registry.
const IMAGE: &str = r#"
set -eu
mkdir -p /var/lib/image
cd /var/lib/image
tar -C /opt/rootfs -cf layer.tar .
sum=$(sha256sum layer.tar | cut -d' ' -f1)
cat >config.json <<JSON
{"architecture":"$(dpkg --print-architecture)","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:$sum"]},
"config":{"Entrypoint":["/pod","pause"]}}
JSON
echo '[{"Config":"config.json","RepoTags":["margay.test/pod:1"],"Layers":["layer.tar"]}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
# By default ctr 2 has containerd import the image, which would need a configuration for this snapshotter.
local=""
if ctr images import --help | grep -q -- --local; then local=--local; fi
ctr --namespace k8s.io images import $local --snapshotter native image.tar >/dev/null
"#;

/// A running Kubernetes. Dropping it stops its machine and deletes its files.
#[derive(Debug)]
pub(crate) struct Cluster {
    // Fields are dropped in this order: the programs, the running machine, its disk.
    parts: Vec<Part>,
    boot: Boot,
    machine: Machine,
    pub(crate) setup: Setup,
}

impl Cluster {
    /// Creates the machine of a Kubernetes that has not been started.
    pub(crate) fn new(setup: Setup) -> Self {
        let machine = Machine::new();
        write_files(&machine);
        Setup::write_files(machine.disk());
        Self { parts: Vec::new(), boot: machine.boot(), machine, setup }
    }

    /// Starts Kubernetes for the first time, and waits until its node is ready.
    pub(crate) fn start(&mut self) {
        self.start_containerd();
        // The image is imported before the kubelet starts, which would not find it otherwise.
        self.run(&["sh", "-c", IMAGE]);
        self.start_all();
        self.apply(PLUGIN_ROLE);
        self.setup.prepare_store(self);
        self.start_daemon();
        self.wait_for_node();
    }

    pub(crate) fn has_started(&self) -> bool {
        !self.parts.is_empty()
    }

    pub(crate) fn start_containerd(&mut self) {
        self.start_part("containerd");
        wait_until("containerd", START_TIMEOUT, || {
            self.must_run();
            self.attempt(&["ctr", "version"])
        });
    }

    /// Starts everything that runs on the node apart from containerd and the daemon.
    fn start_all(&mut self) {
        self.start_part("etcd");
        self.start_part("kube-apiserver");
        wait_until("the API server", START_TIMEOUT, || {
            self.must_run();
            self.kubectl(&["get", "--raw", "/readyz"])
        });
        for name in ["kube-controller-manager", "kube-scheduler", "kubelet"] {
            self.start_part(name);
        }
    }

    pub(crate) fn start_daemon(&mut self) {
        if self.setup.serve {
            self.start_part("margay-serve");
            let store = self.setup.store_url();
            let name = self.run(&["margay", "--store", &store, "serve", "--name"]);
            let socket = format!("/run/margay/serve/{name}.sock");
            wait_until("the daemon", START_TIMEOUT, || {
                self.must_run();
                self.attempt(&["test", "-S", &socket])
            });
        }
    }

    /// Returns how many calls of a verb the daemon has served since it was started.
    #[track_caller]
    pub(crate) fn served_by_daemon(&self, verb: &str) -> usize {
        let metrics = self.fetch([127, 0, 0, 1].into(), DAEMON_PORT, "/metrics");
        let start = format!("margay_serve_answers_total{{verb=\"{verb}\",result=\"done\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or(0)
    }

    /// Reboots the machine, as after a power cut.
    pub(crate) fn reboot(&mut self) {
        self.boot.stop();
        self.parts.clear();
        self.boot = self.machine.boot();
        self.start_containerd();
        self.start_all();
        self.start_daemon();
        self.wait_for_node();
    }

    pub(crate) fn wait_for_node(&mut self) {
        wait_until("the node", START_TIMEOUT, || {
            self.must_run();
            match self.node_is_ready()? {
                true => Ok(()),
                false => Err(format!("{}", self.node_condition("Ready")?)),
            }
        });
        // Pods cannot be created before their namespace has a service account.
        wait_until("a service account", START_TIMEOUT, || {
            self.kubectl(&["get", "serviceaccount", "default", "-n", "default"])
        });
    }

    pub(crate) fn node_is_ready(&self) -> Result<bool, String> {
        Ok(self.node_condition("Ready")?["status"] == "True")
    }

    fn node_condition(&self, kind: &str) -> Result<Value, String> {
        let node = self.try_get(&["node", NODE])?;
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default())
    }

    /// Starts a program of the node.
    pub(crate) fn start_part(&mut self, name: &'static str) {
        let words = self.words(name);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.parts.push(self.boot.start(name, &words));
    }

    /// Ends a program of the node by a signal.
    pub(crate) fn end_part(&mut self, name: &str, signal: Signal) {
        let place = self.parts.iter().position(|part| part.name == name);
        self.parts.remove(place.unwrap_or_else(|| panic!("{name} does not run"))).end(signal);
    }

    /// Panics if a program of the node has ended by itself.
    #[track_caller]
    pub(crate) fn must_run(&mut self) {
        self.parts.iter_mut().for_each(Part::must_run);
    }

    fn words(&self, name: &str) -> Vec<String> {
        let kubeconfig = |user: &str| format!("--kubeconfig=/var/lib/kubernetes/{user}.conf");
        let of = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let (program, rest) = match name {
            "containerd" => ("containerd", of(&["--config", "/etc/containerd/config.toml"])),
            "etcd" => {
                ("etcd", of(&["--data-dir", "/var/lib/etcd", "--logger", "zap", "--log-level", "warn", "--name", NODE]))
            }
            "kube-apiserver" => (
                name,
                of(&[
                    "--etcd-servers=http://127.0.0.1:2379",
                    &format!("--advertise-address={NODE_ADDRESS}"),
                    "--secure-port=6443",
                    "--tls-cert-file=/var/lib/kubernetes/server.pem",
                    "--tls-private-key-file=/var/lib/kubernetes/server.key",
                    "--token-auth-file=/var/lib/kubernetes/tokens.csv",
                    "--authorization-mode=Node,RBAC",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    "--service-account-key-file=/var/lib/kubernetes/accounts.pub",
                    "--service-account-signing-key-file=/var/lib/kubernetes/accounts.key",
                    "--service-cluster-ip-range=10.96.0.0/16",
                    "--kubelet-preferred-address-types=InternalIP",
                    "--allow-privileged=true",
                    "--profiling=false",
                ]),
            ),
            "kube-controller-manager" => (
                name,
                of(&[
                    &kubeconfig("controller-manager"),
                    "--service-account-private-key-file=/var/lib/kubernetes/accounts.key",
                    "--root-ca-file=/var/lib/kubernetes/authority.pem",
                    "--use-service-account-credentials=true",
                    "--leader-elect=false",
                    "--bind-address=127.0.0.1",
                    "--profiling=false",
                ]),
            ),
            "kube-scheduler" => (
                name,
                of(&[
                    &kubeconfig("scheduler"),
                    "--leader-elect=false",
                    "--bind-address=127.0.0.1",
                    "--profiling=false",
                ]),
            ),
            "kubelet" => (
                name,
                of(&[
                    "--config=/var/lib/kubernetes/kubelet.json",
                    &kubeconfig("kubelet"),
                    &format!("--hostname-override={NODE}"),
                    &format!("--node-ip={NODE_ADDRESS}"),
                    "--v=2",
                ]),
            ),
            "margay-serve" => (
                "margay",
                of(&["--store", &self.setup.store_url(), "serve", "--http", &format!("127.0.0.1:{DAEMON_PORT}")]),
            ),
            _ => panic!("which program is {name}?"),
        };
        std::iter::once(program.to_owned()).chain(rest).collect()
    }

    /// Runs a command on the machine; see [`Boot::attempt`].
    pub(crate) fn attempt(&self, words: &[&str]) -> Result<String, String> {
        self.boot.attempt(words)
    }

    #[track_caller]
    pub(crate) fn run(&self, words: &[&str]) -> String {
        self.boot.run(words)
    }

    pub(crate) fn boot(&self) -> &Boot {
        &self.boot
    }

    pub(crate) fn disk(&self) -> &Path {
        self.machine.disk()
    }

    /// Runs `margay` on the network's store, and parses its JSON output.
    pub(crate) fn margay(&self, words: &[&str]) -> Result<Value, String> {
        let store = self.setup.store_url();
        let output = self.attempt(&[&["margay", "--store", &store, "-o", "json"], words].concat())?;
        serde_json::from_str(&output).map_err(|error| format!("{words:?}: {error}: {output}"))
    }

    pub(crate) fn kubectl(&self, words: &[&str]) -> Result<String, String> {
        self.attempt(&[&["kubectl", "--request-timeout=60s"], words].concat())
    }

    /// Fetches objects from the API. Of several objects, the list is in the member `items`.
    pub(crate) fn try_get(&self, words: &[&str]) -> Result<Value, String> {
        let output = self.kubectl(&[&["get", "-o", "json"], words].concat())?;
        serde_json::from_str(&output).map_err(|error| error.to_string())
    }

    /// Creates or changes the objects of a text in YAML or JSON.
    #[track_caller]
    pub(crate) fn apply(&self, text: &str) {
        let mut command = self.boot.command(&["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "kubectl apply: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Copies the logs of all programs to a folder that stays.
    pub(crate) fn keep_logs(&self, to: &Path) {
        let _ = fs::create_dir_all(to);
        let log = self.disk().join("log");
        for file in fs::read_dir(&log).into_iter().flatten().flatten() {
            let _ = fs::copy(file.path(), to.join(file.file_name()));
        }
        let pods = self.kubectl(&["get", "pods,nodes", "-A", "-o", "wide"]);
        let events = self.kubectl(&["get", "events", "-A", "--sort-by=.lastTimestamp"]);
        for (name, text) in [("pods", pods), ("events", events)] {
            let _ = fs::write(to.join(name), text.unwrap_or_else(|failure| failure));
        }
    }

    /// Writes the network's configuration, with additional members for its section `ipam`. The runtime notices it.
    pub(crate) fn set_network(&self, ipam: &Value) {
        self.set_network_of(self.setup, ipam);
    }

    /// Writes the configuration of another set-up's network.
    pub(crate) fn set_network_of(&self, setup: Setup, ipam: &Value) {
        let path = self.disk().join(CONFLIST);
        // Plugin folders are watched: the file appears complete.
        let new = path.with_extension("new");
        fs::write(&new, setup.conflist(ipam).to_string()).unwrap();
        fs::rename(new, path).unwrap();
    }
}

/// Writes certificates, tokens and configurations of Kubernetes' programs and of containerd.
fn write_files(machine: &Machine) {
    let disk = machine.disk();
    let folder = disk.join("var-lib/kubernetes");
    for path in [&folder, &disk.join("etc/containerd"), &disk.join("opt/rootfs"), &disk.join("opt/bin")] {
        fs::create_dir_all(path).unwrap();
    }
    let write = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
    let authority = write_certificates(&write);
    let mut tokens = String::new();
    for (file, user, group) in USERS {
        let token = uuid::Uuid::new_v4().simple().to_string();
        tokens.push_str(&format!("{token},{user},{user},{group}\n"));
        write(&format!("{file}.conf"), kubeconfig(&authority, &token).to_string());
    }
    write("tokens.csv", tokens);
    write("kubelet.json", kubelet(&machine.tag).to_string());
    fs::write(disk.join("etc/containerd/config.toml"), CONTAINERD).unwrap();
    testkit::copy::copy_program(crate::programs::pod(), &disk.join("opt/rootfs/pod"));
    testkit::copy::copy_program(crate::programs::margay("margay"), &disk.join("opt/bin/margay"));
}

/// Writes the certificates of the API server and its authority, and the key that signs service accounts' tokens.
/// Returns the authority's certificate.
fn write_certificates(write: &impl Fn(&str, String)) -> String {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "make kubernetes");
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names = ["127.0.0.1", NODE_ADDRESS, "10.96.0.1", "localhost", "kubernetes.default.svc"].map(str::to_owned);
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
    write("authority.pem", authority.pem());
    write("server.pem", certificate.pem());
    write("server.key", key.serialize_pem());
    let accounts = KeyPair::generate().unwrap();
    write("accounts.key", accounts.serialize_pem());
    write("accounts.pub", accounts.public_key_pem());
    authority.pem()
}

/// Returns a kubeconfig (JSON is YAML as well).
fn kubeconfig(authority: &str, token: &str) -> Value {
    let encoded = base64::engine::general_purpose::STANDARD.encode(authority);
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": {"server": API, "certificate-authority-data": encoded}}],
        "users": [{"name": "lab", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        "current-context": "lab",
    })
}

fn kubelet(tag: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{tag}"),
        "failSwapOn": false,
        "failCgroupV1": false,
        // The machine has no name server; and no file outside of it is written.
        "resolvConf": "",
        "volumePluginDir": "/var/lib/kubelet/plugins",
        "maxPods": 110,
        // The host's disk may be nearly full, and is none of the scenarios' concern.
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
    })
}
