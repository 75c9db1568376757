//! What is played on the cluster. Each scenario begins and ends without pods, and fails by panicking.

use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::machine::wait_until;
use crate::pods::{PORT, Pod, Watch, workload};
use crate::remains::Remains;
use crate::network::Network;

/// A scenario: its name, what it shows, and whether a set-up has what it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) shows: &'static str,
    pub(crate) run: fn(&mut Cluster) -> String,
    pub(crate) fits: fn(&Cluster) -> bool,
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
];

/// Time limit until the store has what the API shows: a runtime's last calls may still be running.
pub(crate) const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates a Deployment, looks at its pods' addresses and connections, and deletes it. Returns how long the pods took.
fn pods_come_and_go(cluster: &mut Cluster, count: usize) -> String {
    let before = cluster.remains();
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
