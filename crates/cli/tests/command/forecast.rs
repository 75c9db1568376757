//! Tests `margay ipam show --forecast` on the history of each kind of store, and the metrics and alerts about
//! forecasts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use datastore::Location;
use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::{NewPool, Owner};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Store, StoreExt};
use kv_local::{Create, OpenOptions};
use serde_json::Value;
use time::OffsetDateTime;

use crate::common::{Lab, TEST_TIMEOUT, margay};
use crate::support::Etcd;

const DAY: i64 = 24 * 60 * 60;

fn soon() -> Deadline {
    Deadline::after(TEST_TIMEOUT)
}

/// Prepares the four pools `filling`, `steady`, `full` and `empty`, of four addresses each. In the pool `filling`, one
/// address was assigned two days ago and a second one a day ago. The two addresses of the pool `steady` are assigned
/// before the readable history begins. The pool `full` has no free address, and the pool `empty` has no assigned
/// address.
async fn fill(store: Arc<dyn Store>, ago: &Arc<AtomicI64>) {
    let clock = {
        let ago = Arc::clone(ago);
        Arc::new(move || OffsetDateTime::now_utc() - Duration::from_secs(ago.load(Ordering::Relaxed).unsigned_abs()))
    };
    let ipam = Ipam::new(store, Nodes::FirstSeen).with_clock(clock);
    for (place, name) in ["filling", "steady", "full", "empty"].into_iter().enumerate() {
        let new = NewPool::new(name, format!("10.9.0.{}/30", 4 * place).parse().unwrap()).with_block_size(30);
        ipam.create_pool(&new, None, soon()).await.unwrap();
    }
    let assign = async |pool: &str, handle: &str| {
        let attributes = [("node".to_owned(), "node1".to_owned())].into();
        let request =
            HandleRequest::new(handle, Owner::host("node1"), RequestedAddresses::any(1, 0)).with_attributes(attributes);
        ipam.assign_to_handle(&request.with_pools(ipam_core::net::Family::V4, [pool]), soon()).await.unwrap();
    };
    for (pool, handles) in [("steady", 2), ("full", 4)] {
        for number in 0..handles {
            assign(pool, &format!("net.{pool}{number}")).await;
        }
    }
    // The history starts at the current revision on every store, because earlier revisions are compacted.
    let revision = ipam.store().list(kv::Range::Key("/".into())).await.unwrap().revision;
    ipam.store().compact(revision).await.unwrap();
    for (number, before) in [2 * DAY, DAY].into_iter().enumerate() {
        ago.store(before, Ordering::Relaxed);
        assign("filling", &format!("net.filling{number}")).await;
    }
}

/// Returns the forecast of each pool: the kind of the forecast, and the days until the pool is full.
fn forecasts(report: &Value) -> Vec<String> {
    let pools = report["pools"].as_array().unwrap();
    let one = |pool: &Value| {
        let days = pool["days"].as_f64().map_or_else(String::new, |days| format!(" {days:.1}"));
        format!("{} {}{days}", pool["name"].as_str().unwrap(), pool["kind"].as_str().unwrap())
    };
    let mut found: Vec<String> = pools.iter().map(one).collect();
    found.sort();
    found
}

/// Checks that `margay ipam show --forecast` and the metrics report the forecast that follows from the store's history.
fn judge(location: &Location) {
    let run = |args: &str| {
        margay(["--store".to_owned(), location.to_string()].into_iter().chain(args.split(' ').map(str::to_owned)))
    };
    let report = run("ipam show --forecast -o json").json();
    assert_eq!(forecasts(&report), ["empty steady", "filling filling 2.0", "full full", "steady steady"], "{report}");
    let shown = run("ipam show --forecast");
    assert_eq!((shown.code, shown.err.as_str()), (0, "note: from 2 days of history\n"));
    let table = shown.out;
    let row = table.lines().find(|line| line.contains("| filling ")).unwrap();
    assert!(row.contains("10.9.0.0/30") && row.contains("1.0"), "{table}");
    let metrics = run("metrics --cluster").answer();
    let days = |pool: &str| {
        metrics.lines().find(|line| line.starts_with("margay_pool_days_until_full") && line.contains(pool))
    };
    assert!(days("\"full\"").unwrap().ends_with(" 0"), "{metrics}");
    assert!(days("\"filling\"").is_some() && days("\"steady\"").is_none(), "{metrics}");
}

#[test]
fn forecast_follows_past_use_on_disk() {
    for lab in Lab::each() {
        let ago = Arc::new(AtomicI64::new(2 * DAY));
        let clock = {
            let ago = Arc::clone(&ago);
            kv_mvcc::Clock::new(move || {
                SystemTime::now() - Duration::from_secs(ago.load(Ordering::Relaxed).unsigned_abs())
            })
        };
        let options = OpenOptions::default().with_create(Create::IfMissing).with_clock(clock);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let open = datastore::open(&lab.location, &options).await.unwrap();
            fill(open.store(), &ago).await;
            open.close().await.unwrap();
        });
        judge(&lab.location);
    }
}

#[test]
fn forecast_follows_past_use_on_etcd() {
    let etcd = Etcd::start().unwrap();
    let location = stores::at(&etcd.url().replace("http:", "etcd:")).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let open = datastore::open(&location, &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        fill(open.store(), &Arc::new(AtomicI64::new(2 * DAY))).await;
        open.close().await.unwrap();
    });
    judge(&location);
}

/// Returns the names of Margay's metrics in a text, without the suffixes that Prometheus adds to histograms.
fn names(text: &str) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_of_name(c)).filter(|word| word.starts_with("margay_"));
    words.map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned()).collect()
}

#[test]
fn alerts_and_dashboard_use_existing_metrics() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let known = names(&(read("docs/command-line.md") + &read("docs/one-node-served.md")));
    let (rules, dashboard) = (read("packaging/prometheus/margay.rules.yaml"), read("packaging/grafana/margay.json"));
    for text in [&rules, &dashboard] {
        let used = names(text);
        assert!(used.len() > 4 && used.is_subset(&known), "{:?} are not documented", used.difference(&known));
    }
    let panels: Value = serde_json::from_str(&dashboard).unwrap();
    assert!(panels["panels"].as_array().unwrap().iter().all(|panel| panel["targets"][0]["expr"].is_string()));
    assert_eq!(rules.matches("- alert: ").count(), rules.matches("summary: ").count());
}

/// Returns the `margay` command lines that the alerts' descriptions mention, without the word `margay`; each one ends
/// at a punctuation mark.
fn commands(rules: &str) -> Vec<String> {
    let mut found = Vec::new();
    for description in rules.split("description: >-").skip(1) {
        let words: Vec<&str> = description.split("- alert: ").next().unwrap().split_whitespace().collect();
        let text = format!(" {}", words.join(" "));
        let parts = text.split(" margay ").skip(1);
        found.extend(parts.map(|part| part.split([';', ',', '.', ':']).next().unwrap().to_owned()));
    }
    found
}

#[test]
fn alerts_name_existing_commands_and_compare_one_store() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let (rules, dashboard) = (read("prometheus/margay.rules.yaml"), read("grafana/margay.json"));
    let commands = commands(&rules);
    assert!(commands.len() > 9, "{commands:?}");
    for command in commands {
        let done = margay(["--store", "redb:///no/such/store"].into_iter().chain(command.split(' ')));
        assert!(!done.err.contains("try '--help'"), "margay {command}: {}", done.err);
    }
    // Several stores may have pools or quotas with the same names, so queries must keep the labels `instance` and
    // `job`.
    for text in [&rules, &dashboard] {
        assert!(!text.contains(" on (") && !text.contains("by (kind"), "two stores are taken for one");
    }
}
