//! Tests `margay gc` with a container runtime's list, for departed nodes, and for a renamed node. The tests need root
//! on the host, not in a container.

mod endpoints;
mod free;
mod kill;
mod lists;
mod moving;

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::{Done, Lab, TEST_TIMEOUT, margay};
use crate::support::Etcd;
use datastore::{Create, Location};
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::timestamps::go_string;
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Range, Revision, StoreExt};
use serde_json::Value;
use time::OffsetDateTime;

/// An etcd with the documents of a real Calico cluster, which has 242 addresses in use and three nodes.
struct Cluster {
    _etcd: Etcd,
    location: Location,
}

impl Cluster {
    fn of_calicos() -> Self {
        let etcd = Etcd::start().unwrap();
        let location = stores::at(&etcd.url().replace("http:", "etcd:")).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/calico/cluster.json");
        let documents: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        on(&location, async |ipam| {
            for document in &documents {
                ipam.store().put(document["key"].as_str().unwrap(), document["value"].as_str().unwrap()).await.unwrap();
            }
        });
        Self { _etcd: etcd, location }
    }

    fn margay(&self, args: &str) -> Done {
        run(&self.location, args)
    }
}

/// Runs `margay` on a store with the given arguments, which are separated by spaces.
fn run(location: &Location, args: &str) -> Done {
    let store = ["--store".to_owned(), location.to_string(), "--cni-conf-dir".to_owned(), "/nowhere".to_owned()];
    margay(store.into_iter().chain(args.split(' ').map(str::to_owned)))
}

/// Opens a store, runs `work`, and closes the store.
fn on<T>(location: &Location, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(location, &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        let nodes = if location.path().is_some() { Nodes::FirstSeen } else { Nodes::Registered };
        let done = work(&Ipam::new(open.store(), nodes)).await;
        open.close().await.unwrap();
        done
    })
}

fn attachment(node: &str, container: &str) -> Attachment {
    Attachment {
        network: "net".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: node.into(),
        boot: Some("0badcafe".into()),
    }
}

/// Assigns an address to a container as the plugin does, but with a timestamp that is `seconds_ago` in the past.
fn give_dated(location: &Location, attachment: Attachment, seconds_ago: i64) -> String {
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    let at = OffsetDateTime::now_utc() - time::Duration::seconds(seconds_ago);
    request.attributes.insert("timestamp".into(), go_string(at));
    on(location, async |ipam| ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await).unwrap()[0].ip.to_string()
}

fn give(location: &Location, node: &str, container: &str) -> String {
    give_dated(location, attachment(node, container), 3600)
}

/// Releases a container's addresses as the plugin does.
fn release(location: &Location, node: &str, container: &str) -> Vec<String> {
    let attachment = attachment(node, container);
    let released =
        on(location, async |ipam| ipam.release_attachment(&attachment, &[], Deadline::after(TEST_TIMEOUT)).await)
            .unwrap();
    released.iter().map(ToString::to_string).collect()
}

fn revision(location: &Location) -> Revision {
    on(location, async |ipam| ipam.store().list(Range::Key("/none".into())).await.unwrap().revision)
}

/// Returns all addresses that the store records for a node.
fn held(location: &Location, node: &str) -> BTreeSet<String> {
    let estates =
        on(location, async |ipam| ipam.departed_nodes(|_, name| name == node, Deadline::after(TEST_TIMEOUT)).await)
            .unwrap();
    let holds = estates.departed.get(node).into_iter().flat_map(|estate| &estate.holds);
    holds.map(|hold| hold.address.to_string()).collect()
}

/// Returns the addresses in the list `name` of a `margay gc` report, for all stores together.
fn list(report: &Value, name: &str) -> BTreeSet<String> {
    let rows = report["stores"].as_array().unwrap().iter().flat_map(|store| store[name].as_array().unwrap());
    rows.map(|row| row["address"].as_str().or(row.as_str()).unwrap().to_owned()).collect()
}

/// Creates a pool in a range that no machine uses, because `gc` scans the real machine.
fn pool(lab: &Lab, range: &str) {
    lab.margay(&format!("pool create lab {range}")).answer();
}

/// Checks that `margay ipam check` finds no problem in the store.
fn in_order(location: &Location) {
    let checked = run(location, "ipam check -o json").json();
    assert_eq!(checked["problems"], 0, "{checked}");
}
