//! Reads the state of a machine (interfaces, addresses, routes and settings) in the format of the recording.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};

use crate::place::{NETNS, within};

/// The settings that are compared for each interface of the host, as paths in `/proc/sys/net`.
const OF_THE_HOST: [&str; 10] = [
    "ipv4/conf/<if>/route_localnet",
    "ipv4/conf/<if>/proxy_arp",
    "ipv4/conf/<if>/forwarding",
    "ipv4/conf/<if>/rp_filter",
    "ipv4/neigh/<if>/proxy_delay",
    "ipv6/conf/<if>/accept_dad",
    "ipv6/conf/<if>/disable_ipv6",
    "ipv6/conf/<if>/proxy_ndp",
    "ipv6/conf/<if>/forwarding",
    "ipv6/conf/<if>/accept_ra",
];
/// The settings that are compared for each container and for each interface of the container.
const OF_A_CONTAINER: [&str; 5] = [
    "ipv4/ip_forward",
    "ipv6/conf/all/forwarding",
    "ipv6/conf/all/disable_ipv6",
    "ipv6/conf/default/disable_ipv6",
    "ipv6/conf/lo/disable_ipv6",
];
const OF_ITS_INTERFACES: [&str; 2] = ["ipv6/conf/<if>/disable_ipv6", "ipv6/conf/<if>/accept_dad"];

/// Interface flags that the kernel may still change some time after the interface was configured.
const SETTLE_LATER: [&str; 3] = ["LOWER_UP", "NO-CARRIER", "M-DOWN"];

/// Returns the host's part of the state, read in the calling thread's network namespace.
pub(crate) fn host() -> Value {
    let shown = Shown::here();
    let mut interfaces = Map::new();
    for (name, mut interface) in shown.interfaces() {
        interface.insert("routes".to_owned(), shown.routes(Some(&name)));
        let settings: Map<String, Value> =
            OF_THE_HOST.iter().map(|path| ((*path).to_owned(), setting(&path.replace("<if>", &name)))).collect();
        interface.insert("sysctls".to_owned(), settings.into());
        interfaces.insert(name, interface.into());
    }
    json!({"links": interfaces.keys().collect::<Vec<_>>(), "interfaces": interfaces})
}

/// Returns the state of all containers, that is, of all named network namespaces.
pub(crate) fn containers() -> Value {
    let names = fs::read_dir(NETNS).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).map(|name| (name.clone(), within(&name, container))).collect()
}

/// Returns true if each interface that is up has its link-local address. Interfaces on which IPv6 is off are ignored.
/// The kernel assigns the link-local address within a second after both ends of a veth pair are up.
pub(crate) fn is_settled(scan: &Value) -> bool {
    let of_a_container = |container: &Value| has_all(container, &container["sysctls"]);
    has_all(&scan["host"], &Value::Null) && scan["netns"].as_object().unwrap().values().all(of_a_container)
}

fn has_all(half: &Value, settings: &Value) -> bool {
    half["interfaces"].as_object().unwrap().iter().all(|(name, interface)| {
        let is_up = interface["link"]["flags"].as_array().unwrap().contains(&json!("UP"));
        let of_the_host = &interface["sysctls"]["ipv6/conf/<if>/disable_ipv6"];
        let is_off = of_the_host == "1" || settings[format!("ipv6/conf/{name}/disable_ipv6")] == "1";
        !is_up || is_off || interface["addresses"].as_array().unwrap().iter().any(|one| one["scope"] == "link")
    })
}

fn container() -> Value {
    let shown = Shown::here();
    let interfaces: BTreeMap<_, _> = shown.interfaces().collect();
    let names = interfaces.keys().flat_map(|name| OF_ITS_INTERFACES.map(|path| path.replace("<if>", name)));
    let names = OF_A_CONTAINER.map(str::to_owned).into_iter().chain(names);
    let settings: Map<String, Value> = names.map(|path| (path.clone(), setting(&path))).collect();
    json!({"interfaces": interfaces, "routes": shown.routes(None), "sysctls": settings})
}

fn setting(path: &str) -> Value {
    match fs::read_to_string(Path::new("/proc/sys/net").join(path)) {
        Ok(text) => text.trim().into(),
        Err(error) => error.to_string().into(),
    }
}

/// The output of `ip` commands in the calling thread's network namespace.
#[derive(Debug)]
struct Shown {
    links: Vec<Value>,
    routes: Vec<Value>,
    neighbours: Vec<Value>,
}

/// Runs a batch of `ip` commands, and parses the JSON output of each command.
fn ip(commands: &str) -> Vec<Vec<Value>> {
    let mut ip = Command::new("ip")
        .args(["-details", "-json", "-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    ip.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    let output = ip.wait_with_output().unwrap();
    assert!(output.status.success(), "ip failed at {commands}");
    serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(Result::unwrap).collect()
}

impl Shown {
    fn here() -> Self {
        // Query all routing tables: for a single table, `ip` would list the routes of only one address family.
        let batch = "addr show\nroute show table all\nneigh show nud permanent\nneigh show proxy\n";
        let [links, mut routes, mut neighbours, proxies] = ip(batch).try_into().unwrap();
        routes.retain(|route| route["table"] == "main");
        neighbours.extend(proxies);
        Self { links, routes, neighbours }
    }

    /// Returns all interfaces except `lo`, with the fields that are recorded for both hosts and containers.
    fn interfaces(&self) -> impl Iterator<Item = (String, Map<String, Value>)> {
        let named = self.links.iter().map(|link| (link["ifname"].as_str().unwrap().to_owned(), link));
        named.filter(|(name, _)| name != "lo").map(|(name, shown)| {
            let of_this = |neighbour: &&Value| neighbour["dev"] == name.as_str();
            let neighbours: Vec<&Value> = self.neighbours.iter().filter(of_this).collect();
            let addresses: Vec<Value> = shown["addr_info"].as_array().unwrap().iter().map(address).collect();
            let interface = json!({"link": link(shown), "addresses": addresses, "neighbours": neighbours});
            let Value::Object(interface) = interface else { unreachable!() };
            (name, interface)
        })
    }

    /// Returns the routes of one interface. If no interface is given, returns all routes, each with the name of its
    /// interface.
    fn routes(&self, of: Option<&str>) -> Value {
        let chosen = self.routes.iter().filter(|route| of.is_none_or(|name| route["dev"] == name));
        let mut routes: Vec<Value> = chosen.map(|shown| route(shown, of.is_none())).collect();
        // The kernel lists its own routes (`fe80::/64`) in varying order, so sort them by interface.
        let places: Vec<usize> = (0..routes.len()).filter(|at| routes[*at]["dst"] == "fe80::/64").collect();
        let mut kernels: Vec<Value> = places.iter().map(|at| routes[*at].clone()).collect();
        kernels.sort_by_key(|route| route["dev"].to_string());
        places.into_iter().zip(kernels).for_each(|(at, route)| routes[at] = route);
        routes.into()
    }
}

fn link(shown: &Value) -> Value {
    let flags = shown["flags"].as_array().unwrap().iter().filter_map(Value::as_str);
    let mut flags: Vec<&str> = flags.filter(|flag| !SETTLE_LATER.contains(flag)).collect();
    flags.sort_unstable();
    json!({
        "mtu": shown["mtu"],
        "address": shown["address"],
        "flags": flags,
        "txqlen": shown.get("txqlen").unwrap_or(&json!(0)),
        "num_tx_queues": shown["num_tx_queues"],
        "num_rx_queues": shown["num_rx_queues"],
        "kind": shown["linkinfo"]["info_kind"],
        "peer_in_other_netns": shown.get("link_netnsid").is_some(),
    })
}

/// Returns an address in the format of the recording, where rarely used fields appear only if they are set.
fn address(shown: &Value) -> Value {
    let text = format!("{}/{}", shown["local"].as_str().unwrap(), shown["prefixlen"]);
    let mut address = json!({"address": text, "scope": shown["scope"]});
    for seldom in ["address", "broadcast", "nodad", "noprefixroute"] {
        if let Some(value) = shown.get(seldom) {
            address[format!("ip says {seldom}")] = value.clone();
        }
    }
    address
}

fn route(shown: &Value, with_name: bool) -> Value {
    let parts = ["type", "dst", "gateway", "via", "protocol", "scope", "prefsrc", "metric", "nexthops"];
    let mut route: Map<String, Value> =
        parts.iter().filter_map(|&part| Some((part.to_owned(), shown.get(part)?.clone()))).collect();
    if with_name {
        route.insert("dev".to_owned(), shown["dev"].clone());
    }
    let flags = shown["flags"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let lasting: Vec<&str> = flags.filter(|flag| !["linkdown", "dead"].contains(flag)).collect();
    if !lasting.is_empty() {
        route.insert("flags".to_owned(), lasting.into());
    }
    route.into()
}
