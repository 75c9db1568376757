//! Tests on a whole Calico cluster whose documents are loaded into etcd.

use std::collections::BTreeSet;

use datastore::Create;
use ipam_core::model::{Block, Document, keys};
use kv::{Range, StoreExt};
use serde::Deserialize;
use serde_json::Value;

use crate::lab::Lab;
use crate::server::Etcd;

#[derive(Deserialize)]
struct Stored {
    key: String,
    value: String,
}

fn fixture<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = format!("{}/../../fixtures/calico/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Converts the numbers of a JSON value to strings, because Margay's utilization report contains strings.
fn with_texts(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::String(number.to_string()),
        Value::Array(items) => items.iter().map(with_texts).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), with_texts(value))).collect(),
        other => other.clone(),
    }
}

#[test]
fn calico_cluster_is_counted_alike_and_given_back_whole() {
    let lab = Lab::on_empty(vec![Etcd::start().unwrap()]);
    lab.with_ipam(Create::Never, async |ipam, deadline| {
        let rows: Vec<Stored> = fixture("cluster.json");
        for row in rows {
            ipam.store().put(row.key, row.value).await.unwrap();
        }
        let theirs: Value = fixture("utilization.json");
        let ours = ipam.utilization(kv::Deadline::after(std::time::Duration::from_secs(60))).await.unwrap();
        assert!(ours.orphaned.is_empty());
        let ours: Vec<Value> = ours.pools.iter().map(|pool| serde_json::to_value(pool).unwrap()).collect();
        let theirs: Vec<Value> = theirs["pools"].as_array().unwrap().iter().map(with_texts).collect();
        assert_eq!(ours.len(), theirs.len());
        for (ours, mut theirs) in ours.into_iter().zip(theirs) {
            let name = theirs.as_object_mut().unwrap().remove("pool").unwrap();
            theirs["name"] = name;
            assert_eq!(ours, theirs);
        }

        let blocks = async || {
            let listed = ipam.store().list(Range::Prefix("/calico/ipam/v2/assignment/".into())).await.unwrap();
            let blocks = listed.kvs.iter().map(|kv| Block::decode(&kv.key, kv.value.as_bytes()).unwrap());
            blocks.collect::<Vec<_>>()
        };
        let mut held = BTreeSet::new();
        for block in blocks().await {
            held.extend(block.allocated().filter(|(_, entry)| entry.released_at().is_none()).map(|(ip, _)| ip));
        }
        let handles = ipam.store().list(Range::Prefix("/calico/ipam/v2/handle/".into())).await.unwrap();
        let mut given_back = BTreeSet::new();
        for kv in &handles.kvs {
            let handle = keys::parse_handle(&kv.key).unwrap();
            let released = ipam.release_by_handle(handle, deadline).await.unwrap();
            assert!(!released.is_empty(), "{handle} has nothing");
            given_back.extend(released);
        }
        assert!(handles.kvs.len() > 200, "{}", handles.kvs.len());
        assert_eq!(given_back, held);

        let handles = ipam.store().list(Range::Prefix("/calico/ipam/v2/handle/".into())).await.unwrap();
        assert!(handles.kvs.is_empty());
        for block in blocks().await {
            assert!(block.is_empty() && block.free_count(&Default::default()) == block.capacity(), "{}", block.cidr());
        }
    });
    lab.nothing_is_left();
}
