//! Reads and writes the contents of stores directly.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use datastore::{Create, Location, OpenStore};
use kv::{Op, Range, Store, StoreExt, Txn};

use crate::common::{Lab, TEST_TIMEOUT};

pub(crate) type Content = BTreeMap<Vec<u8>, Vec<u8>>;

/// Opens a store, runs `work`, and closes the store.
pub(crate) fn with_store<T>(location: &Location, create: Create, work: impl AsyncFnOnce(&OpenStore) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(location, &create.with_wait(TEST_TIMEOUT)).await.unwrap();
        let done = work(&open).await;
        open.close().await.unwrap();
        done
    })
}

pub(crate) fn content(location: &Location) -> Content {
    with_store(location, Create::Never, async |open| {
        let all = open.store().list(Range::All).await.unwrap();
        all.kvs.into_iter().map(|kv| (kv.key.as_bytes().to_vec(), kv.value.as_bytes().to_vec())).collect()
    })
}

pub(crate) fn id(location: &Location) -> String {
    with_store(location, Create::Never, async |open| open.embedded().unwrap().id().to_string())
}

/// Writes keys and values, and creates the store if necessary.
pub(crate) fn write(location: &Location, rows: impl IntoIterator<Item = (String, Vec<u8>)>) {
    with_store(location, Create::IfMissing, async |open| {
        let store = open.store();
        let mut ops = Vec::new();
        let mut bytes = 0;
        for (key, value) in rows {
            bytes += value.len();
            ops.push(Op::put(key, value));
            if ops.len() == 100 || bytes > 1_000_000 {
                store.txn(Txn::new().with_success(std::mem::take(&mut ops))).await.unwrap();
                bytes = 0;
            }
        }
        if !ops.is_empty() {
            store.txn(Txn::new().with_success(ops)).await.unwrap();
        }
    });
}

/// Returns `count` keys of IPAM blocks, each with a value of 16 kB.
pub(crate) fn blocks(count: usize) -> impl Iterator<Item = (String, Vec<u8>)> {
    (0..count).map(|number| {
        let value = format!("{{\"block\":{number},\"text\":\"{}\"}}", "x".repeat(16_000));
        (format!("/calico/ipam/v2/assignment/ipv4/block/{number:06}"), value.into_bytes())
    })
}

/// Returns keys and values of unusual content and length.
pub(crate) fn odd_rows() -> Vec<(String, Vec<u8>)> {
    let long = vec![b'v'; 300_000];
    let all: Vec<u8> = (0..=255).collect();
    [
        ("/a", &b""[..]),
        ("/b\n\"\\\u{1f600}", "line\nbreak\u{0}\"".as_bytes()),
        ("/c", &all),
        ("/d", &long),
        ("/e", b"\xff"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_vec()))
    .to_vec()
}

/// Returns the location of a second store in the test's folder, on the engine (sled or redb) that the first store does
/// not use.
pub(crate) fn other(lab: &Lab) -> Location {
    let path = lab.folder().join("other/store");
    let engine = if lab.location.facts().name == "redb" { "sled" } else { "redb" };
    stores::of_engine(engine, path).unwrap()
}

pub(crate) fn folder(location: &Location) -> &Path {
    location.path().unwrap()
}

/// Returns the paths of the files beside a store's folder.
pub(crate) fn beside(location: &Location) -> Vec<PathBuf> {
    let folder = folder(location);
    let entries = std::fs::read_dir(folder.parent().unwrap()).unwrap();
    let mut found: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| path != folder).collect();
    found.sort();
    found
}

/// Starts `margay` as a process with the given arguments on a store.
pub(crate) fn start(location: &Location, args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &location.to_string()]).args(args).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
