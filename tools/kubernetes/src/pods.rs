//! Pods of the scenarios: their objects, waiting for them, and what they say about their network.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::machine::{Boot, INTERRUPTED, wait_until};

/// The port on which each pod serves.
pub(crate) const PORT: u16 = 8080;
/// Time limit until pods are ready or gone. The host may be busy with other work.
pub(crate) const POD_TIMEOUT: Duration = Duration::from_secs(180);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the template of a pod that serves on [`PORT`], labelled `app: NAME`.
pub(crate) fn template(name: &str) -> Value {
    json!({
        "metadata": {"labels": {"app": name}, "annotations": {}},
        "spec": {
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "main",
                "image": "margay.test/pod:1",
                "imagePullPolicy": "Never",
                "command": ["/pod", "serve", PORT.to_string()],
            }],
        },
    })
}

/// Returns a pod from [`template`], with additional annotations.
pub(crate) fn pod(name: &str, namespace: &str, annotations: &Value) -> Value {
    let mut pod = template(name);
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"]["name"] = name.into();
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["annotations"] = annotations.clone();
    pod
}

/// Returns a Deployment or StatefulSet of pods from [`template`].
pub(crate) fn workload(kind: &str, name: &str, replicas: usize) -> Value {
    let mut spec = json!({
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": template(name),
    });
    if kind == "StatefulSet" {
        spec["podManagementPolicy"] = "Parallel".into();
        spec["serviceName"] = name.into();
    }
    json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "default"}, "spec": spec})
}

/// A pod as the API shows it.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ready: bool,
    pub(crate) object: Value,
}

impl Pod {
    fn of(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let addresses = object["status"]["podIPs"].as_array().cloned().unwrap_or_default();
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        Self {
            name: text(&object["metadata"]["name"]),
            namespace: text(&object["metadata"]["namespace"]),
            addresses: addresses.iter().filter_map(|entry| entry["ip"].as_str()?.parse().ok()).collect(),
            ready: conditions.iter().any(is_ready) && object["metadata"]["deletionTimestamp"].is_null(),
            object: object.clone(),
        }
    }

    #[track_caller]
    pub(crate) fn address(&self) -> IpAddr {
        *self.addresses.first().unwrap_or_else(|| panic!("{} has no address", self.name))
    }
}

impl Cluster {
    /// Lists the pods with the label `app: NAME` in all namespaces.
    pub(crate) fn pods(&self, name: &str) -> Result<Vec<Pod>, String> {
        let list = self.try_get(&["pods", "-A", "-l", &format!("app={name}")])?;
        Ok(list["items"].as_array().into_iter().flatten().map(Pod::of).collect())
    }

    /// Waits until the API shows exactly `count` pods with the label `app: NAME`, all of them ready.
    #[track_caller]
    pub(crate) fn wait_for_pods(&mut self, name: &str, count: usize) -> Vec<Pod> {
        wait_until(&format!("{count} pods of {name}"), POD_TIMEOUT, || {
            self.must_run();
            let pods = self.pods(name)?;
            let ready = pods.iter().filter(|pod| pod.ready).count();
            match ready == count && pods.len() == count {
                true => Ok(pods),
                false => Err(format!("{ready} are ready of {}", pods.len())),
            }
        })
    }

    /// Deletes an object, and waits until all pods with the label `app: NAME` are gone.
    #[track_caller]
    pub(crate) fn delete(&mut self, kind: &str, name: &str) {
        self.kubectl(&["delete", kind, name, "--wait=false"]).unwrap();
        self.wait_until_gone(name);
    }

    #[track_caller]
    pub(crate) fn wait_until_gone(&mut self, name: &str) {
        wait_until(&format!("the end of the pods of {name}"), POD_TIMEOUT, || {
            self.must_run();
            let pods = self.pods(name)?;
            if pods.is_empty() { Ok(()) } else { Err(format!("{} are left", pods.len())) }
        });
    }

    /// Requests a page of a pod's server from the node, until the server answers.
    #[track_caller]
    pub(crate) fn fetch(&self, address: IpAddr, port: u16, path: &str) -> String {
        wait_until(&format!("http://{}{path}", SocketAddr::new(address, port)), Duration::from_secs(30), || {
            self.try_fetch(address, port, path)
        })
    }

    pub(crate) fn try_fetch(&self, address: IpAddr, port: u16, path: &str) -> Result<String, String> {
        let space = self.boot().network_namespace();
        let path = path.to_owned();
        // A thread of its own, since a thread that has entered the machine's namespace stays there.
        let asking = thread::spawn(move || {
            setns(space, CloneFlags::CLONE_NEWNET).map_err(|error| error.to_string())?;
            request(SocketAddr::new(address, port), &path).map_err(|error| error.to_string())
        });
        asking.join().unwrap()
    }
}

fn request(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, REQUEST_TIMEOUT)?;
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.trim().to_owned()),
        _ => Err(std::io::Error::other(body.trim().to_owned())),
    }
}

/// Watches the pods of a namespace, and notes when each of them was first ready.
#[derive(Debug)]
pub(crate) struct Watch {
    child: Child,
    events: Receiver<(Instant, Value)>,
}

impl Watch {
    pub(crate) fn start(boot: &Boot) -> Self {
        let words = ["kubectl", "get", "pods", "-n", "default", "--watch", "--output-watch-events", "-o", "json"];
        let mut child = boot.command(&words).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let (sender, events) = channel();
        thread::spawn(move || {
            let events = serde_json::Deserializer::from_reader(std::io::BufReader::new(output)).into_iter::<Value>();
            for event in events.map_while(Result::ok) {
                if sender.send((Instant::now(), event)).is_err() {
                    break;
                }
            }
        });
        Self { child, events }
    }

    /// Waits until `count` pods have been ready, and returns when each was.
    #[track_caller]
    pub(crate) fn until_ready(&self, count: usize) -> BTreeMap<String, Instant> {
        let until = Instant::now() + POD_TIMEOUT;
        let mut ready = BTreeMap::new();
        while ready.len() < count {
            assert!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
            assert!(Instant::now() < until, "{count} pods: {} are ready", ready.len());
            let Ok((when, event)) = self.events.recv_timeout(Duration::from_secs(1)) else { continue };
            let pod = Pod::of(&event["object"]);
            if pod.ready {
                ready.entry(pod.name).or_insert(when);
            }
        }
        ready
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
