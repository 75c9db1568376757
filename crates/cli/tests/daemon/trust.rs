//! Tests whether clients and daemons of different users and stores trust each other.

use std::fs;
use std::time::Duration;

use conformance::patient;
use serde_json::json;
use wire::{FileId, StoreIdentity};

use crate::daemon::{Daemon, greeting, serves_again};
use crate::lab::{ENGINES, Lab, with_own_mounts};
use crate::programs::{Call, Running, STRANGER, TEST_TIMEOUT, margay, run, wait_until};
use crate::role;

const POOL: &str = "10.75.0.0/24";

#[test]
fn stranger_is_told_nothing_by_daemon() {
    with_own_mounts();
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        role::play("client", &lab).end().ok();
        assert!(daemon.log().contains("rejected a client"), "{}", daemon.log());
        // The plugin runs as a user who does not own the store, so it must use neither the daemon nor the store's
        // files.
        let add = lab.add("c1").by(STRANGER).run().failed();
        assert!(add.err.contains("opening the store directly"), "{add:?}");
        lab.nothing_is_held();
        daemon.runs();
        lab.add("c1").ok().by_daemon();
    }
}

#[test]
fn stranger_is_not_believed_as_daemon() {
    with_own_mounts();
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        // When a daemon starts, it creates the folder of the sockets with the right permissions.
        Daemon::start(&lab).end().ok();
        let listener: Running = role::play("listener", &lab);
        wait_until("the stranger listens", || lab.socket().exists());
        let add = lab.add("c1").ok().alone("the daemon runs as another user");
        assert_eq!(lab.held(), [(add.address(), "net1.c1".to_owned())].into());
        listener.end().ok();
        // The store owner's daemon takes over the socket that another user's listener has left behind.
        let mut daemon = Daemon::start(&lab);
        lab.del("c1").ok().by_daemon();
        daemon.runs();
    }
}

#[test]
fn owner_of_store_and_root_may_share_daemon() {
    with_own_mounts();
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let given = run({
            let mut command = std::process::Command::new("chown");
            command.args(["-R", &format!("{STRANGER}:{STRANGER}")]).arg(lab.root());
            command
        });
        given.ok();
        let mut daemon = Daemon::start(&lab);
        lab.add("of-root").ok().by_daemon();
        lab.add("of-owner").by(STRANGER).ok().by_daemon();
        assert_eq!(lab.held().len(), 2);
        lab.del("of-owner").by(STRANGER).ok().by_daemon();
        assert_eq!(lab.held().len(), 1);
        daemon.runs();
    }
}

#[test]
fn greeting_says_which_store_daemon_has() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let _daemon = Daemon::start(&lab);
        let hello = greeting(&lab).unwrap();
        assert_eq!(hello.program, env!("CARGO_PKG_VERSION"));
        let StoreIdentity::Embedded { id, queue } = hello.store else { panic!("{hello:?}") };
        assert_eq!(queue, FileId::at(&lab.store.join("queue")).unwrap());
        let status = lab.margay("store status -o json").ok();
        assert_eq!(status.json()["id"], json!(id), "{status:?}");
    }
}

/// Creates a second store with a different pool, in a folder beside the test's first store.
fn another(lab: &Lab, cidr: &str) -> std::path::PathBuf {
    let folder = lab.root().join("another");
    let url = lab.location_of(&folder).to_string();
    run(margay(["--store", &url, "pool", "create", "other", cidr])).ok();
    folder
}

#[test]
fn replaced_store_is_used_instead_of_store_of_daemon() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("before").ok().by_daemon();
        let other = another(&lab, "10.76.0.0/24");
        let aside = lab.root().join("aside");
        fs::rename(&lab.store, &aside).unwrap();
        fs::rename(&other, &lab.store).unwrap();
        // The test calls ADD right after it has replaced the store, while the daemon may still have the replaced store
        // open.
        let add = lab.add("after").ok();
        assert!(add.address().to_string().starts_with("10.76."), "{add:?}");
        assert_eq!(lab.held().len(), 1);
        serves_again(&lab, "later", TEST_TIMEOUT);
        let add = lab.add("later").ok().by_daemon();
        assert!(add.address().to_string().starts_with("10.76."), "{add:?}");
        // The ADD after the replacement of the store wrote nothing to the old store.
        let url = lab.location_of(&aside).to_string();
        let show = run(margay(["--store", &url, "ipam", "show", "-o", "json"])).ok();
        assert!(show.out.contains("10.75.0.0/24"), "{show:?}");
        daemon.runs();
        lab.is_in_order();
    }
}

#[test]
fn moved_store_is_served_again_when_back() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("before").ok().by_daemon();
        let aside = lab.root().join("aside");
        fs::rename(&lab.store, &aside).unwrap();
        // The daemon notices that the store is missing, and does not create a store.
        std::thread::sleep(Duration::from_millis(300));
        let none = lab.add("meanwhile").run().failed();
        assert!(none.out.contains("there is no store") || none.out.contains("no store"), "{none:?}");
        lab.del("meanwhile").ok();
        assert!(!lab.store.exists(), "a store was created");
        fs::rename(&aside, &lab.store).unwrap();
        serves_again(&lab, "later", patient(TEST_TIMEOUT / 6));
        // Another store replaces the store at the same path.
        fs::rename(&lab.store, &aside).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let other = another(&lab, "10.76.0.0/24");
        fs::rename(&other, &lab.store).unwrap();
        serves_again(&lab, "later", patient(TEST_TIMEOUT / 6));
        let add = lab.add("later").ok().by_daemon();
        assert!(add.address().to_string().starts_with("10.76."), "{add:?}");
        daemon.runs();
    }
}

#[test]
fn missing_store_is_waited_for_by_daemon() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let mut daemon = Daemon::start(&lab);
        assert_eq!(greeting(&lab).unwrap().store, StoreIdentity::Nothing);
        let none = lab.add("c1").run().failed();
        assert!(none.err.contains("does not serve this store"), "{none:?}");
        lab.del("c1").ok();
        lab.margay("ipam show").failed();
        assert!(!lab.store.exists(), "the daemon has made a store");
        let conf = lab.conf_with("bridge", json!({"subnet": POOL}));
        let made = Call::new("ADD", "c1", &conf).ok();
        made.clone().alone("does not serve this store");
        assert!(lab.store.exists());
        let second = Call::new("ADD", "c2", &conf).ok().by_daemon();
        assert_ne!(second.address(), made.address());
        assert!(matches!(greeting(&lab).unwrap().store, StoreIdentity::Embedded { .. }));
        daemon.runs();
        lab.is_in_order();
    }
}

#[test]
fn restored_store_ends_watches_and_is_served_anew() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("kept").ok().by_daemon();
        let backup = lab.root().join("backup");
        lab.margay(&format!("store backup {}", backup.display())).ok();
        let lost = lab.add("lost").ok().by_daemon();
        let location = lab.location();
        let (begins, begun) = std::sync::mpsc::channel();
        let watched = std::thread::spawn(move || watch_to_its_end(&location, &begins));
        begun.recv_timeout(patient(TEST_TIMEOUT)).unwrap();
        lab.margay(&format!("store restore --replace {}", backup.display())).ok();
        let error = watched.join().unwrap();
        assert!(error.contains("another store"), "{error}");
        serves_again(&lab, "later", patient(TEST_TIMEOUT / 6));
        assert!(!lab.held().contains_key(&lost.address()));
        assert_eq!(lab.held().len(), 1);
        daemon.runs();
        lab.is_in_order();
    }
}

/// Watches the store through the daemon, reports on `begins` when the watch has started, and returns the error that
/// ends it.
fn watch_to_its_end(location: &datastore::Location, begins: &std::sync::mpsc::Sender<()>) -> String {
    use futures::StreamExt;
    use kv::{Range, Store, WatchRequest};

    crate::lab::block_on(async {
        let store = datastore::served::connect(location, TEST_TIMEOUT).await.unwrap();
        let now = store.range(kv::RangeRequest::new(Range::All)).await.unwrap().revision;
        let mut watch = store.watch(WatchRequest::new(Range::All, now.next())).await.unwrap();
        begins.send(()).unwrap();
        let end = tokio::time::timeout(patient(TEST_TIMEOUT), async {
            loop {
                match watch.next().await {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return error.to_string(),
                    None => return "an end without an error".to_owned(),
                }
            }
        });
        end.await.unwrap()
    })
}
