//! What is played on the cluster. Each scenario begins and ends without pods, and fails by panicking.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::compare;
use crate::machine::{NODE_ADDRESS, wait_until};
use crate::network::{CONFLIST, Network, POOL_6, Setup};
use crate::pods::{POD_TIMEOUT, PORT, Pod, Watch, pod, workload};
use crate::remains::Remains;

/// A scenario: its name, what it shows, and whether a set-up has what it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) shows: &'static str,
    pub(crate) run: fn(&mut Cluster) -> String,
    pub(crate) fits: fn(Setup) -> bool,
}

/// All scenarios, in the order in which they are played.
pub(crate) const ALL: &[Scenario] = &[
    Scenario {
        name: "few-pods",
        shows: "4 pods are ready, have addresses, reach each other, and leave nothing",
        run: |cluster| pods_come_and_go(cluster, 4),
        fits: |_| true,
    },
    Scenario {
        name: "forty-pods",
        shows: "40 pods are ready, have addresses, reach each other, and leave nothing",
        run: |cluster| pods_come_and_go(cluster, 40),
        fits: |_| true,
    },
    Scenario { name: "host-port", shows: "a pod's port on the node", run: host_port, fits: Setup::has_portmap },
    Scenario {
        name: "annotations",
        shows: "addresses and pools that annotations of pods and namespaces name",
        run: annotations,
        fits: |setup| setup.network == Network::Routed,
    },
    Scenario {
        name: "dual-stack",
        shows: "pods with IPv4 and IPv6 addresses",
        run: dual_stack,
        fits: Setup::is_margay,
    },
    Scenario {
        name: "sticky",
        shows: "pods of a StatefulSet that get their addresses again",
        run: sticky,
        fits: Setup::is_margay,
    },
    Scenario {
        name: "force-deleted",
        shows: "pods of a StatefulSet, force-deleted every three seconds",
        run: force_deleted,
        fits: Setup::is_margay,
    },
    Scenario { name: "quota", shows: "a namespace with more pods than its quota", run: quota, fits: Setup::is_margay },
    Scenario {
        name: "full-pool",
        shows: "30 pods in a pool of 16 addresses, and then fewer",
        run: full_pool,
        fits: Setup::is_margay,
    },
    Scenario {
        name: "kills",
        shows: "kubelet, containerd and the daemon killed while pods come and go",
        run: kills,
        fits: |_| true,
    },
    Scenario { name: "reboot", shows: "a reboot with ten pods", run: reboot, fits: |_| true },
    Scenario {
        name: "no-network",
        shows: "the node without its network's configuration, and with it again",
        run: no_network,
        fits: |_| true,
    },
    Scenario {
        name: "status",
        shows: "a pool that is missing, which STATUS reports, and which is there again",
        run: status,
        fits: |setup| setup.status && setup.network == Network::Routed,
    },
    Scenario {
        name: "compare",
        shows: "the time of 40 pods and of the CNI calls, beside bridge and host-local",
        run: compare::compare,
        fits: Setup::is_margay,
    },
];

/// Time limit until the store has what the API shows: a runtime's last calls may still be running.
pub(crate) const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates a Deployment, looks at its pods' addresses and connections, and deletes it. Returns how long the pods took.
fn pods_come_and_go(cluster: &mut Cluster, count: usize) -> String {
    let before = cluster.remains();
    let served = |cluster: &Cluster| ["ADD", "DEL"].map(|verb| cluster.served_by_daemon(verb));
    let served_before = cluster.setup.serve.then(|| served(cluster));
    let watch = Watch::start(cluster.boot());
    let begun = Instant::now();
    cluster.apply(&workload("Deployment", "web", count).to_string());
    let ready = watch.until_ready(count);
    drop(watch);
    let last = ready.values().max().unwrap().duration_since(begun);
    let pods = cluster.wait_for_pods("web", count);
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    let begun = Instant::now();
    cluster.delete("deployment", "web");
    leave_nothing(cluster, &before);
    if let Some(before) = served_before {
        let after = served(cluster);
        let through_daemon = before.iter().zip(&after).all(|(before, after)| after - before >= count);
        assert!(through_daemon, "the daemon has not served all ADDs and DELs: {before:?}, then {after:?}");
    }
    format!("all ready after {:.1} s, gone after {:.1} s", last.as_secs_f64(), begun.elapsed().as_secs_f64())
}

/// Checks that each pod has addresses of its own, the same in the API and in Margay's store.
#[track_caller]
pub(crate) fn have_own_addresses(cluster: &Cluster, pods: &[Pod]) {
    for pod in pods {
        pod.address();
    }
    wait_until("equal addresses", SETTLE_TIMEOUT, || cluster.compare_addresses(pods));
    if cluster.setup.network == Network::Routed {
        let endpoints = cluster.margay(&["get", "workloadendpoints", "-A"]).unwrap();
        assert_eq!(endpoints["items"].as_array().map(Vec::len), Some(pods.len()), "{endpoints}");
    }
}

/// Checks that the node reaches each pod, and each pod the next one, and that each sees the other's own address.
#[track_caller]
pub(crate) fn reach_each_other(cluster: &Cluster, pods: &[Pod]) {
    for (place, pod) in pods.iter().enumerate() {
        let next = &pods[(place + 1) % pods.len()];
        for (&from, &to) in pod.addresses.iter().zip(&next.addresses) {
            let said = cluster.fetch(from, PORT, "/");
            assert!(said.starts_with(&format!("{from} ")) && said.ends_with(&pod.name), "{}: {said}", pod.name);
            let said = cluster.fetch(from, PORT, &format!("/connect/{}", std::net::SocketAddr::new(to, PORT)));
            assert_eq!(said, format!("{to} {from} {}", next.name));
        }
    }
}

#[track_caller]
pub(crate) fn leave_nothing(cluster: &Cluster, before: &Remains) {
    wait_until("nothing left", SETTLE_TIMEOUT, || cluster.nothing_is_left(before));
}

/// Scales a Deployment, without waiting.
#[track_caller]
fn scale(cluster: &Cluster, name: &str, replicas: usize) {
    cluster.kubectl(&["scale", "deployment", name, &format!("--replicas={replicas}")]).unwrap();
}

/// Changes the section `ipam` of the network's configuration, and waits until the runtime has read it: there is no other
/// sign of it than the runtime's next call.
fn use_network(cluster: &Cluster, ipam: &Value) {
    cluster.set_network(ipam);
    std::thread::sleep(Duration::from_secs(2));
}

fn addresses_by_name(pods: &[Pod]) -> BTreeMap<String, Vec<IpAddr>> {
    pods.iter().map(|pod| (pod.name.clone(), pod.addresses.clone())).collect()
}

fn host_port(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    let mut published = pod("published", "default", &json!({}));
    published["spec"]["containers"][0]["ports"] = json!([{"containerPort": PORT, "hostPort": 30080}]);
    cluster.apply(&published.to_string());
    let pods = cluster.wait_for_pods("published", 1);
    let said = cluster.fetch(NODE_ADDRESS.parse().unwrap(), 30080, "/");
    assert!(said.starts_with(&format!("{} ", pods[0].address())), "{said}");
    cluster.delete("pod", "published");
    leave_nothing(cluster, &before);
    let closed = cluster.try_fetch(NODE_ADDRESS.parse().unwrap(), 30080, "/");
    assert!(closed.is_err(), "the port is still open: {closed:?}");
    format!("{NODE_ADDRESS}:30080 led to {}", pods[0].address())
}

fn annotations(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    for (pool, cidr) in [("pods", "10.46.0.0/24"), ("team", "10.47.0.0/24")] {
        cluster.setup.create_pool(cluster, pool, cidr);
    }
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "team", "annotations": {"cni.projectcalico.org/ipv4pools": "[\"team\"]"}},
    });
    cluster.apply(&namespace.to_string());
    wait_until("the namespace's service account", SETTLE_TIMEOUT, || {
        cluster.kubectl(&["get", "serviceaccount", "default", "-n", "team"])
    });
    let wanted = json!({"cni.projectcalico.org/ipAddrs": "[\"10.45.0.200\"]"});
    let pool = json!({"cni.projectcalico.org/ipv4pools": "[\"pods\"]"});
    let cases = [
        ("wanted", "default", &wanted, "10.45.0.200"),
        ("by-pod", "default", &pool, "10.46.0."),
        ("by-namespace", "team", &json!({}), "10.47.0."),
        ("pod-first", "team", &pool, "10.46.0."),
    ];
    for (name, namespace, annotations, _) in cases {
        cluster.apply(&pod(name, namespace, annotations).to_string());
    }
    let mut all = Vec::new();
    for (name, _, _, start) in cases {
        let pods = cluster.wait_for_pods(name, 1);
        assert!(pods[0].address().to_string().starts_with(start), "{name}: {:?}", pods[0].addresses);
        all.extend(pods);
    }
    have_own_addresses(cluster, &all);
    reach_each_other(cluster, &all);
    for (name, namespace, ..) in cases {
        cluster.kubectl(&["delete", "pod", name, "-n", namespace, "--wait=false"]).unwrap();
        cluster.wait_until_gone(name);
    }
    cluster.kubectl(&["delete", "namespace", "team"]).unwrap();
    leave_nothing(cluster, &before);
    for pool in ["pods", "team"] {
        cluster.margay(&["pool", "delete", pool]).unwrap();
    }
    "an address by the pod, pools by the pod and by its namespace".to_owned()
}

fn dual_stack(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    let ipam = match cluster.setup.network {
        Network::Bridge => json!({
            "assign_ipv6": "true", "ipv6_pools": [POOL_6.0],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }),
        _ => json!({"assign_ipv6": "true"}),
    };
    use_network(cluster, &ipam);
    cluster.apply(&workload("Deployment", "dual", 4).to_string());
    let pods = cluster.wait_for_pods("dual", 4);
    for pod in &pods {
        let kinds: Vec<bool> = pod.addresses.iter().map(IpAddr::is_ipv4).collect();
        assert_eq!(kinds, [true, false], "{}: {:?}", pod.name, pod.addresses);
    }
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    cluster.delete("deployment", "dual");
    leave_nothing(cluster, &before);
    use_network(cluster, &json!({}));
    format!("4 pods with addresses such as {} and {}", pods[0].addresses[0], pods[0].addresses[1])
}

fn sticky(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    use_network(cluster, &json!({"sticky": {"by": "pod", "for": "1h"}}));
    cluster.apply(&workload("StatefulSet", "kept", 3).to_string());
    let first = addresses_by_name(&cluster.wait_for_pods("kept", 3));
    for _ in 0..2 {
        let old = ids(&cluster.pods("kept").unwrap());
        cluster.kubectl(&["delete", "pods", "-l", "app=kept", "--wait=false"]).unwrap();
        let pods = wait_for_new_pods(cluster, "kept", 3, &old);
        assert_eq!(addresses_by_name(&pods), first);
        have_own_addresses(cluster, &pods);
    }
    cluster.delete("statefulset", "kept");
    leave_nothing(cluster, &before);
    use_network(cluster, &json!({}));
    "3 pods had the same addresses after two restarts".to_owned()
}

fn ids(pods: &[Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod.object["metadata"]["uid"].to_string()).collect()
}

/// Waits until all pods are ready and none of them is one of the old ones.
#[track_caller]
fn wait_for_new_pods(cluster: &mut Cluster, name: &str, count: usize, old: &[String]) -> Vec<Pod> {
    wait_until("new pods", POD_TIMEOUT, || {
        let pods = cluster.pods(name)?;
        let new = ids(&pods).iter().filter(|id| !old.contains(id)).count();
        if new == count && pods.len() == count { Ok(()) } else { Err(format!("{new} are new")) }
    });
    cluster.wait_for_pods(name, count)
}

fn force_deleted(cluster: &mut Cluster) -> String {
    const ROUNDS: usize = 10;
    let before = cluster.remains();
    use_network(cluster, &json!({"sticky": {"by": "pod", "for": "1h"}}));
    cluster.apply(&workload("StatefulSet", "forced", 3).to_string());
    let first = addresses_by_name(&cluster.wait_for_pods("forced", 3));
    for round in 0..ROUNDS {
        let name = format!("forced-{}", round % 3);
        // The pod may not have come back since its last deletion.
        let _ = cluster.kubectl(&["delete", "pod", &name, "--force", "--grace-period=0"]);
        std::thread::sleep(Duration::from_secs(3));
    }
    let begun = Instant::now();
    let pods = cluster.wait_for_pods("forced", 3);
    let recovered = begun.elapsed();
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    let kept = addresses_by_name(&pods).iter().filter(|(name, addresses)| first[*name] == **addresses).count();
    cluster.delete("statefulset", "forced");
    leave_nothing(cluster, &before);
    use_network(cluster, &json!({}));
    format!(
        "after {ROUNDS} deletions ready within {:.1} s, {kept} of 3 with their first address",
        recovered.as_secs_f64()
    )
}

fn quota(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    cluster.margay(&["quota", "set", "--namespace", "default", "3"]).unwrap();
    cluster.apply(&workload("Deployment", "many", 5).to_string());
    let is_ready = |pods: &[Pod]| pods.iter().filter(|pod| pod.ready).count();
    wait_until("3 of 5 pods", POD_TIMEOUT, || {
        let ready = is_ready(&cluster.pods("many")?);
        if ready == 3 { Ok(()) } else { Err(format!("{ready} are ready")) }
    });
    wait_until("an event that names the quota", POD_TIMEOUT, || {
        let events = cluster.kubectl(&["get", "events", "-o", "jsonpath={.items[*].message}"])?;
        match events.contains("the quota of namespace default is used up: 3 of 3") {
            true => Ok(()),
            false => Err(events),
        }
    });
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(is_ready(&cluster.pods("many").unwrap()), 3);
    cluster.margay(&["quota", "set", "--namespace", "default", "5"]).unwrap();
    let begun = Instant::now();
    let pods = cluster.wait_for_pods("many", 5);
    let recovered = begun.elapsed();
    have_own_addresses(cluster, &pods);
    cluster.delete("deployment", "many");
    leave_nothing(cluster, &before);
    cluster.margay(&["quota", "delete", "--namespace", "default"]).unwrap();
    format!("3 of 5 pods; all 5 within {:.1} s after it was raised", recovered.as_secs_f64())
}

fn full_pool(cluster: &mut Cluster) -> String {
    // On a bridge, the network's own address, the gateway and the broadcast address are no pod's.
    let room = if cluster.setup.network == Network::Bridge { 13 } else { 16 };
    let before = cluster.remains();
    cluster.setup.create_pool(cluster, "small", "10.48.0.0/28");
    use_network(cluster, &json!({"ipv4_pools": ["small"]}));
    cluster.apply(&workload("Deployment", "crowd", 30).to_string());
    wait_until("a full pool", POD_TIMEOUT, || {
        let pods = cluster.pods("crowd")?;
        let ready = pods.iter().filter(|pod| pod.ready).count();
        if ready == room && pods.len() == 30 { Ok(()) } else { Err(format!("{ready} of {} are ready", pods.len())) }
    });
    std::thread::sleep(Duration::from_secs(5));
    let begun = Instant::now();
    scale(cluster, "crowd", 10);
    let pods = cluster.wait_for_pods("crowd", 10);
    have_own_addresses(cluster, &pods);
    scale(cluster, "crowd", room);
    let pods = cluster.wait_for_pods("crowd", room);
    let recovered = begun.elapsed();
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    cluster.delete("deployment", "crowd");
    leave_nothing(cluster, &before);
    use_network(cluster, &json!({}));
    cluster.margay(&["pool", "delete", "small"]).unwrap();
    format!("{room} of 30 pods were ready; scaled to 10 and {room}, all were within {:.1} s", recovered.as_secs_f64())
}

fn kills(cluster: &mut Cluster) -> String {
    let before = cluster.remains();
    cluster.apply(&workload("Deployment", "killed", 20).to_string());
    let daemon = cluster.setup.serve.then_some("margay-serve");
    let victims: Vec<&str> = ["kubelet", "containerd"].into_iter().chain(daemon).collect();
    let mut count = 0;
    for round in 0..2 {
        for victim in &victims {
            std::thread::sleep(Duration::from_millis(1500));
            cluster.end_part(victim, Signal::SIGKILL);
            count += 1;
            match *victim {
                "kubelet" => cluster.start_part("kubelet"),
                "containerd" => cluster.start_containerd(),
                _ => cluster.start_daemon(),
            }
        }
        scale(cluster, "killed", if round == 0 { 5 } else { 20 });
    }
    let pods = cluster.wait_for_pods("killed", 20);
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    cluster.delete("deployment", "killed");
    // A containerd that is killed forgets the network namespace that it has made for a sandbox but not yet recorded.
    // Those of the last pods are removed shortly after the pods.
    std::thread::sleep(Duration::from_secs(5));
    let forgotten = cluster.remove_empty_namespaces();
    leave_nothing(cluster, &before);
    format!("{count} kills while 20, 5 and 20 pods were wanted; containerd forgot {forgotten} empty namespaces")
}

fn reboot(cluster: &mut Cluster) -> String {
    const COUNT: usize = 10;
    let before = cluster.remains();
    cluster.apply(&workload("Deployment", "rebooted", COUNT).to_string());
    let first = addresses_by_name(&cluster.wait_for_pods("rebooted", COUNT));
    let begun = Instant::now();
    cluster.reboot();
    // Until the kubelet has looked at its pods, the API shows them as they were.
    wait_until("restarted pods", POD_TIMEOUT, || {
        cluster.must_run();
        let pods = cluster.pods("rebooted")?;
        let again = |pod: &&Pod| pod.object["status"]["containerStatuses"][0]["restartCount"].as_u64() > Some(0);
        let count = pods.iter().filter(again).filter(|pod| pod.ready).count();
        if count == COUNT { Ok(()) } else { Err(format!("{count} are ready again")) }
    });
    let recovered = begun.elapsed();
    let pods = cluster.wait_for_pods("rebooted", COUNT);
    have_own_addresses(cluster, &pods);
    reach_each_other(cluster, &pods);
    let kept = addresses_by_name(&pods).iter().filter(|(name, addresses)| first.get(*name) == Some(addresses)).count();
    cluster.delete("deployment", "rebooted");
    leave_nothing(cluster, &before);
    format!("{COUNT} pods ready {:.1} s after it, {kept} with the address from before", recovered.as_secs_f64())
}

/// Waits until the node is ready, or not ready any more, and returns how many seconds it took.
fn wait_for_node(cluster: &mut Cluster, ready: bool) -> f64 {
    let begun = Instant::now();
    wait_until(if ready { "a ready node" } else { "a node that is not ready" }, POD_TIMEOUT, || {
        cluster.must_run();
        if cluster.node_is_ready()? == ready { Ok(()) } else { Err("not yet".to_owned()) }
    });
    begun.elapsed().as_secs_f64()
}

fn no_network(cluster: &mut Cluster) -> String {
    let path = cluster.disk().join(CONFLIST);
    let aside = path.with_extension("aside");
    std::fs::rename(&path, &aside).unwrap();
    let down = wait_for_node(cluster, false);
    std::fs::rename(&aside, &path).unwrap();
    let up = wait_for_node(cluster, true);
    format!("NotReady after {down:.1} s, Ready again after {up:.1} s")
}

fn status(cluster: &mut Cluster) -> String {
    let create = |cluster: &Cluster| cluster.setup.create_pool(cluster, "asked", "10.50.0.0/24");
    create(cluster);
    use_network(cluster, &json!({"ipv4_pools": ["asked"]}));
    wait_for_node(cluster, true);
    cluster.margay(&["pool", "delete", "asked"]).unwrap();
    let down = wait_for_node(cluster, false);
    create(cluster);
    let up = wait_for_node(cluster, true);
    use_network(cluster, &json!({}));
    cluster.margay(&["pool", "delete", "asked"]).unwrap();
    format!("NotReady after {down:.1} s, Ready again after {up:.1} s")
}
