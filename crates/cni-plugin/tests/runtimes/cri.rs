//! Tests with containerd as Kubernetes uses it, where pods are created by CRI calls.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::lab::Engine;
use crate::machine::{Boot, Machine, Masquerade, PAGE};

/// containerd's configuration. containerd's socket is on the machine's disk, where the test process can also reach the
/// socket. AppArmor and overlay mounts are turned off, because the test machines lack them.
const CONFIG: &str = r#"
version = 2
[grpc]
address = "/var/lib/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "margay.test/pause:1"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
"#;

/// Builds the container image of a pod's first process, which serves a web page, unlike Kubernetes' pause process.
const IMAGE: &str = r#"
set -eu
mkdir /var/lib/pause
cd /var/lib/pause
tar -C /opt/rootfs -cf layer.tar .
sum=$(sha256sum layer.tar | cut -d' ' -f1)
cat >config.json <<JSON
{"architecture":"$(dpkg --print-architecture)","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:$sum"]},
"config":{"Entrypoint":["/bin/httpd","-f","-p","80","-h","/www"]}}
JSON
echo '[{"Config":"config.json","RepoTags":["margay.test/pause:1"],"Layers":["layer.tar"]}]' >manifest.json
tar -cf pause.tar manifest.json config.json layer.tar
ctr --address /var/lib/containerd.sock --namespace k8s.io images import --snapshotter native pause.tar
"#;

// These structures for the CRI's messages (runtime.v1) contain only the fields that the tests need.

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxPodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxPodSandboxConfig {
    #[prost(string, tag = "1")]
    cgroup_parent: String,
}

/// The request message of most CRI calls, and the response message of `RunPodSandbox`.
#[derive(Clone, PartialEq, Message)]
struct PodSandboxId {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<PodSandboxStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxStatus {
    #[prost(message, optional, tag = "5")]
    network: Option<PodSandboxNetworkStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxNetworkStatus {
    #[prost(string, tag = "1")]
    ip: String,
}

impl Boot<'_> {
    fn cri_socket(&self) -> PathBuf {
        self.machine.lab.root.path().join("var-lib/containerd.sock")
    }

    fn start_containerd_for_pods(&self) -> Child {
        let mut command = self.command(&["containerd", "--config", "/etc/containerd/config.toml"]);
        let log = std::fs::File::create(self.machine.lab.root.path().join("containerd.log")).unwrap();
        let daemon = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let version = ["ctr", "--address", "/var/lib/containerd.sock", "version"];
        self.wait_until("containerd", || self.attempt(&version).is_ok());
        daemon
    }

    /// Sends a request to containerd's CRI service and returns the response.
    fn cri<Q: Message + 'static, A: Message + Default + 'static>(
        &self,
        method: &'static str,
        request: Q,
    ) -> Result<A, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let socket = self.cri_socket();
            let connector = tower::service_fn(move |_| {
                let socket = socket.clone();
                async move { UnixStream::connect(socket).await.map(TokioIo::new) }
            });
            let endpoint = Endpoint::from_static("http://localhost").timeout(Duration::from_secs(60));
            let channel: Channel =
                endpoint.connect_with_connector(connector).await.map_err(|error| error.to_string())?;
            let mut client = Grpc::new(channel);
            client.ready().await.map_err(|error| error.to_string())?;
            let path = PathAndQuery::from_static(method);
            let answer = client.unary(Request::new(request), path, ProstCodec::<Q, A>::default()).await;
            answer.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
        })
    }

    /// Creates a pod, and returns the id of the pod's sandbox.
    #[track_caller]
    fn run_pod(&self, name: &str) -> PodSandboxId {
        let metadata =
            PodSandboxMetadata { name: name.into(), uid: format!("uid-{name}"), namespace: "default".into() };
        let linux = LinuxPodSandboxConfig { cgroup_parent: format!("/{}/{name}", self.machine.tag) };
        let config = PodSandboxConfig { metadata: Some(metadata), linux: Some(linux) };
        let request = RunPodSandbox { config: Some(config) };
        self.cri("/runtime.v1.RuntimeService/RunPodSandbox", request).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Returns the pod's address as the kubelet would report it.
    #[track_caller]
    fn pod_address(&self, pod: &PodSandboxId) -> String {
        let answer: PodSandboxStatusResponse =
            self.cri("/runtime.v1.RuntimeService/PodSandboxStatus", pod.clone()).unwrap();
        answer.status.and_then(|status| status.network).map(|network| network.ip).unwrap()
    }

    fn stop_pod(&self, pod: &PodSandboxId) {
        self.cri::<_, Nothing>("/runtime.v1.RuntimeService/StopPodSandbox", pod.clone()).unwrap();
    }

    fn remove_pod(&self, pod: &PodSandboxId) {
        self.cri::<_, Nothing>("/runtime.v1.RuntimeService/RemovePodSandbox", pod.clone()).unwrap();
    }
}

/// Tests Margay's main plugin, called as `calico`, for pods.
pub(crate) fn pods_get_routed_addresses_and_leave_nothing(engine: Engine) {
    let machine = Machine::new(engine, Masquerade::No).with_etc("containerd/config.toml", CONFIG);
    let machine = ["10-lab.conflist", "20-dual.conflist"].into_iter().fold(machine, Machine::without_network);
    let boot = machine.boot();
    boot.run(&["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"]);
    let mut daemon = boot.start_containerd_for_pods();
    boot.run(&["sh", "-c", IMAGE]);

    let (web, other) = (boot.run_pod("web"), boot.run_pod("other"));
    let (of_web, of_other) = (boot.pod_address(&web), boot.pod_address(&other));
    assert!(of_web.starts_with("10.90.0.") && of_other.starts_with("10.90.0."), "{of_web} {of_other}");
    assert_ne!(of_web, of_other);
    assert_eq!(boot.in_use("routed"), 2);
    for address in [&of_web, &of_other] {
        assert_eq!(boot.fetch(&format!("{address}:80")), PAGE);
    }
    let endpoints = boot.margay_json(&["get", "workloadendpoints", "-A"]);
    let pods: Vec<_> = endpoints["items"].as_array().unwrap().iter().map(|item| &item["spec"]["pod"]).collect();
    assert_eq!(pods, ["other", "web"], "{endpoints}");

    boot.stop_pod(&web);
    assert_eq!(boot.in_use("routed"), 1);
    // Stop the pod again, as the kubelet repeats CRI calls whose outcome is unknown.
    boot.stop_pod(&web);
    boot.remove_pod(&web);
    assert_eq!(boot.fetch(&format!("{of_other}:80")), PAGE);
    // A pod is identified by its sandbox id, so a second pod with the same name is a different pod.
    let again = boot.run_pod("web");
    assert_eq!(boot.fetch(&format!("{}:80", boot.pod_address(&again))), PAGE);
    for pod in [&again, &other] {
        boot.stop_pod(pod);
        boot.remove_pod(pod);
    }
    boot.nothing_is_left();
    drop(boot);
    daemon.wait().unwrap();
}
