//! An etcd, or a cluster of them, and configurations that name it.

use std::fs;
use std::path::PathBuf;

use datastore::Location;
use etcd_client::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::process::{Call, Outcome};
use crate::server::Etcd;

/// The node of all configurations here.
const NODE: (&str, &str) = (
    "/calico/resources/v3/projectcalico.org/nodes/node-1",
    r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-1"},"spec":{},"status":{}}"#,
);

/// Servers, and a folder for what belongs to the host.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) etcds: Vec<Etcd>,
    pub(crate) folder: TempDir,
}

impl Lab {
    /// One etcd with a registered node and a pool.
    pub(crate) fn start() -> Self {
        Self::on(vec![Etcd::start().unwrap()])
    }

    /// A lab on these, with a registered node and a pool.
    pub(crate) fn on(etcds: Vec<Etcd>) -> Self {
        let lab = Self { etcds, folder: tempfile::tempdir().unwrap() };
        // An earlier lab may have had the same ports. Its hints would cost a call one more request.
        hints_about(&lab.location()).iter().for_each(|hint| fs::remove_file(hint).unwrap());
        lab.put(NODE.0, NODE.1);
        lab.pool("lab", "10.77.0.0/24");
        lab
    }

    pub(crate) fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcds[0]
    }

    /// Writes a key behind everybody's back.
    pub(crate) fn put(&self, key: &str, value: &str) {
        let url = self.etcds[0].url();
        runtime().block_on(async {
            Client::connect([url], None).await.unwrap().put(key, value, None).await.unwrap();
        });
    }

    /// Deletes all keys with this prefix.
    pub(crate) fn erase(&self, prefix: &str) {
        let url = self.etcds[0].url();
        runtime().block_on(async {
            let all = etcd_client::DeleteOptions::new().with_prefix();
            Client::connect([url], None).await.unwrap().delete(prefix, Some(all)).await.unwrap();
        });
    }

    /// The location of the store.
    pub(crate) fn location(&self) -> Location {
        let hosts: Vec<_> = self.etcds.iter().map(|etcd| etcd.address().to_string()).collect();
        stores::at(&format!("etcd://{}", hosts.join(","))).unwrap()
    }

    /// The file that is this host's lock.
    pub(crate) fn lock_file(&self) -> PathBuf {
        self.folder.path().join("ipam.lock")
    }

    /// The configuration of a network of Calico's, with all that is logged.
    pub(crate) fn conf(&self) -> Value {
        let urls: Vec<_> = self.etcds.iter().map(Etcd::url).collect();
        self.conf_at(&urls)
    }

    /// The same at other endpoints.
    pub(crate) fn conf_at(&self, urls: &[String]) -> Value {
        json!({
            "cniVersion": "1.0.0",
            "name": "net1",
            "type": "calico",
            "nodename": "node-1",
            "datastore_type": "etcdv3",
            "etcd_endpoints": urls.join(","),
            "ipam_lock_file": self.lock_file(),
            "log_level": "debug",
            "ipam": {"type": "calico-ipam"},
        })
    }

    pub(crate) fn add(&self, container: &str) -> Call {
        Call::new("ADD", container, &self.conf())
    }

    pub(crate) fn del(&self, container: &str) -> Call {
        Call::new("DEL", container, &self.conf())
    }

    /// Checks that a call of this container finds a clean state: one address, which is gone after a DEL, twice.
    pub(crate) fn all_is_well(&self, container: &str) {
        let first = self.add(container).ok().address();
        assert_eq!(self.add(container).ok().address(), first);
        assert_eq!(self.books().count_of(&format!("net1.{container}")), 1);
        for _ in 0..2 {
            self.del(container).ok();
        }
        self.nothing_is_left();
        self.no_notes_are_left();
    }

    /// Checks that no pending commit on this store is left on this machine.
    pub(crate) fn no_notes_are_left(&self) {
        let left = notes_about(&self.location().to_string());
        assert!(left.is_empty(), "{left:?} are left");
    }
}

/// The files of hints about a store, on this machine.
pub(crate) fn hints_about(store: &Location) -> Vec<PathBuf> {
    files_with(&format!("\"{}\"", store.in_order()), "/run/margay/hints")
}

/// The files of pending commits on a store, on this machine.
pub(crate) fn notes_about(store: &str) -> Vec<PathBuf> {
    files_with(store, agent::INTENTS_FOLDER)
}

/// The files of a folder that contain a text.
fn files_with(text: &str, folder: &str) -> Vec<PathBuf> {
    let Ok(folder) = fs::read_dir(folder) else { return Vec::new() };
    let has_it = |bytes: Vec<u8>| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    // The files of other tests come and go.
    folder.map(|file| file.unwrap().path()).filter(|path| fs::read(path).is_ok_and(has_it)).collect()
}

/// The code and the text of a refused call. Checks that the text names each endpoint.
#[track_caller]
pub(crate) fn refused(outcome: &Outcome, lab: &Lab) -> (u64, String) {
    let refusal = outcome.refusal();
    for etcd in &lab.etcds {
        assert!(refusal.text.contains(&etcd.url()), "{} is not named: {refusal:?}", etcd.url());
    }
    (refusal.code, refusal.text)
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
