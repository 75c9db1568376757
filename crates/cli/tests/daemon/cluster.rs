//! Tests a daemon that keeps the connection to a cluster. Without the daemon, plugins connect to the cluster
//! themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use conformance::patient;
use datastore::{Create, Location, served};
use etcd_client::Client;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wire::{DaemonConnection, StoreIdentity};

use crate::lab::{block_on, held_in};
use crate::programs::{Call, Running, TEST_TIMEOUT, margay, run, wait_until};
use crate::server::Etcd;

/// The node that all configurations in this file use.
const NODE: (&str, &str) = (
    "/calico/resources/v3/projectcalico.org/nodes/node-1",
    r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-1"},"spec":{},"status":{}}"#,
);

pub(crate) struct Cluster {
    etcd: Etcd,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let cluster = Self { etcd: Etcd::start().unwrap() };
        let url = cluster.etcd.url();
        block_on(async { Client::connect([url], None).await.unwrap().put(NODE.0, NODE.1, None).await.unwrap() });
        run(margay(["--store", &cluster.url(), "pool", "create", "lab", "10.84.0.0/24"])).ok();
        cluster
    }

    pub(crate) fn location(&self) -> Location {
        stores::at(&self.url()).unwrap()
    }

    pub(crate) fn url(&self) -> String {
        format!("etcd://{}", self.etcd.address())
    }

    fn socket(&self) -> PathBuf {
        served::socket(&self.location()).unwrap()
    }

    fn serve(&self) -> Running {
        let daemon = Running::start(margay(["--store", &self.url(), "serve"]), "");
        wait_until("the daemon greets", || {
            let connection = DaemonConnection::open(&self.socket(), wire::FROZEN_TIMEOUT, |_| true);
            connection.is_ok_and(|connection| {
                connection.hello.process == daemon.pid()
                    && matches!(connection.hello.store, StoreIdentity::Cluster { .. })
            })
        });
        daemon
    }

    /// Starts a daemon with the given command, and waits until the daemon listens.
    pub(crate) fn serve_as(&self, command: Command) -> Running {
        let daemon = Running::start(command, "");
        wait_until("the daemon listens", || UnixStream::connect(self.socket()).is_ok());
        daemon
    }

    fn conf(&self) -> Value {
        json!({
            "cniVersion": "1.0.0",
            "name": "net1",
            "type": "calico",
            "nodename": "node-1",
            "datastore_type": "etcdv3",
            "etcd_endpoints": self.etcd.url(),
            "ipam_lock_file": self.etcd.folder().join("ipam.lock"),
            "log_level": "debug",
            "ipam": {"type": "margay-ipam"},
        })
    }

    pub(crate) fn add(&self, container: &str) -> Call {
        Call::new("ADD", container, &self.conf())
    }

    pub(crate) fn del(&self, container: &str) -> Call {
        Call::new("DEL", container, &self.conf())
    }

    pub(crate) fn held(&self) -> BTreeMap<IpAddr, String> {
        block_on(async {
            let open = datastore::open(&self.location(), &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
            let held = held_in(&open).await;
            open.close().await.unwrap();
            held
        })
    }

    #[track_caller]
    pub(crate) fn nothing_is_held(&self) {
        let held = self.held();
        assert!(held.is_empty(), "{held:?}");
        let check = run(margay(["--store", &self.url(), "ipam", "check"]));
        assert_eq!(check.code, Some(0), "{check:?}");
    }

    /// Lists the files that record pending commits on this cluster.
    pub(crate) fn notes(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir("/run/margay/intents") else { return Vec::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        let about =
            |path: &PathBuf| fs::read_to_string(path).is_ok_and(|text| text.contains(&self.location().to_string()));
        paths.filter(about).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let socket = self.socket();
        let _ = fs::remove_file(socket.with_extension("lock"));
        let _ = fs::remove_file(socket);
    }
}

#[test]
fn cluster_plugin_and_crowd_go_through_daemon() {
    let cluster = Cluster::start();
    let mut daemon = cluster.serve();
    let address = cluster.add("c1").ok().by_daemon().address();
    assert_eq!(cluster.held(), [(address, "net1.c1".to_owned())].into());
    cluster.del("c1").ok().by_daemon();
    cluster.nothing_is_held();
    let adds: Vec<_> = (0..16).map(|number| cluster.add(&format!("c{number}")).start()).collect();
    let given: BTreeSet<_> = adds.into_iter().map(|add| add.end().ok().by_daemon().address()).collect();
    assert_eq!(given.len(), 16);
    assert_eq!(given, cluster.held().into_keys().collect());
    let dels: Vec<_> = (0..16).map(|number| cluster.del(&format!("c{number}")).start()).collect();
    dels.into_iter().for_each(|del| _ = del.end().ok().by_daemon());
    cluster.nothing_is_held();
    assert!(!daemon.is_over());
    assert!(cluster.notes().is_empty(), "{:?}", cluster.notes());
}

#[test]
fn cluster_daemon_leaks_nothing_when_killed() {
    let cluster = Cluster::start();
    for round in 0..12_u32 {
        let daemon = cluster.serve();
        let adds: Vec<_> = (0..6).map(|number| cluster.add(&format!("c{number}")).start()).collect();
        sleep(Duration::from_millis(fastrand::u64(0..120)));
        daemon.kill();
        if round % 2 == 0 {
            let given: BTreeSet<_> = adds.into_iter().map(|add| add.end().ok().address()).collect();
            assert_eq!(given.len(), 6);
            assert_eq!(given, cluster.held().into_keys().collect(), "round {round}");
        } else {
            // The container runtime dies together with its plugins, and calls DEL when it runs again.
            adds.into_iter().for_each(|add| _ = add.kill());
        }
        let daemon = (round % 3 == 0).then(|| cluster.serve());
        let dels: Vec<_> = (0..6).map(|number| cluster.del(&format!("c{number}")).start()).collect();
        dels.into_iter().for_each(|del| _ = del.end().ok());
        cluster.nothing_is_held();
        drop(daemon);
    }
    sleep(Duration::from_secs(1));
    cluster.nothing_is_held();
    assert!(cluster.notes().is_empty(), "{:?}", cluster.notes());
}

#[test]
fn cluster_daemon_leaks_nothing_when_etcd_stops() {
    let cluster = Cluster::start();
    let _daemon = cluster.serve();
    cluster.add("before").ok().by_daemon();
    cluster.del("before").ok();
    for round in 0..4_u64 {
        let add = cluster.add("c1").start();
        sleep(Duration::from_millis(10 + round * 7));
        cluster.etcd.signal(Signal::SIGSTOP).unwrap();
        sleep(Duration::from_millis(300));
        // The plugin is killed before etcd has answered the plugin's request.
        add.kill();
        cluster.etcd.signal(Signal::SIGCONT).unwrap();
        cluster.del("c1").ok();
        cluster.nothing_is_held();
        sleep(Duration::from_millis(500));
        cluster.nothing_is_held();
    }
    assert!(cluster.notes().is_empty(), "{:?}", cluster.notes());
}

#[test]
fn cluster_plugin_opens_store_without_daemon() {
    let cluster = Cluster::start();
    let daemon = cluster.serve();
    crate::programs::signal(daemon.pid(), Signal::SIGSTOP);
    let add = cluster.add("c1").ok().alone("opening the store directly");
    assert!(add.took < patient(Duration::from_secs(5)), "{add:?}");
    crate::programs::signal(daemon.pid(), Signal::SIGCONT);
    cluster.del("c1").ok().by_daemon();
    daemon.kill();
    assert!(cluster.socket().exists());
    cluster.add("c2").ok();
    cluster.del("c2").ok();
    cluster.nothing_is_held();
}
