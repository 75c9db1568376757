//! Creates and fills stores for the tests of exports, imports and migrations.

use std::path::Path;

use datastore::{Create, Location};
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::{Error, Ipam, Nodes};
use ipam_operator::moving::role_of;
use kv::{Deadline, Key};
use tempfile::TempDir;

use crate::common::{Done, TEST_TIMEOUT, margay};
use crate::store::content::{Content, content, with_store, write};
use crate::support::Etcd;

/// A temporary folder for stores, and an etcd if the test needs one.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) folder: TempDir,
    pub(crate) etcd: Option<Etcd>,
}

impl Places {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), etcd: None }
    }

    pub(crate) fn with_etcd() -> Self {
        Self { etcd: Some(Etcd::start().unwrap()), ..Self::new() }
    }

    pub(crate) fn sled(&self, name: &str) -> Location {
        stores::of_engine("sled", self.path(name)).unwrap()
    }

    pub(crate) fn redb(&self, name: &str) -> Location {
        stores::of_engine("redb", self.path(name)).unwrap()
    }

    pub(crate) fn etcd(&self) -> Location {
        stores::at(&self.etcd.as_ref().unwrap().url().replace("http:", "etcd:")).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }
}

/// Writes the documents of a real Calico cluster with 242 addresses in use and three nodes.
pub(crate) fn calicos(location: &Location) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/calico/cluster.json");
    let documents: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let text = |document: &serde_json::Value, name: &str| document[name].as_str().unwrap().to_owned();
    write(location, documents.iter().map(|one| (text(one, "key"), text(one, "value").into_bytes())));
}

/// Creates a pool, and assigns addresses to `containers` containers.
pub(crate) fn ours(location: &Location, containers: usize) {
    let url = location.to_string();
    margay(["--store", &url, "pool", "create", "lab", "10.99.0.0/16"]).answer();
    for number in 0..containers {
        assign(location, &format!("c{number}")).unwrap();
    }
}

/// Assigns an address to a container as the plugin does, in the pool that [`ours`] creates.
pub(crate) fn assign(location: &Location, container: &str) -> Result<String, Error> {
    let mut request = AssignRequest::new(attachment(container), RequestedAddresses::any(1, 0));
    request.v4_pools = vec!["lab".into()];
    let given = on(location, async |ipam| ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await)?;
    Ok(given[0].ip.to_string())
}

/// Releases a container's addresses as the plugin does.
pub(crate) fn release(location: &Location, container: &str) -> Result<Vec<std::net::IpAddr>, Error> {
    let attachment = attachment(container);
    on(location, async |ipam| ipam.release_attachment(&attachment, &[], Deadline::after(TEST_TIMEOUT)).await)
}

fn attachment(container: &str) -> Attachment {
    Attachment {
        network: "lab".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: "node1".into(),
        boot: Some("0badcafe".into()),
    }
}

fn on<T>(location: &Location, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
    with_store(location, Create::Never, async |open| work(&Ipam::new(open.store(), Nodes::FirstSeen)).await)
}

/// Returns the keys and values that an export or a migration of the store includes.
pub(crate) fn moved(location: &Location) -> Content {
    content(location).into_iter().filter(|(key, _)| role_of(&Key::from(key.as_slice())).is_some()).collect()
}

pub(crate) fn at(location: &Location, args: &[&str]) -> Done {
    let url = location.to_string();
    margay(["--store", &url].into_iter().chain(args.iter().copied()))
}

/// Runs `margay migrate` from one store to another.
pub(crate) fn migrate(from: &Location, to: &Location, more: &[&str]) -> Done {
    let (from, to) = (from.to_string(), to.to_string());
    margay(["migrate", &from, &to].into_iter().chain(more.iter().copied()))
}
