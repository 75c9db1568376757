//! Tests programs of this version beside programs of an earlier version that has another frame format. A daemon and a
//! plugin of different versions recognise that their frame formats differ. A plugin whose frame format differs from the
//! daemon's opens the store itself, and no data is lost. `scripts/build-earlier` builds the programs of the earlier
//! version.

use std::fs;
use std::path::PathBuf;

use agent::{PENDING_COMMITS_FOLDER, PendingCommitFolder};
use ipam_core::attachment::Attachment;
use ipam_core::pending_commits::PendingCommits;
use kv::{Op, Txn};

use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Call, Ended, earlier, margay, of_version, run};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Earlier,
    This,
}

impl Version {
    fn call(self, call: Call) -> Call {
        match self {
            Self::Earlier => call.of(earlier("margay-ipam")),
            Self::This => call,
        }
    }
}

const BOTH: [Version; 2] = [Version::Earlier, Version::This];

fn daemon_of(version: Version, lab: &Lab) -> Daemon {
    let command = margay(["--store", &lab.url(), "--log-level", "debug", "serve"]);
    let daemon = match version {
        Version::Earlier => Daemon::start_as(lab, of_version(&earlier("margay"), command)),
        Version::This => Daemon::start_as(lab, command),
    };
    daemon.wait_to_listen(lab);
    daemon
}

/// Checks that a plugin continued without the daemon.
#[track_caller]
fn alone(ended: Ended) -> Ended {
    let ended = ended.ok();
    // An earlier version of the plugin logs "going on without it" when the plugin opens the store itself.
    let words = ["opening the store directly", "going on without it"];
    assert!(words.iter().any(|words| ended.err.contains(words)), "{ended:?}");
    ended
}

#[test]
fn plugin_opens_store_when_daemon_has_other_version() {
    for engine in ENGINES {
        for (of_daemon, of_plugin) in [(Version::Earlier, Version::This), (Version::This, Version::Earlier)] {
            let lab = Lab::with_pool(engine, "10.71.0.0/24");
            let mut daemon = daemon_of(of_daemon, &lab);
            let own = of_daemon.call(lab.add("own")).ok().by_daemon().address();
            let first = alone(of_plugin.call(lab.add("c1")).run()).address();
            assert_ne!(own, first);
            // Margay's earlier version and this version each find the addresses that the other one has assigned.
            assert_eq!(of_daemon.call(lab.add("c1")).ok().by_daemon().address(), first);
            assert_eq!(alone(of_plugin.call(lab.add("own")).run()).address(), own);
            let calls: Vec<_> = (0..16).map(|number| BOTH[number % 2].call(lab.add(&format!("n{number}")))).collect();
            let started: Vec<_> = calls.iter().map(Call::start).collect();
            let given: std::collections::BTreeSet<_> =
                started.into_iter().map(|call| call.end().ok().address()).collect();
            assert_eq!(given.len(), 16, "{of_daemon:?}, {engine}");
            for number in 0..16 {
                BOTH[(number + 1) % 2].call(lab.del(&format!("n{number}"))).ok();
            }
            alone(of_plugin.call(lab.del("own")).run());
            of_daemon.call(lab.del("c1")).ok().by_daemon();
            lab.nothing_is_held();
            lab.is_in_order();
            daemon.runs();
        }
    }
}

#[test]
fn command_opens_store_when_daemon_has_other_version() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.72.0.0/24");
        lab.add("c1").ok();
        for of_daemon in BOTH {
            let mut daemon = daemon_of(of_daemon, &lab);
            let show = margay(["--store", &lab.url(), "ipam", "show", "--show-blocks"]);
            let of_this = run(of_version(&PathBuf::from(show.get_program()), show)).ok();
            let show = margay(["--store", &lab.url(), "ipam", "show", "--show-blocks"]);
            let of_earlier = run(of_version(&earlier("margay"), show)).ok();
            assert_eq!(of_this.out, of_earlier.out, "beside the daemon of {of_daemon:?}");
            daemon.runs();
        }
        lab.del("c1").ok();
        lab.is_in_order();
    }
}

#[test]
fn cluster_is_opened_when_daemon_has_other_version() {
    for (of_daemon, of_plugin) in [(Version::Earlier, Version::This), (Version::This, Version::Earlier)] {
        let cluster = Cluster::start();
        let serve = margay(["--store", &cluster.url(), "serve"]);
        let mut daemon = cluster.serve_as(match of_daemon {
            Version::Earlier => of_version(&earlier("margay"), serve),
            Version::This => serve,
        });
        let address = alone(of_plugin.call(cluster.add("c1")).run()).address();
        assert_eq!(of_daemon.call(cluster.add("c2")).ok().by_daemon().addresses().len(), 1);
        assert_eq!(cluster.held().get(&address).map(String::as_str), Some("net1.c1"));
        alone(of_plugin.call(cluster.del("c2")).run());
        of_daemon.call(cluster.del("c1")).ok().by_daemon();
        cluster.nothing_is_held();
        assert!(cluster.notes().is_empty(), "{:?}", cluster.notes());
        assert!(!daemon.is_over());
    }
}

/// After a downgrade, the earlier version keeps this version's records of pending commits, which it cannot read, and
/// logs a message.
#[test]
fn newer_notes_are_left_alone_by_earlier_version() {
    let cluster = Cluster::start();
    let attachment = Attachment {
        network: "net1".into(),
        container: "c1".into(),
        interface: "eth0".into(),
        node: "node-1".into(),
        boot: None,
    };
    let txn = Txn::new().with_success([Op::put("/margay-test", "x")]);
    let notes = PendingCommitFolder::new(PENDING_COMMITS_FOLDER, cluster.location().to_string());
    let note = PathBuf::from(PENDING_COMMITS_FOLDER).join(notes.record(&attachment, &txn).unwrap().0);
    let bytes = fs::read(&note).unwrap();
    for call in [cluster.add("c1"), cluster.del("c1")] {
        let ended = Version::Earlier.call(call).ok();
        assert!(ended.err.contains("which this version does not know"), "{ended:?}");
        assert_eq!(fs::read(&note).unwrap(), bytes);
    }
    // This version's plugin finds the commit that the earlier version left pending, and completes or discards it.
    cluster.del("c1").ok();
    assert!(!note.exists());
    cluster.nothing_is_held();
}
