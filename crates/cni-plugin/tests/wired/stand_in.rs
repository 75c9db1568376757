//! A stand-in for Margay's plugin, which makes the recorded changes with `ip` and `sysctl` so that the replay itself
//! can be tested.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::Mode;
use crate::call::{Call, Came};
use crate::kubernetes::ADDRESS;
use crate::place::{shell, within};
use crate::record::{Documents, is_call, replaced};
use crate::replay::Stage;

/// Acts as the main plugin in a replay: makes the changes that were recorded for a successful ADD, or for a DEL.
pub(crate) fn as_recorded(stage: &mut Stage, call: &Call, step: &Value) -> Came {
    assert!(is_call(step));
    ask_api(step);
    run_ipam(stage, call, step);
    let netns = step["env"]["CNI_NETNS"].as_str().unwrap_or_default();
    let netns = netns.trim_start_matches("<netns:").trim_end_matches('>');
    let interface = step["env"]["CNI_IFNAME"].as_str().unwrap();
    let host_interfaces = step["host"]["interfaces"].as_object();
    if step["do"] == "ADD" && step["exit"] == 0 {
        // In the recording, the host interface of an ADD is the one that exists only after the ADD.
        let made = host_interfaces
            .unwrap()
            .keys()
            .find(|name| !fs::exists(format!("/proc/sys/net/ipv4/conf/{name}")).unwrap());
        let made = made.map(String::as_str).or_else(|| step["stdout"]["interfaces"][0]["name"].as_str()).unwrap();
        wire(step, netns, interface, made);
    } else if step["do"] == "DEL" && step.get("state").is_none() {
        shell(&format!("ip -n {netns} link del {interface}"));
    }
    let texts = fillings(stage, step, netns, interface);
    let texts: Vec<(&str, &str)> = texts.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    write(stage, step, &texts);
    let stdout = replaced(&stage.place.concrete(&step["stdout"]), &texts);
    let outcome = if stdout.is_null() {
        json!({"exit": step["exit"], "stdout_text": step["stdout_text"]})
    } else {
        json!({"exit": step["exit"], "stdout": stdout})
    };
    Came { outcome, stdin: call.stdin.clone(), stderr: String::new() }
}

/// Sends the requests that Margay would send to the Kubernetes API.
fn ask_api(step: &Value) {
    let requests = step["api_requests"].as_array().into_iter().flatten();
    for request in requests.filter(|request| request["by"] != "calico-ipam") {
        let mut stream = TcpStream::connect(ADDRESS).unwrap();
        let path = request["path"].as_str().unwrap();
        let head = "user-agent: margay/0\r\naccept: application/json";
        write!(stream, "GET {path} HTTP/1.1\r\nhost: k\r\n{head}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    }
}

/// Calls the IPAM plugins as the recorded main plugin did.
fn run_ipam(stage: &Stage, call: &Call, step: &Value) {
    for ipam in step["ipam_calls"].as_array().unwrap() {
        let name = ipam["plugin"].as_str().unwrap();
        // In the mode `InProcess`, IPAM calls bypass the recording wrappers (spies).
        let folder = if stage.mode == Mode::Child { "bin" } else { crate::spy::PLUGINS };
        let env = stage.place.concrete(&ipam["env"]);
        let env = env.as_object().unwrap().iter().map(|(name, value)| (name, value.as_str().unwrap()));
        let stdin = match &ipam["stdin"] {
            Value::String(_) => call.stdin.clone(),
            changed => stage.place.concrete(changed).to_string(),
        };
        let mut plugin = Command::new(stage.place.root.join(folder).join(name))
            .env_clear()
            .envs(env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        plugin.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
        plugin.wait_with_output().unwrap();
    }
}

/// Returns the addresses of a CNI result, in the result format of old or new CNI versions.
fn addresses(step: &Value) -> Vec<String> {
    let new = step["stdout"]["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let old = ["ip4", "ip6"].iter().map(|family| &step["stdout"][family]["ip"]);
    new.chain(old).filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Creates a container's interface pair and its routes, in the same order as the recorded plugin.
fn wire(step: &Value, netns: &str, interface: &str, host: &str) {
    let addresses = addresses(step);
    let (six, four): (Vec<&String>, Vec<&String>) = addresses.iter().partition(|address| address.contains(':'));
    let conf = &step["stdin"];
    let mtu = conf["mtu"].as_u64().map(|mtu| format!("mtu {mtu}")).unwrap_or_default();
    let queues = conf["num_queues"].as_i64().unwrap_or(1).max(1);
    let queues = format!("numtxqueues {queues} numrxqueues {queues}");
    let inside = |line: &str| shell(&format!("ip -n {netns} {line}"));
    let set = |settings: Vec<(String, &str)>| {
        for (path, value) in settings {
            fs::write(format!("/proc/sys/net/{path}"), value).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    };

    shell(&format!("ip link del {host} 2>/dev/null || true"));
    shell(&format!(
        "ip link add {host} txqueuelen 0 {mtu} {queues} type veth peer name {interface} {mtu} {queues} netns {netns}"
    ));
    shell(&format!("ip link set {host} address ee:ee:ee:ee:ee:ee"));
    if !six.is_empty() {
        within(netns, || set(vec![(format!("ipv6/conf/{interface}/accept_dad"), "0")]));
    }
    if !four.is_empty() {
        let conf = |name: &str| format!("ipv4/conf/{host}/{name}");
        set(vec![(conf("route_localnet"), "1"), (format!("ipv4/neigh/{host}/proxy_delay"), "0")]);
        set(vec![(conf("proxy_arp"), "1"), (conf("forwarding"), "1")]);
    }
    let conf6 = |name: &str| format!("ipv6/conf/{host}/{name}");
    if !six.is_empty() {
        set(vec![(conf6("accept_dad"), "0"), (conf6("disable_ipv6"), "0")]);
        set(vec![(conf6("proxy_ndp"), "1"), (conf6("forwarding"), "1")]);
    }
    set(vec![(conf6("accept_ra"), "0")]);
    shell(&format!("ip link set {host} up"));
    inside(&format!("link set {interface} up"));

    let of_pod = step["stdin"]["name"] == "k8s-net";
    let chosen = step["stdin"]["ipam"]["routes"].as_array().filter(|_| of_pod);
    let chosen = chosen.into_iter().flatten().map(|route| route["dst"].as_str().unwrap().to_owned());
    let mut routes: Vec<String> = chosen.collect();
    if routes.is_empty() || step["stdin"]["include_default_routes"] == true {
        routes.splice(0..0, ["0.0.0.0/0".to_owned(), "::/0".to_owned()]);
    }
    if !four.is_empty() {
        inside(&format!("route add 169.254.1.1/32 dev {interface} scope link"));
        for route in routes.iter().filter(|route| !route.contains(':')) {
            inside(&format!("route add {route} via 169.254.1.1 dev {interface}"));
        }
    }
    if !six.is_empty() {
        within(netns, || {
            set(["all", "default", "lo"].map(|name| (format!("ipv6/conf/{name}/disable_ipv6"), "0")).to_vec());
        });
        for route in routes.iter().filter(|route| route.contains(':')) {
            inside(&format!("-6 route add {route} via fe80::ecee:eeff:feee:eeee dev {interface}"));
        }
    }
    for address in four.iter().chain(&six) {
        inside(&format!("addr add {address} dev {interface}"));
    }
    let forwards = if step["stdin"]["container_settings"]["allow_ip_forwarding"] == true { "1" } else { "0" };
    within(netns, || {
        if !four.is_empty() {
            set(vec![("ipv4/ip_forward".to_owned(), forwards)]);
        }
        if !six.is_empty() {
            set(vec![("ipv6/conf/all/forwarding".to_owned(), forwards)]);
        }
    });
    for address in &addresses {
        let scope = if address.contains(':') { "" } else { "scope link" };
        shell(&format!("ip route add {address} dev {host} {scope}"));
    }
}

/// Returns the strings that replace the placeholders of a recorded step.
fn fillings(stage: &Stage, step: &Value, netns: &str, interface: &str) -> BTreeMap<String, String> {
    let text = step.to_string();
    let mut fillings = BTreeMap::from([("<time>".to_owned(), "2026-11-24T01:02:03Z".to_owned())]);
    for kind in ["<mac:", "<uid:"] {
        for placeholder in text.match_indices(kind).map(|(at, _)| text[at..].split_inclusive('>').next().unwrap()) {
            let new = || match kind {
                "<mac:" => {
                    let path = format!("/sys/class/net/{interface}/address");
                    // `ip netns exec` mounts a /sys that shows the named network namespace.
                    let output = Command::new("ip").args(["netns", "exec", netns, "cat", &path]).output().unwrap();
                    String::from_utf8(output.stdout).unwrap().trim().to_owned()
                }
                _ => uuid::Uuid::new_v4().to_string(),
            };
            let bound = stage.bindings.get(placeholder).map_or_else(new, str::to_owned);
            fillings.entry(placeholder.to_owned()).or_insert(bound);
        }
    }
    fillings
}

/// Changes the store's documents to the documents that were recorded after the step.
fn write(stage: &Stage, step: &Value, texts: &[(&str, &str)]) {
    let Some(recorded) = step["etcd"]["documents"].as_object() else { return };
    let outside = |key: &str| key.contains("/profiles/") || key.contains("/workloadendpoints/");
    for key in stage.books.all().keys().filter(|key| outside(key) && !recorded.contains_key(*key)) {
        stage.books.delete(key);
    }
    let documents: Documents = recorded.iter().map(|(key, value)| (key.clone(), replaced(value, texts))).collect();
    stage.books.put_all(&documents);
}
