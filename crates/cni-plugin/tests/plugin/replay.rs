//! Replays all recorded calls of Calico's IPAM plugin in order, on stores with the recorded documents.
//!
//! Within a pool, Margay may choose another address than Calico chose in the recording. The shape of each result, the
//! masks, the pools, the exit statuses and the errors must equal those in the recording.

use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use agent::DirectAllocator;
use cni_plugin::{PluginName, ProcessOutcome};
use datastore::Create;
use ipnet::IpNet;
use kv::{Store, StoreExt};
use serde_json::Value;

use crate::common::{call, call_binary, finish};
use crate::transcript::{Case, DIFFERENT_ON_PURPOSE, OTHER_WORDS, record};
use testkit::server::Etcd;

const POOLS: [&str; 6] =
    ["10.65.0.0/24", "10.66.0.0/22", "10.67.0.0/24", "10.68.0.0/26", "10.69.0.0/26", "fd80:24e2:f998:72d6::/112"];

/// Replaces each address that the allocator chose with the address's pool. Explicitly requested addresses, which a CNI
/// result shows as /32 or /128, stay as they are.
fn without_choice(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Ok(net) = text.parse::<IpNet>()
                && net.prefix_len() < net.max_prefix_len()
            {
                let pool = POOLS.iter().find(|pool| pool.parse::<IpNet>().unwrap().contains(&net.addr()));
                *text = format!("{}: /{}", pool.unwrap(), net.prefix_len());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(without_choice),
        Value::Object(fields) => fields.values_mut().for_each(without_choice),
        _ => {}
    }
}

fn shape(stdout: &str) -> Value {
    let mut value = serde_json::from_str(stdout).unwrap_or(Value::Null);
    without_choice(&mut value);
    value
}

fn compare(case: &Case, outcome: &ProcessOutcome) {
    assert_eq!(outcome.exit, case.exit, "{}: {outcome:?}", case.name);
    if OTHER_WORDS.contains(&case.name.as_str()) {
        assert_eq!(shape(&outcome.stdout)["code"], shape(&case.stdout)["code"], "{}", case.name);
        return;
    }
    assert_eq!(shape(&outcome.stdout), shape(&case.stdout), "{}", case.name);
    // Compare the indentation, the order of keys and the line ends of the output, but not the chosen addresses.
    let skeleton =
        |text: &str| text.split('"').filter(|part| part.parse::<IpNet>().is_err()).collect::<Vec<_>>().join("\"");
    assert_eq!(skeleton(&outcome.stdout), skeleton(&case.stdout), "{}", case.name);
}

/// Replays the recorded calls of Calico's IPAM plugin; the function `program` runs one recorded call.
fn replay(program: impl Fn(&Case) -> ProcessOutcome) {
    let cases = record().cases;
    let (last, all) = cases.split_last().unwrap();
    let played = |case: &&Case| DIFFERENT_ON_PURPOSE.iter().all(|(name, _)| *name != case.name);
    for case in all.iter().filter(played) {
        compare(case, &program(case));
    }
    // The last recorded call found a full pool, so use up all addresses of the pool before replaying that call.
    let mut filled = 0;
    for node in ["node3", "node1"] {
        loop {
            let mut filler = last.clone();
            filler.env.insert("CNI_CONTAINERID".into(), format!("filler{filled}"));
            filler.stdin = filler.stdin.replace("\"nodename\": \"node1\"", &format!("\"nodename\": \"{node}\""));
            if program(&filler).exit != 0 {
                break;
            }
            filled += 1;
            assert!(filled < 300, "the pool has 256 addresses");
        }
    }
    assert!(filled > 200, "{filled}");
    compare(last, &program(last));
}

async fn load(store: &Arc<dyn Store>) {
    for stored in record().start {
        store.put(stored.key, stored.value).await.unwrap();
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn replay_in_memory() {
    let store: Arc<dyn Store> = Arc::new(kv_mvcc::memory());
    runtime().block_on(load(&store));
    let allocator = DirectAllocator::on(store);
    replay(|case| call(PluginName::Margay, &case.env, case.stdin.as_bytes(), &allocator));
}

/// Replays the recording with the real program on an embedded store, in one process for each call.
fn on_engine(engine: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ipam");
    let location = stores::of_engine(engine, &path).unwrap();
    runtime().block_on(async {
        let open = datastore::open(&location, &Create::IfMissing.with_wait(Duration::from_secs(10))).await.unwrap();
        load(&open.store()).await;
        open.close().await.unwrap();
    });
    replay(|case| call_binary(&case.env, on_store(&case.stdin, engine, &path).as_bytes()));

    // After the replay, no address is assigned twice, and the store contains all recorded assignments.
    let held = runtime().block_on(async {
        let open = datastore::open(&location, &Create::Never.with_wait(Duration::from_secs(10))).await.unwrap();
        let used = ipam_core::Ipam::new(open.store(), ipam_core::Nodes::Registered)
            .utilization(kv::Deadline::after(Duration::from_secs(60)))
            .await
            .unwrap();
        open.close().await.unwrap();
        used.pools.iter().find(|pool| pool.name == "main").map(|pool| pool.usage.in_use.to_string())
    });
    // The pool has 256 addresses. The reserved addresses are not usable, except one that was requested explicitly and
    // is in use.
    assert_eq!(held.as_deref(), Some("253"));
}

/// Replaces etcd with an embedded store in a network configuration from the recording.
fn on_store(stdin: &str, engine: &str, path: &Path) -> String {
    let Ok(Value::Object(mut conf)) = serde_json::from_str(stdin) else { return stdin.to_owned() };
    if conf.get("datastore_type").is_some_and(|kind| kind == "etcdv3") {
        conf.insert("datastore_type".into(), engine.into());
        conf.insert("datastore_path".into(), path.to_string_lossy().into_owned().into());
        conf.remove("etcd_endpoints");
    }
    Value::Object(conf).to_string()
}

/// Replays the recording with the real program on a real etcd; the program runs under Calico's plugin name.
#[test]
fn replay_on_etcd() {
    let etcd = Etcd::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("calico-ipam");
    symlink(env!("CARGO_BIN_EXE_margay-ipam"), &program).unwrap();
    let location = stores::at(&etcd.url().replace("http:", "etcd:")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(&location, &Create::Never.with_wait(Duration::from_secs(10))).await.unwrap();
        load(&open.store()).await;
        open.close().await.unwrap();
    });
    replay(|case| {
        let stdin = case.stdin.replace("http://127.0.0.1:2379", &etcd.url());
        let lock = folder.path().join("run/ipam.lock");
        let stdin = stdin.replace("/run/ipam.lock", lock.to_str().unwrap());
        finish(Command::new(&program).env_clear().envs(&case.env), stdin.as_bytes())
    });
    assert!(folder.path().join("run/ipam.lock").is_file(), "the lock of the configuration is taken");
    let used = runtime.block_on(async {
        let open = datastore::open(&location, &Create::Never.with_wait(Duration::from_secs(10))).await.unwrap();
        ipam_core::Ipam::new(open.store(), ipam_core::Nodes::Registered)
            .utilization(kv::Deadline::after(Duration::from_secs(60)))
            .await
            .unwrap()
    });
    let held = used.pools.iter().find(|pool| pool.name == "main").map(|pool| pool.usage.in_use.to_string());
    assert_eq!(held.as_deref(), Some("253"));
}

#[test]
fn replay_on_sled() {
    on_engine("sled");
}

#[test]
fn replay_on_redb() {
    on_engine("redb");
}

#[test]
fn replay_shapes_differ_only_in_chosen_addresses() {
    let address: IpAddr = "10.65.0.9".parse().unwrap();
    assert_eq!(shape(&format!("[\"{address}/28\"]")), shape("[\"10.65.0.77/28\"]"));
    assert_ne!(shape("[\"10.65.0.9/28\"]"), shape("[\"10.65.0.9/26\"]"));
    assert_ne!(shape("[\"10.65.0.9/28\"]"), shape("[\"10.66.0.9/28\"]"));
    assert_ne!(shape("[\"10.65.0.9/32\"]"), shape("[\"10.65.0.8/32\"]"));
}
