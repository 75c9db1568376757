//! Tests etcd's API together with Margay's programs, which use the API, or open the store while clients use the API.

use std::thread::{sleep, spawn};
use std::time::Duration;

use backend_etcd::{EtcdStore, Options};
use conformance::patient;
use kv::{Compare, Op, Range, RangeRequest, Revision, Store, Txn};
use serde_json::{Value, json};

use super::{Api, Watching};
use crate::lab::{ENGINES, Lab, block_on};
use crate::programs::{Call, Running, TEST_TIMEOUT, margay, run};

#[test]
fn api_passes_every_conformance_rule() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.76.0.0/24");
        let api = Api::start(&lab);
        // The conformance suite limits each case itself, so the limit of the whole run only has to be generous: four
        // times a command's limit.
        let judged = Running::start(margay(["conformance", &api.url()]), "").end_within(patient(TEST_TIMEOUT * 4));
        assert_eq!(judged.code, Some(0), "{engine}: {}\n{}", judged.out, judged.err);
        assert!(judged.out.contains(" passed, 0 failed"), "{engine}: {}", judged.out);
        api.end();
    }
}

#[test]
fn api_serves_plugins_and_commands_as_etcd_endpoints() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.76.0.0/24");
        let api = Api::start(&lab);
        let conf = json!({
            "cniVersion": "1.0.0",
            "name": "net1",
            "type": "bridge",
            "nodename": "node-1",
            "etcd_endpoints": format!("http://{}", api.address),
            "ipam": { "type": "margay-ipam" },
        });
        // When Margay uses an etcd, all nodes must be registered.
        let node = r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-1"},"spec":{}}"#;
        let key = "put /calico/resources/v3/projectcalico.org/nodes/node-1";
        Running::start(api.etcdctl_command(key), node).end().ok();
        let added = Call::new("ADD", "over-the-api", &conf).ok().address();
        let beside = lab.add("beside-it").ok().address();
        assert_ne!(added, beside);
        assert_eq!(lab.held_there().len(), 2);
        let shown = run(margay(["--store", &api.url(), "ipam", "show", "--ip", &added.to_string()])).ok();
        assert!(shown.out.contains("over-the-api"), "{shown:?}");
        assert_eq!(run(margay(["--store", &api.url(), "ipam", "check"])).code, Some(0));
        Call::new("DEL", "over-the-api", &conf).ok();
        lab.del("beside-it").ok();
        assert_eq!(lab.held_there().len(), 0);
        api.end();
        lab.is_in_order();
    }
}

#[test]
fn api_late_put_is_not_applied_while_store_is_lent() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.76.0.0/24");
        let api = Api::start(&lab);
        api.etcdctl("put /t/a before").ok();
        lab.held_open(async |_| {
            assert!(api.etcdctl("endpoint status").ok().out.contains("3.5.13"));
            assert!(api.etcdctl("member list").ok().out.contains("started"));
            let late = api.etcdctl("--command-timeout=1s put /t/a late");
            assert!(late.code != Some(0) && late.err.contains("deadline exceeded"), "{late:?}");
        });
        assert_eq!(api.etcdctl("get /t/a --print-value-only").ok().out, "before\n", "{engine}");
        sleep(Duration::from_millis(300));
        assert_eq!(api.etcdctl("get /t/a --print-value-only").ok().out, "before\n", "{engine}");
        api.end();
    }
}

#[test]
fn api_watch_goes_on_after_store_was_lent() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.76.0.0/24");
        let api = Api::start(&lab);
        let watching = Watching::start(&api, &lab);
        for round in 0..5 {
            lab.held_open(async |_| ());
            api.etcdctl(&format!("put /t/{round} x")).ok();
        }
        watching.until("/t/4");
        for round in 0..5 {
            assert_eq!(watching.count(&format!("/t/{round}")), 1, "{engine}: {round}");
        }
        api.end();
    }
}

#[test]
fn api_watch_ends_as_compacted_when_store_is_restored() {
    let lab = Lab::with_pool("redb", "10.76.0.0/24");
    let backup = lab.root().join("backup");
    lab.margay(&format!("store backup {}", backup.display())).ok();
    let api = Api::start(&lab);
    let cluster = |api: &Api| {
        let status: Value = serde_json::from_str(&api.etcdctl("endpoint status -w json").ok().out).unwrap();
        status[0]["Status"]["header"]["cluster_id"].clone()
    };
    let before = cluster(&api);
    api.etcdctl("put /t/a 1").ok();
    let watching = Watching::start(&api, &lab);
    let file = backup.display().to_string();
    let store = lab.url();
    spawn(move || run(margay(["--store", &store, "store", "restore", &file, "--replace"])).ok()).join().unwrap();
    assert_eq!(api.etcdctl("get /t/a").ok().out, "");
    assert_ne!(cluster(&api), before);
    let ended = watching.etcdctl.end();
    assert!(ended.err.contains("required revision has been compacted"), "{ended:?}");
    api.end();
}

#[test]
fn api_readers_and_writers_at_once_lose_nothing() {
    let lab = Lab::with_pool("redb", "10.76.0.0/24");
    let api = Api::start(&lab);
    let url = format!("http://{}", api.address);
    block_on(async {
        let add = async || {
            let store = EtcdStore::open(&Options::new([url.clone()])).unwrap();
            for _ in 0..40 {
                loop {
                    let found = store.range(RangeRequest::new(Range::key("/t/count"))).await.unwrap();
                    let (now, revision) = found.kvs.first().map_or((0, Revision::UNSET), |kv| {
                        (String::from_utf8_lossy(kv.value.as_bytes()).parse::<u32>().unwrap(), kv.mod_revision)
                    });
                    let txn = Txn::new()
                        .with_compares([Compare::unchanged("/t/count", revision)])
                        .with_success([Op::put("/t/count", (now + 1).to_string())]);
                    if store.txn(txn).await.unwrap().succeeded {
                        break;
                    }
                }
            }
        };
        futures::join!(add(), add(), add(), add());
    });
    assert_eq!(api.etcdctl("get /t/count --print-value-only").ok().out, "160\n");
    api.end();
}
