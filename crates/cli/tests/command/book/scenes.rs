//! Sets up the initial state of each page and section of the book, and performs the steps that happen outside the shown
//! sessions.

use std::net::IpAddr;
use std::path::Path;

use datastore::{Create, Location};
use ipam_core::assign::{AssignRequest, Bridge, Gateway, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, StoreExt};

use crate::book::engine;
use crate::book::machine::Machine;
use crate::book::nodes::{
    beside_calico, beside_calicos_network, calico_plugin_replaced, call_main_plugin, with_main_plugin,
};
use crate::common::endpoint::Endpoint;
use crate::tested::{drivers, plugin};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);
const SLED: &str = "/var/lib/margay/ipam.sled";
const REDB: &str = "/var/lib/margay/ipam.redb";

/// Prepares the initial state of a section of a page, if it needs one; the heading "" stands for the start of the page.
pub(crate) fn set(page: &str, heading: &str, machine: &mut Machine) {
    match (page, heading) {
        ("first-hour.md", "First network") => container("web").of_bridge().given(sled()),
        ("first-hour.md", "Is this address really in use?") => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            container("c1").of_bridge().given(sled());
        }
        ("when-addresses-run-out.md", "") => {
            machine.do_all(&["margay pool create main 10.65.0.0/16"]);
            container("web").on("node1").given(sled());
        }
        ("quotas.md", "Set one") => machine.do_all(&["margay pool create main 10.65.0.0/16"]),
        ("who-had-this-address.md", "History") | ("command-line.md", "ipam history") => history(machine),
        ("who-had-this-address.md", "Why this address, or none") | ("command-line.md", "ipam explain") => {
            pools_of_shops(machine);
        }
        ("coming-from-calicoctl.md", "") => machine.do_all(&[
            "margay pool create racks-b 10.80.0.0/16 --node-selector \"rack == 'b'\"",
            "margay ipam split 4 --name racks-b",
            "margay ipam configure --strictaffinity=true",
        ]),
        ("check-and-repair.md", "A check") => damage(machine),
        ("check-and-repair.md", "Reports") => leaks(machine),
        ("pools-and-blocks.md", "Reservations") => reservations(machine),
        ("back-up-and-restore.md", "") => {
            on_redb(machine);
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            container("web").given(redb());
        }
        ("move-between-stores.md", _) => moving(heading, machine),
        ("beside-calico.md", _) => beside_calico(heading, machine),
        ("calico-plugin-replaced.md", _) => calico_plugin_replaced(heading, machine),
        ("routed-network.md", "") => with_main_plugin(machine),
        ("without-calico.md", "") => machine.start_etcd("10.0.0.1:2379"),
        ("secondary-networks.md", "") => beside_calicos_network(machine),
        ("coming-from-host-local.md", "The change") => first_container_of_my_net(machine),
        ("judge-a-store.md", "") => machine.start_etcd("127.0.0.1:47335"),
        ("runtime-podman.md", _) => under_podman(heading, machine),
        ("command-line.md", _) => command_line(heading, machine),
        _ => {}
    }
}

/// Makes an event happen that a page of the book describes between two of its commands.
pub(crate) fn happen(scene: &str, machine: &mut Machine) {
    match scene {
        "two containers in lab" => {
            for name in ["web", "db"] {
                container(name).given(sled());
            }
        }
        "a pod on each of two nodes" => {
            for (pod, node) in [("web-0", "node1"), ("web-1", "node2")] {
                let sandbox = container(&format!("{pod}-sandbox")).on(node).of_pod("shop", pod);
                sandbox.of_network("storage", "net1").of_pool("storage").of_router().given(cluster());
            }
        }
        "two containers in routed" => {
            machine.do_all(&["ip netns add web", "ip netns add db"]);
            call_main_plugin("ADD", machine);
        }
        "both containers of routed end" => call_main_plugin("DEL", machine),
        "they end" => {
            for name in ["web", "db"] {
                container(name).gone(sled());
            }
        }
        "a third container" => container("c3").given(sled()),
        "a pod of a Calico network" => {
            let pod = Endpoint { node: "vm", container: "5f2d", pod: Some(("shop", "web")), address: "10.65.0.128" };
            on(&sled(), async |ipam| pod.store(ipam).await);
        }
        "a third container, after a copy" => {
            two_containers(machine);
            on(&cluster(), async |ipam| ipam.store().delete(kv::Range::All).await).unwrap();
            machine.do_all(&["margay migrate sled:///var/lib/margay/ipam.sled etcd://10.0.0.1:2379"]);
            container("c3").given(sled());
        }
        "one who watches" => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            machine.meanwhile(containers_come_and_go);
        }
        "another process has the store" => machine.hold(redb()),
        "one of them is used again" => {
            machine.put("gone.yaml", NODE.replace("node1", "gone"));
            machine.do_all(&["margay apply -f gone.yaml"]);
            let again = || container("c1").on("gone").of_network("net", "eth0").with("10.65.37.0");
            again().gone(sled());
            again().given(sled());
        }
        other => panic!("no scene is called {other}"),
    }
}

fn containers_come_and_go() {
    let web = || container("web").of_pod("shop", "web");
    web().given(sled());
    web().gone(sled());
    container("cache").with("10.88.0.129").given(sled());
    container("db").with("10.88.0.128").given(sled());
}

pub(super) const NODE: &str = "\
apiVersion: projectcalico.org/v3
kind: Node
metadata:
  name: node1
  labels:
    rack: b
";

/// The reservation that the plugin writes when an ADD probes an address and finds it in use.
const QUARANTINE: &str = r#"
apiVersion: projectcalico.org/v3
kind: IPReservation
metadata:
  name: margay-quarantine
  annotations:
    margay.io/quarantine: >-
      {"10.88.0.9":{"since":"2026-11-25T09:12:44Z","reason":"02:42:0a:58:00:09 answered on eth1","node":"node1"}}
spec:
  reservedCIDRs: [10.88.0.9/32]
"#;

fn sled() -> Location {
    engine::location("sled", SLED)
}

pub(super) fn cluster() -> Location {
    drivers().parse("etcd://10.0.0.1:2379").unwrap()
}

fn redb() -> Location {
    engine::location("redb", REDB)
}

/// Prepares an empty machine whose store uses redb.
fn on_redb(machine: &mut Machine) {
    machine.clear();
    machine.set("DATASTORE_TYPE", "redb");
    machine.set("DATASTORE_PATH", REDB);
}

/// A container of the network `lab`, and the request for its address.
struct Container {
    request: AssignRequest,
}

fn container(name: &str) -> Container {
    let attachment = Attachment {
        network: "lab".into(),
        container: name.into(),
        interface: "eth0".into(),
        node: "vm".into(),
        boot: host::boot_id().and_then(|id| host::short_boot(&id)),
    };
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    request.attributes.insert("timestamp".into(), "2026-11-22 11:30:34.795291957 +0000 UTC".into());
    Container { request }
}

impl Container {
    fn on(mut self, node: &str) -> Self {
        self.request.attachment.node = node.into();
        self
    }

    fn of_bridge(mut self) -> Self {
        self.request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
        self
    }

    /// Puts the container into a network whose pool has a recorded gateway.
    fn of_router(mut self) -> Self {
        self.request.bridge = Some(Bridge::default());
        self
    }

    fn of_pool(mut self, pool: &str) -> Self {
        self.request.v4_pools = vec![pool.into()];
        self
    }

    fn of_pod(mut self, namespace: &str, pod: &str) -> Self {
        self.request.attributes.extend([("namespace".into(), namespace.into()), ("pod".into(), pod.into())]);
        self
    }

    fn of_network(mut self, network: &str, interface: &str) -> Self {
        self.request.attachment.network = network.into();
        self.request.attachment.interface = interface.into();
        self
    }

    /// Requests an IPv4 address and an IPv6 address for the container.
    fn of_both_families(mut self) -> Self {
        self.request.wanted = RequestedAddresses::any(1, 1);
        self
    }

    fn with(mut self, address: &str) -> Self {
        self.request.wanted = RequestedAddresses::these(vec![address.parse::<IpAddr>().unwrap()]);
        self
    }

    /// Assigns addresses to the container as the plugin does.
    fn given(self, store: Location) {
        on(&store, async |ipam| ipam.assign(&self.request, Deadline::after(TEST_TIMEOUT)).await.map(drop)).unwrap();
    }

    /// Releases the addresses of the container as the plugin does.
    fn gone(self, store: Location) {
        let attachment = &self.request.attachment;
        on(&store, async |ipam| ipam.release_attachment(attachment, &[], Deadline::after(TEST_TIMEOUT)).await).unwrap();
    }
}

/// Opens a store and runs `work` with an allocator on the store.
fn on<T>(store: &Location, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(store, &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        let done = work(&Ipam::new(open.store(), Nodes::FirstSeen)).await;
        open.close().await.unwrap();
        done
    })
}

pub(super) fn put(store: &Location, key: &str, value: &str) {
    on(store, async |ipam| ipam.store().put(key, value).await).unwrap();
}

fn history(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
    containers_come_and_go();
}

fn pools_of_shops(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&[
        "margay pool create lab 10.88.0.0/24",
        "margay pool create racks 10.91.0.0/24 --node-selector \"rack == 'b'\"",
        "margay pool create shops 10.90.0.0/24 --namespace-selector \"tier == 'web'\"",
        "margay reservation create few 10.88.0.1 10.88.0.2",
    ]);
    container("web").given(sled());
    container("db").given(sled());
}

/// Creates a block with two addresses, and the damage that an interrupted program may leave behind.
fn damage(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&["margay pool create main 10.65.0.0/16"]);
    for name in ["c1", "c2"] {
        container(name).on("node1").of_network("net", "eth0").given(sled());
    }
    let handle = "/calico/ipam/v2/handle/net.c2";
    on(&sled(), async |ipam| ipam.store().delete(kv::Range::key(handle)).await).unwrap();
    let counted = "/calico/ipam/v2/handle/net.c1";
    let value = on(&sled(), async |ipam| ipam.store().get(counted).await).unwrap().unwrap().value;
    put(&sled(), counted, &String::from_utf8_lossy(value.as_bytes()).replace(":1", ":2"));
    let block = on(&sled(), async |ipam| ipam.store().list(kv::Range::prefix("/calico/ipam/v2/assignment/")).await);
    let block = block.unwrap().kvs.remove(0);
    let mut value: serde_json::Value = serde_json::from_slice(block.value.as_bytes()).unwrap();
    value["unallocated"].as_array_mut().unwrap().pop();
    put(&sled(), &block.key.to_string(), &value.to_string());
    put(&sled(), "/calico/ipam/v2/host/node1/ipv4/block/10.65.9.0-26", r#"{"state":"pending","deleted":false}"#);
}

/// Assigns two addresses to containers of a node that no longer exists.
fn leaks(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&["margay pool create main 10.65.0.0/16"]);
    for name in ["c1", "c2"] {
        container(name).on("gone").of_network("net", "eth0").given(sled());
    }
    machine.put("node.yaml", NODE);
    machine.do_all(&["margay apply -f node.yaml"]);
}

fn reservations(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&["margay pool create lab 10.88.0.0/24 --gateway 10.88.0.1"]);
}

/// Writes host-local's files of two containers.
fn leases(machine: &Machine) {
    machine.put("/var/lib/cni/networks/lab/10.88.0.5", "web\neth0");
    machine.put("/var/lib/cni/networks/lab/10.88.0.6", "db\neth0");
}

fn two_containers(machine: &mut Machine) {
    machine.clear();
    machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
    container("c1").given(sled());
    container("c2").given(sled());
}

fn moving(heading: &str, machine: &mut Machine) {
    match heading {
        "" => machine.start_etcd("10.0.0.1:2379"),
        "Migrate a live node" | "A file" => two_containers(machine),
        "Take over from host-local" => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            leases(machine);
        }
        "Take over from podman" => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.99.0.0/16 --gateway 10.99.0.1"]);
            machine.put("containers.json", include_bytes!("../../../../../fixtures/podman/inspect.json"));
        }
        _ => {}
    }
}

/// Calls the plugin as a runtime does for the first container of the page's network.
fn first_container_of_my_net(machine: &mut Machine) {
    machine.put("my-net.json", MY_NET);
    let of_container = "CNI_CONTAINERID=web CNI_NETNS=/run/netns/web CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin";
    machine.do_all(&[&format!("CNI_COMMAND=ADD {of_container} {} <my-net.json", plugin().display())]);
}

const MY_NET: &str = r#"{
  "cniVersion": "1.0.0", "name": "my_Net", "type": "bridge", "bridge": "lab0", "isGateway": true,
  "ipam": {
    "type": "margay-ipam",
    "ranges": [[{ "subnet": "10.22.0.0/24", "rangeStart": "10.22.0.10", "rangeEnd": "10.22.0.20" }]],
    "routes": [{ "dst": "0.0.0.0/0" }]
  }
}"#;

fn under_podman(heading: &str, machine: &mut Machine) {
    let of_podman = |id, address| container(id).of_bridge().with(address).given(sled());
    match heading {
        "Containers" => {
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            of_podman("7b01ac197d53e947c33f89529a7ebf04cc3e24c601edf53e1dc872a1c8baa960", "10.88.0.77");
        }
        "After a reboot" => {
            of_podman("ffb9ad5f9a1c24bbd8bfbc285a038c71c7e63e62d92391bc643fab1091995d29", "10.88.0.129");
        }
        _ => {}
    }
}

fn command_line(heading: &str, machine: &mut Machine) {
    match heading {
        "pool" => machine.clear(),
        "ipam show" => {
            machine.clear();
            machine.do_all(&["margay pool create lan 10.41.0.0/24", "margay pool create lan6 fd00:41::/64"]);
            container("a").of_both_families().of_bridge().given(sled());
            container("b").of_both_families().of_bridge().given(sled());
            machine.do_all(&["margay pool create wire 10.43.0.0/24 --gateway 10.43.0.1 --manual"]);
            container("docs-db")
                .of_network("wire", "eth7")
                .of_pool("wire")
                .of_bridge()
                .with("10.43.0.60")
                .given(sled());
        }
        "ipam split" => machine.do_all(&["margay pool create racks-b 10.80.0.0/16"]),
        "ipam release" => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            container("c1").with("10.88.0.77").given(sled());
        }
        "ipam quarantine" => {
            machine.put("quarantine.yaml", QUARANTINE);
            machine.do_all(&["margay apply -f quarantine.yaml"]);
        }
        "ipam map" => {
            machine.clear();
            machine.do_all(&[
                "margay pool create big 10.80.0.0/16",
                "margay pool create lab 10.70.0.0/24",
                "margay pool create main 10.65.0.0/24",
            ]);
            for number in 0..60 {
                container(&format!("c{number}")).on("node1").of_pool("big").given(sled());
            }
            container("c2").on("node1").gone(sled());
        }
        "get, create, apply, replace, delete" => {
            machine.clear();
            machine.do_all(&["margay pool create tmp 10.1.0.0/24", "margay pool delete tmp"]);
        }
        "store" => {
            on_redb(machine);
            machine.do_all(&["margay pool create lab 10.88.0.0/24"]);
            container("web").given(redb());
        }
        "export, import, migrate" => {
            if !Path::new("/var/lib/etcd").exists() {
                machine.start_etcd("10.0.0.1:2379");
            }
            two_containers(machine);
            leases(machine);
        }
        "JSON" => {
            machine.clear();
            machine.do_all(&["margay pool create lab 10.88.0.0/24 --gateway 10.88.0.1"]);
            container("web").given(sled());
            container("db").given(sled());
        }
        _ => {}
    }
}
