//! Accesses the store on which a recorded test case is replayed.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use datastore::{Create, Location, OpenStore};
use ipam_core::model::{Block, Document, ReleaseRequest, keys};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Key, Range, Store, StoreExt};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use crate::Kind;
use crate::carrier::{Served, forward};
use crate::place::ETCD;
use crate::record::Documents;
use testkit::server::Etcd;

/// How long a plugin call waits for the store; the test, which holds the store open, waits equally long for the call.
const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The running etcd servers that no test case uses at the moment; each server runs until [`stop_all`].
static IDLE: Mutex<Vec<Etcd>> = Mutex::new(Vec::new());

/// An etcd server for the exclusive use of one test case.
#[derive(Debug)]
pub(crate) struct Lent(Option<Etcd>);

impl Lent {
    /// Returns an etcd server without keys. The calling thread must be in the machine's original network namespace.
    pub(crate) fn take() -> Self {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // etcd may skip fsync, because the test data need not survive a crash.
        let new = || Etcd::start_with("http", &["--unsafe-no-fsync".to_owned()]);
        let etcd = idle.unwrap_or_else(|| new().expect("etcd does not start: scripts/setup test installs it"));
        let lent = Self(Some(etcd));
        let location = stores::at(&lent.0.as_ref().unwrap().url().replace("http:", "etcd:")).unwrap();
        Books::at(location).change(async |store| {
            store.delete(Range::All).await.unwrap();
        });
        lent
    }

    /// Makes the etcd server reachable in the calling thread's network namespace.
    pub(crate) fn reach(&self) -> Served {
        forward(ETCD.parse().unwrap(), self.0.as_ref().unwrap().address())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.take());
    }
}

/// Stops all etcd servers that the test cases have used.
pub(crate) fn stop_all() {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// The documents of a test case's store, accessed through Margay's own crates.
#[derive(Debug)]
pub(crate) struct Books {
    location: Location,
    runtime: Runtime,
    /// The open store, if the store is etcd; `None` for an embedded store. Several processes may have etcd open, so the
    /// test keeps its connection open during plugin calls.
    open: Option<OpenStore>,
}

impl Books {
    fn at(location: Location) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { location, runtime, open: None }
    }

    /// Opens the documents of a test case: in the etcd that is reachable from the case's network, or in a new embedded
    /// store in the case's folder.
    pub(crate) fn new(kind: Kind, folder: &Path) -> Self {
        let location = match kind {
            Kind::Etcd => format!("etcd://{ETCD}"),
            Kind::Sled | Kind::Redb => format!("{}://{}", kind.name(), folder.join("store").display()),
        };
        let mut books = Self::at(stores::at(&location).unwrap());
        if kind == Kind::Etcd {
            let options = Create::Never.with_wait(TEST_TIMEOUT);
            let open = datastore::open(&books.location, &options);
            books.open = Some(books.runtime.block_on(open).unwrap());
        }
        books
    }

    fn change<T>(&self, work: impl AsyncFnOnce(Arc<dyn Store>) -> T) -> T {
        self.runtime.block_on(async {
            if let Some(open) = &self.open {
                return work(open.store()).await;
            }
            let open = datastore::open(&self.location, &Create::IfMissing.with_wait(TEST_TIMEOUT)).await.unwrap();
            let done = work(open.store()).await;
            open.close().await.unwrap();
            done
        })
    }

    pub(crate) fn put_all(&self, documents: &Documents) {
        self.change(async |store| {
            for (key, value) in documents {
                store.put(key.as_str(), value.to_string()).await.unwrap();
            }
        });
    }

    pub(crate) fn delete(&self, key: &str) {
        self.change(async |store| {
            store.delete(Range::Key(key.into())).await.unwrap();
        });
    }

    /// Releases an address, whatever handle holds it.
    pub(crate) fn release(&self, address: std::net::IpAddr) {
        let requests = [ReleaseRequest::new(address)];
        self.change(async |store| {
            let ipam = Ipam::new(store, Nodes::FirstSeen);
            let released = ipam.release_ips(&requests, Deadline::after(TEST_TIMEOUT)).await.unwrap();
            assert_eq!(released.released.len(), 1);
        });
    }

    pub(crate) fn all(&self) -> Documents {
        let kvs = self.change(async |store| store.list(Range::All).await.unwrap().kvs);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let value = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or_else(|_| text(bytes).into());
        kvs.iter().map(|kv| (text(kv.key.as_bytes()), value(kv.value.as_bytes()))).collect()
    }
}

/// Returns the part of a recorded state that describes the store: the documents that changed since the start of the
/// case, and a summary of the allocator's documents.
pub(crate) fn scan(kind: Kind, start: &Documents, now: &Documents) -> Value {
    let outside = |key: &str| match kind {
        Kind::Etcd => !key.starts_with("/calico/ipam/"),
        // An embedded store also contains Margay's own keys, which Calico's recording lacks.
        Kind::Sled | Kind::Redb => key.starts_with("/calico/") && !key.starts_with("/calico/ipam/"),
    };
    let documents: Documents = now
        .iter()
        .filter(|(key, value)| outside(key) && start.get(*key) != Some(value))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let deleted: Vec<&String> = start.keys().filter(|key| !now.contains_key(*key)).collect();
    let mut scan = json!({"documents": documents, "ipam": brief(now)});
    if !deleted.is_empty() {
        scan["deleted"] = json!(deleted);
    }
    scan
}

/// Returns all handles, and all assigned addresses with handle and attributes, but without times and Margay's own
/// attributes.
fn brief(documents: &Documents) -> Value {
    let (mut addresses, mut handles) = (Map::new(), Map::new());
    for (key, document) in documents {
        let key: Key = key.as_str().into();
        if let Some(handle) = keys::parse_handle(&key) {
            handles.insert(handle.to_owned(), document["block"].clone());
        } else if keys::parse_block(&key).is_some() {
            let block = Block::decode(&key, document.to_string().as_bytes()).unwrap();
            for (address, _) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
                addresses.insert(address.to_string(), holder(document, &block, address));
            }
        }
    }
    json!({"addresses": addresses, "handles": handles})
}

/// Returns the entry of an assigned address in its block document.
fn holder(document: &Value, block: &Block, address: std::net::IpAddr) -> Value {
    let ordinal = block.addresses().position(|one| one == address).unwrap();
    let entry = document["allocations"][ordinal].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap();
    let entry = &document["attributes"][entry];
    let mut attributes = entry["secondary"].as_object().cloned().unwrap_or_default();
    assert!(attributes.remove("timestamp").is_some(), "{address} has no time: {entry}");
    attributes.retain(|name, _| !name.starts_with("margay"));
    json!({"handle": entry["handle_id"], "attributes": attributes})
}
