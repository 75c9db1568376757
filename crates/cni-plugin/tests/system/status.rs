//! Tests that STATUS on a real embedded store predicts whether an ADD would succeed, and changes nothing.

use std::fs;
use std::io::Write as _;
use std::time::Duration;

use datastore::Create;
use ipam_core::model::keys::ResourceKind;
use ipam_core::model::{Document, IpamConfig, NewPool, Node, keys};
use kv::StoreExt;
use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::lab::{ENGINES, Engine, Lab};
use crate::mounts::Mount;
use crate::process::{Call, Outcome};

/// The CNI error code of every failed STATUS.
const UNAVAILABLE: u64 = 50;

fn status(conf: &Value) -> Outcome {
    let mut conf = conf.clone();
    conf["cniVersion"] = "1.1.0".into();
    let call = Call::new("STATUS", "", &conf);
    ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"].iter().fold(call, |call, name| call.without(name)).run()
}

#[track_caller]
fn ready(conf: &Value) -> Outcome {
    let outcome = status(conf);
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""), "{outcome:?}");
    outcome
}

#[track_caller]
fn unavailable(conf: &Value, texts: &[&str]) {
    let refusal = status(conf).refusal();
    assert_eq!(refusal.says(texts).code, UNAVAILABLE, "{refusal:?}");
}

/// Checks that STATUS succeeds, and that its log says that an ADD would get no address now, and why.
#[track_caller]
fn exhausted(conf: &Value, texts: &[&str]) {
    let outcome = ready(conf);
    let line = outcome.stderr.lines().find(|line| line.contains("WARN")).unwrap_or_else(|| panic!("{outcome:?}"));
    for text in ["no address is free for the next container"].iter().chain(texts) {
        assert!(line.contains(text), "{text:?} is not said: {line}");
    }
}

#[test]
fn status_says_whether_address_is_free() {
    for engine in ENGINES {
        // The pool's network, broadcast and gateway addresses are reserved, so five addresses remain.
        let lab = Lab::with_pool(engine, "10.5.0.0/29");
        let conf = lab.conf_of("bridge");
        // The file `head` starts with the store's newest revision; its other bytes describe the store's files and may
        // change.
        let newest = || fs::read(lab.store.join("head")).unwrap()[..8].to_vec();
        for number in 0..5 {
            let before = newest();
            ready(&conf);
            assert_eq!(newest(), before, "{engine:?}: something was written");
            lab.add(&format!("c{number}")).ok();
        }
        exhausted(&conf, &["No IPs available in pools", "margay ipam show"]);
        lab.del("c3").ok();
        ready(&conf);
        assert_eq!(lab.books().held.len(), 4);
        // If the network assigns no address family, STATUS succeeds without a check, as ADD does.
        ready(&lab.conf_with("bridge", json!({"assign_ipv4": "false"})));
        unavailable(&lab.conf_with("bridge", json!({"ipv4_pools": ["none"]})), &["none"]);
        unavailable(&lab.conf_with("bridge", json!({"sticky": {"for": "1w"}})), &["ipam.sticky"]);
    }
}

#[test]
fn status_stays_ready_when_node_has_given_all() {
    let settings = |lab: &Lab, config: IpamConfig| {
        lab.with_ipam(Create::Never, async |ipam, _| {
            ipam.store().put(keys::config(), config.encode().unwrap()).await.unwrap();
        });
    };
    let add = |conf: &Value, container: &str| Call::new("ADD", container, conf).ok();
    for engine in ENGINES {
        // The pool has no free address, because every released address of the pool is in cooldown.
        let lab = Lab::with_pool(engine, "10.5.0.0/30");
        let conf = lab.conf_of("calico");
        settings(&lab, IpamConfig::default().with_cooldown_seconds(3600));
        let containers = ["c0", "c1", "c2", "c3"];
        containers.iter().for_each(|container| drop(add(&conf, container)));
        containers.iter().for_each(|container| drop(Call::new("DEL", container, &conf).ok()));
        assert!(lab.books().held.is_empty());
        exhausted(&conf, &["No IPs available in pools: [10.5.0.0/30]"]);
        // The node has reached its maximum number of blocks, or is not allowed to claim blocks.
        let limits = [
            (IpamConfig::default().with_strict_affinity(true).with_max_blocks_per_host(1), "per host block limit"),
            (
                IpamConfig::default().with_strict_affinity(true).with_auto_allocate_blocks(false),
                "find or claim a block",
            ),
        ];
        for (config, text) in limits {
            let lab = Lab::new(engine);
            let pool = NewPool::new("lab", "10.5.0.0/28".parse().unwrap()).with_block_size(30);
            lab.with_ipam(Create::IfMissing, async |ipam, deadline| {
                ipam.create_pool(&pool, None, deadline).await.unwrap();
            });
            let conf = lab.conf_of("calico");
            // The maximum number of blocks applies only to registered nodes.
            lab.with_ipam(Create::Never, async |ipam, _| {
                let node = Node::new("node-1", Default::default(), "uid", OffsetDateTime::now_utc());
                let key = keys::resource(ResourceKind::Node, "node-1");
                ipam.store().put(key, node.encode().unwrap()).await.unwrap();
            });
            add(&conf, "c0");
            settings(&lab, config);
            ready(&conf);
            containers[1..].iter().for_each(|container| drop(add(&conf, container)));
            Call::new("ADD", "c4", &conf).run().refusal().says(&[text]);
            exhausted(&conf, &[text]);
        }
    }
}

#[test]
fn status_when_store_is_missing() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        unavailable(&lab.conf_of("bridge"), &["there is no store", "margay --store", "pool create"]);
        ready(&lab.conf_with("bridge", json!({"subnet": "10.5.0.0/24"})));
        assert!(!lab.store.exists(), "nothing is made");
    }
}

#[test]
fn status_when_first_add_could_not_make_store() {
    for engine in ENGINES {
        let mut lab = Lab::new(engine);
        let disk = lab.root.path().join("disk");
        fs::create_dir(&disk).unwrap();
        let mount = Mount::tmpfs(&disk, "8m");
        let mut conf_at = |path: &str| {
            lab.store = disk.join(path);
            lab.conf_with("bridge", json!({"subnet": "10.5.0.0/24"}))
        };
        let (store, below) = (conf_at("store"), conf_at("a/b/store"));
        ready(&store);
        ready(&below);
        let listing = || {
            let names = fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name());
            names.collect::<std::collections::BTreeSet<_>>()
        };
        assert!(listing().is_empty(), "nothing is made");
        let refused = |conf: &Value, texts: &[&str]| {
            let before = listing();
            unavailable(conf, texts);
            assert_eq!(listing(), before, "nothing is made");
            Call::new("ADD", "c1", conf).run().refusal().says(texts);
        };
        fs::write(disk.join("file"), "").unwrap();
        refused(&conf_at("file/store"), &["is in the way"]);
        fs::create_dir(disk.join("foreign")).unwrap();
        fs::write(disk.join("foreign/notes"), "").unwrap();
        refused(&conf_at("foreign"), &["holds notes and no store"]);
        let mut filler = fs::File::create(disk.join("filler")).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
        refused(&store, &["no space left", "free some space"]);
        refused(&below, &["no space left", "free some space"]);
        drop(filler);
        fs::remove_file(disk.join("filler")).unwrap();
        ready(&store);
        mount.remount("ro");
        refused(&store, &["read-only file system"]);
        refused(&below, &["read-only file system"]);
        mount.remount("rw");
        ready(&store);
        Call::new("ADD", "c1", &store).ok();
    }
}

#[test]
fn status_when_disk_became_read_only() {
    for engine in ENGINES {
        let mut lab = Lab::new(engine);
        let disk = lab.root.path().join("disk");
        fs::create_dir(&disk).unwrap();
        let mount = Mount::tmpfs(&disk, "8m");
        lab.store = disk.join("store");
        lab.pool("lab", "10.5.0.0/24");
        let conf = lab.conf_of("bridge");
        ready(&conf);
        mount.remount("ro");
        unavailable(&conf, &["read-only file system"]);
        lab.add("c1").run().refusal().says(&["read-only file system"]);
        mount.remount("rw");
        ready(&conf);
        // STATUS also checks for disk space if the store is already open, as in a daemon.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open =
                datastore::open(&lab.location(), &Create::Never.with_wait(Duration::from_secs(10))).await.unwrap();
            open.check_room().await.unwrap();
            let over = Mount::read_only(&disk);
            let error = open.check_room().await.unwrap_err();
            assert_eq!(*error.kind(), kv::ErrorKind::Io);
            assert!(error.to_string().contains("read-only file system"), "{error}");
            drop(over);
            open.check_room().await.unwrap();
            open.close().await.unwrap();
        });
        lab.add("c1").ok();
    }
}

#[test]
fn status_is_ready_when_store_is_busy() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.5.0.0/24");
        lab.while_open(|| {
            let outcome = ready(&lab.conf_of("bridge"));
            assert!(outcome.stderr.contains("in use by another process"), "{outcome:?}");
        });
    }
}

#[test]
fn status_when_store_cannot_be_used() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.5.0.0/24");
        let mut other = lab.conf_of("bridge");
        other["datastore_type"] = engine.other().name().into();
        unavailable(&other, &["set datastore_type to"]);
        fs::write(lab.store.join("store.id"), "?").unwrap();
        unavailable(&lab.conf_of("bridge"), &["the store is damaged", "restore"]);
    }
    let mut etcd = Lab::new(Engine::REDB).conf_of("bridge");
    etcd["datastore_type"] = "etcdv3".into();
    etcd["etcd_endpoints"] = "http://127.0.0.1:1".into();
    etcd.as_object_mut().unwrap().remove("datastore_path");
    unavailable(&etcd, &["etcd"]);
}
