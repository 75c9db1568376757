//! Creates a store in a separate folder, for tests with a daemon.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use datastore::{Create, Location, OpenStore, Purpose, maintenance, served};
use ipam_core::model::{Block, Document, keys};
use ipam_core::sticky::waits_until;
use ipam_core::{Ipam, Nodes};
use kv::{Range, StoreExt};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use testkit::lab;

use crate::programs::{Call, Ended, TEST_TIMEOUT, margay, run};

pub(crate) const ENGINES: [&str; 2] = ["sled", "redb"];

/// A store in a folder, and the socket of its daemon; the plugin logs at level `debug`.
#[derive(Debug)]
pub(crate) struct Lab(lab::Lab);

impl Deref for Lab {
    type Target = lab::Lab;

    fn deref(&self) -> &lab::Lab {
        &self.0
    }
}

impl Lab {
    pub(crate) fn new(engine: &'static str) -> Self {
        let engine = lab::ENGINES.into_iter().find(|known| known.name() == engine).unwrap();
        let mut lab = Self(lab::Lab { members: json!({ "log_level": "debug" }), ..lab::Lab::new(engine) });
        let root = lab.root().to_owned();
        lab.move_to(&root);
        lab
    }

    /// Changes the location of the test's store to the subfolder `store` of `folder`.
    pub(crate) fn move_to(&mut self, folder: &Path) {
        self.0.store = folder.canonicalize().unwrap().join("store");
    }

    /// Creates a test environment on a disk of 24 MiB; returns it with the folder at which the disk is mounted.
    /// Requires [`with_own_mounts`].
    pub(crate) fn on_small_disk(engine: &'static str) -> (Self, PathBuf) {
        let mut lab = Self::new(engine);
        let disk = lab.root().join("disk");
        fs::create_dir(&disk).unwrap();
        tmpfs(&disk, "size=24m,mode=700");
        lab.move_to(&disk);
        (lab, disk)
    }

    /// Creates a test environment with a store that has one pool, named `lab`.
    pub(crate) fn with_pool(engine: &'static str, cidr: &str) -> Self {
        let lab = Self::new(engine);
        lab.margay(&format!("pool create lab {cidr}")).ok();
        lab
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    /// Returns the location of a store in `folder` with the same engine as the test's store.
    pub(crate) fn location_of(&self, folder: &Path) -> Location {
        self.engine.at(folder)
    }

    pub(crate) fn url(&self) -> String {
        self.location().to_string()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        served::socket(&self.location()).unwrap()
    }

    /// Runs `margay` on the test's store with the given arguments, which are separated by spaces.
    #[track_caller]
    pub(crate) fn margay(&self, args: &str) -> Ended {
        run(margay(["--store", &self.url()].into_iter().chain(args.split(' '))))
    }

    pub(crate) fn add(&self, container: &str) -> Call {
        Call::new("ADD", container, &self.conf())
    }

    pub(crate) fn del(&self, container: &str) -> Call {
        Call::new("DEL", container, &self.conf())
    }

    /// Opens the store's files like a program that cannot use daemons, and keeps the files open while `work` runs.
    pub(crate) fn held_open<T>(&self, work: impl AsyncFnOnce(&OpenStore) -> T) -> T {
        block_on(async {
            // The store is opened with the purpose of releasing addresses, because opening it for this purpose succeeds
            // even on a full disk.
            let to_release = Create::Never.with_wait(TEST_TIMEOUT).with_purpose(Purpose::Release);
            let open = datastore::open(&self.location(), &to_release).await.unwrap();
            let done = work(&open).await;
            open.close().await.unwrap();
            done
        })
    }

    /// Reads all assigned addresses and their handles from the store's files.
    pub(crate) fn held(&self) -> BTreeMap<IpAddr, String> {
        self.held_open(async |open| held_in(open).await)
    }

    /// Like [`Self::held`], but reads through the daemon, because opening sled's files would need space on a full disk.
    pub(crate) fn held_there(&self) -> BTreeMap<IpAddr, String> {
        block_on(async {
            let reached = datastore::open(
                &self.location(),
                &Create::Never.with_wait(TEST_TIMEOUT).with_sharing(datastore::Sharing::Served),
            )
            .await
            .unwrap();
            assert!(reached.served().is_some(), "no daemon has the store");
            held_in(&reached).await
        })
    }

    #[track_caller]
    pub(crate) fn nothing_is_held(&self) {
        let held = self.held();
        assert!(held.is_empty(), "{held:?}");
    }

    /// Checks that `margay ipam check` finds no problem.
    #[track_caller]
    pub(crate) fn is_in_order(&self) {
        let check = self.margay("ipam check -o json");
        assert_eq!(check.code, Some(0), "{check:?}");
        assert_eq!(check.json()["findings"], json!([]), "{check:?}");
    }

    /// Returns the newest revision of the store without opening the store.
    pub(crate) fn revision(&self) -> i64 {
        block_on(maintenance::newest(&self.location())).unwrap().unwrap().get()
    }

    /// Returns the number of processes that wait for the store lock.
    pub(crate) async fn waiting(&self) -> usize {
        maintenance::waiting(&self.location()).await.unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A killed daemon does not remove its socket and lock file.
        let socket = self.socket();
        let _ = fs::remove_file(socket.with_extension("lock"));
        let _ = fs::remove_file(socket);
    }
}

/// Returns the handle of each assigned address in an open store, without sticky addresses that wait for their
/// workloads.
pub(crate) async fn held_in(open: &OpenStore) -> BTreeMap<IpAddr, String> {
    let all = open.store().list(Range::All).await.unwrap();
    let mut held = BTreeMap::new();
    for kv in all.kvs.iter().filter(|kv| keys::parse_block(&kv.key).is_some()) {
        let block = Block::decode(&kv.key, kv.value.as_bytes()).unwrap();
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            if waits_until(entry).is_some() {
                continue;
            }
            let before = held.insert(ip, entry.handle().unwrap().to_owned());
            assert_eq!(before, None, "{ip} is in two blocks");
        }
    }
    held
}

/// Returns an allocator on an open store, with the same settings as in the plugin.
pub(crate) fn ipam_on(open: &OpenStore) -> Ipam {
    Ipam::new(open.store(), Nodes::FirstSeen)
}

pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Moves this thread to a new mount namespace with an empty `/run/margay` that all users may read. Processes that the
/// calling thread starts afterwards run in its new mount namespace.
pub(crate) fn with_own_mounts() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap_or_else(|error| panic!("{error} (this test needs root)"));
    let nothing = None::<&str>;
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).unwrap();
    fs::create_dir_all("/run/margay").unwrap();
    tmpfs(Path::new("/run/margay"), "size=16m,mode=755");
}

/// Mounts a tmpfs at a path. Requires [`with_own_mounts`].
pub(crate) fn tmpfs(at: &Path, options: &str) {
    mount(Some("margay-test"), at, Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
}
