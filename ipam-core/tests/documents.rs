//! Tests that every document that the real Calico stored is decoded and encoded again to the same bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;

use ipam_core::model::{
    Affinity, Attribute, Block, Document, Handle, IpReservation, IpamConfig, Labels, Malformed, Node, Pool, PoolUse,
    keys::{self, ResourceKind},
};
use ipam_core::net::Count;
use ipam_core::pools::{block_of, blocks_from, pool_of, start_of};
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::{go_string, parse_go_string};
use ipam_core::utilization::utilization;
use kv::Key;
use proptest::prelude::*;
use serde_json::Value;
use time::macros::datetime;

fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/calico").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the key and the value's text of a row in a fixture file.
fn stored(row: &Value) -> (Key, &str) {
    (row["key"].as_str().unwrap().into(), row["value"].as_str().unwrap())
}

/// Decodes a document by the kind in its key, and encodes the document again. Returns `None` if the model has no type
/// for the kind in the key.
fn round(key: &Key, value: &str) -> Option<(&'static str, Result<kv::Value, Malformed>)> {
    fn pass<T: Document>(key: &Key, value: &str) -> Result<kv::Value, Malformed> {
        T::decode(key, value.as_bytes())?.encode()
    }
    Some(if let Some(cidr) = keys::parse_block(key) {
        assert_eq!(keys::block(cidr), *key);
        ("block", pass::<Block>(key, value))
    } else if let Some((owner, cidr)) = keys::parse_affinity(key) {
        assert_eq!(keys::affinity(&owner, cidr).as_ref(), Some(key));
        ("affinity", pass::<Affinity>(key, value))
    } else if let Some(id) = keys::parse_handle(key) {
        assert_eq!(keys::handle(id), *key);
        ("handle", pass::<Handle>(key, value))
    } else if *key == keys::config() {
        ("config", pass::<IpamConfig>(key, value))
    } else if keys::parse_resource(ResourceKind::IpPool, key).is_some() {
        ("pool", pass::<Pool>(key, value))
    } else if keys::parse_resource(ResourceKind::IpReservation, key).is_some() {
        ("reservation", pass::<IpReservation>(key, value))
    } else if keys::parse_resource(ResourceKind::Node, key).is_some() {
        ("node", pass::<Node>(key, value))
    } else {
        return None;
    })
}

#[test]
fn documents_keep_unknown_fields_byte_for_byte() {
    // The unknown JSON fields contain numbers that no Rust type can hold, unsorted names, escapes and spaces.
    let odd =
        r#""later":{"z":1.0,"a":[1E+3, 123456789012345678901234567890],"n":0.1000000000000000055,"t":"\u00e9\/"}"#;
    let documents = [
        ("/calico/ipam/v2/host/a/ipv4/block/10.0.0.0-32", r#"{"state":"confirmed","deleted":false,ODD}"#),
        ("/calico/ipam/v2/handle/net.c1", r#"{"block":{"10.0.0.0/32":1},"deleted":false,ODD}"#),
        ("/calico/ipam/v2/config", r#"{"strict_affinity":true,ODD}"#),
        (
            "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-32",
            r#"{"cidr":"10.0.0.0/32","affinity":null,"allocations":[0],"unallocated":[],"attributes":[{"handle_id":"net.c1",ODD}],"sequenceNumber":18446744073709551615,"sequenceNumberForAllocation":{"0":1},"deleted":false,ODD}"#,
        ),
    ];
    for (key, value) in documents {
        let value = value.replace("ODD", odd);
        let (_, written) = round(&key.into(), &value).unwrap();
        assert_eq!(String::from_utf8(written.unwrap().as_bytes().to_vec()).unwrap(), value, "{key}");
    }
}

fn check(rows: &[Value]) -> BTreeMap<&'static str, usize> {
    let mut seen = BTreeMap::new();
    for (line, row) in rows.iter().enumerate() {
        let (key, value) = stored(row);
        let Some((kind, written)) = round(&key, value) else {
            *seen.entry("other").or_default() += 1;
            continue;
        };
        let written = written.unwrap_or_else(|error| panic!("line {}: {error}", line + 1));
        let read: Value = serde_json::from_str(value).unwrap();
        let written: Value = serde_json::from_slice(written.as_bytes()).unwrap();
        assert_eq!(written, read, "line {} at {key}", line + 1);
        *seen.entry(kind).or_default() += 1;
    }
    seen
}

#[test]
fn documents_are_all_written_as_read() {
    let rows: Vec<Value> = fixture("documents.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 406);
    let expected = [
        ("affinity", 9),
        ("block", 280),
        ("config", 19),
        ("handle", 15),
        ("node", 23),
        ("other", 37),
        ("pool", 21),
        ("reservation", 2),
    ];
    assert_eq!(check(&rows), BTreeMap::from(expected));
}

#[test]
fn documents_of_cluster_are_written_as_read() {
    let rows: Vec<Value> = serde_json::from_str(&fixture("cluster.json")).unwrap();
    let seen = check(&rows);
    assert_eq!(seen.get("other"), None, "{seen:?}");
    let transcript: Value = serde_json::from_str(&fixture("transcript.json")).unwrap();
    check(transcript["start"].as_array().unwrap());
}

/// This test uses old and odd forms of documents, which a store that was in use for several years can still contain.
#[test]
fn documents_of_old_forms_are_written_as_read() {
    for (key, value) in [
        (
            keys::block("10.0.0.0/31".parse().unwrap()),
            r#"{"cidr":"10.0.0.0/31","allocations":[null,null],"unallocated":[1,0]}"#,
        ),
        (
            keys::block("10.0.0.0/31".parse().unwrap()),
            r#"{"cidr":"10.0.0.0/31","affinity":"host:a","hostAffinity":"a","strictAffinity":false,"allocations":[0,null],
               "unallocated":[1],"attributes":[{"handle_id":null,"secondary":null,"later":{"x":[1,null]}}],
               "sequenceNumber":18446744073709551615,"sequenceNumberForAllocation":null,"deleted":true,"later":1.5}"#,
        ),
        (
            keys::block("10.0.0.0/31".parse().unwrap()),
            r#"{"cidr":"10.0.0.0/31","affinity":null,"affinity_claim_time":"2026-11-21T02:41:03.5+01:00",
               "allocations":[0,1],"unallocated":[],"attributes":[{"releasedAt":"2026-11-21T02:41:03Z"},
               {"handle_id":"h\r\neth0","secondary":{},"alternateOwnerAttrs":{"pod":"b"}}],
               "sequenceNumberForAllocation":{"0":9007199254740993},"sequenceNumber":9007199254740994}"#,
        ),
        (
            keys::resource(ResourceKind::IpPool, "p"),
            r#"{"kind":"IPPool","metadata":{"name":"p","creationTimestamp":null,"labels":{"a":"b"}},"spec":{"cidr":"10.0.0.0/8",
               "ipip":{"mode":"Always"},"later":9007199254740993},"status":{"conditions":[{"type":"Allocatable","x":null}]}}"#,
        ),
        (keys::config(), "{}"),
        (
            keys::config(),
            r#"{"strict_affinity":null,"maxBlocksPerHost":9007199254740993,"ipCooldownSeconds":60,"x":{}}"#,
        ),
        (keys::handle("h"), r#"{"block":null,"id":"h"}"#),
        (keys::resource(ResourceKind::IpReservation, "r"), r#"{"spec":{"reservedCIDRs":null,"x":1}}"#),
    ] {
        let (_, written) = round(&key, value).unwrap();
        let written: Value = serde_json::from_slice(written.unwrap().as_bytes()).unwrap();
        assert_eq!(written, serde_json::from_str::<Value>(value).unwrap(), "{key}");
    }
    let affinity = Affinity::decode(&Key::default(), b"").unwrap();
    assert_eq!(affinity.encode().unwrap().as_bytes(), b"{}");
}

#[test]
fn documents_of_damaged_blocks_are_errors_that_name_key() {
    let key = keys::block("10.0.0.0/31".parse().unwrap());
    for (value, reason) in [
        ("", "EOF"),
        ("null", "invalid type"),
        ("{", "EOF"),
        (r#"{"cidr":"x","allocations":[],"unallocated":[]}"#, "not a network"),
        (r#"{"cidr":"10.0.0.2/31","allocations":[null,null],"unallocated":[0,1]}"#, "the block inside is 10.0.0.2/31"),
        (r#"{"cidr":"10.0.0.0/31","allocations":[null],"unallocated":[0]}"#, "1 allocations for 2 addresses"),
        (r#"{"cidr":"10.0.0.0/31","allocations":[null,0],"unallocated":[0]}"#, "attribute 0 of 0"),
        (r#"{"cidr":"10.0.0.0/31","allocations":[null,-1],"unallocated":[0],"attributes":[{}]}"#, "invalid value"),
        (r#"{"cidr":"10.0.0.0/31","allocations":[null,7],"unallocated":[0],"attributes":[{}]}"#, "attribute 7 of 1"),
        (r#"{"cidr":"10.0.0.0/31","allocations":null,"unallocated":null}"#, "invalid type"),
        (
            r#"{"cidr":"10.0.0.0/31","allocations":[null,null],"unallocated":[0,1],"affinity_claim_time":"soon"}"#,
            "RFC 3339",
        ),
    ] {
        let error = Block::decode(&key, value.as_bytes()).unwrap_err();
        assert_eq!(error.key(), "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-31");
        assert!(error.to_string().contains(reason), "{value}: {error}");
    }
    let huge = keys::block("::/0".parse().unwrap());
    let error = Block::decode(&huge, br#"{"cidr":"::/0","allocations":[],"unallocated":[]}"#).unwrap_err();
    assert!(error.reason().contains("cannot have 0 prefixes"), "{error}");
    // Unknown fields are copied without being parsed, so deep nesting does no harm.
    let deep = |field: &str| format!(r#"{{"{field}":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(Handle::decode(&keys::handle("h"), deep("block").as_bytes()).is_err());
    let passed = Handle::decode(&keys::handle("h"), deep("x").as_bytes()).unwrap();
    assert!(passed.encode().unwrap().as_bytes() == deep("x").as_bytes());
}

#[test]
fn documents_of_damaged_queue_are_healed() {
    let key = keys::block("10.0.0.0/29".parse().unwrap());
    let value = r#"{"cidr":"10.0.0.0/29","allocations":[0,null,null,null,null,null,null,0],
                    "unallocated":[5,5,0,99,3,5,1],"attributes":[{}]}"#;
    let block = Block::decode(&key, value.as_bytes()).unwrap();
    let free: Vec<String> = block.free_addresses().map(|ip| ip.to_string()).collect();
    assert_eq!(free, ["10.0.0.5", "10.0.0.3", "10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.6"]);
}

/// Tests that Margay's report on a cluster counts the same numbers of addresses as Calico's report.
#[test]
fn documents_utilization_matches_calico() {
    let rows: Vec<Value> = serde_json::from_str(&fixture("cluster.json")).unwrap();
    let (mut pools, mut blocks, mut reserved) = (Vec::new(), Vec::new(), Vec::new());
    for row in &rows {
        let (key, value) = stored(row);
        let value = value.as_bytes();
        if keys::parse_block(&key).is_some() {
            blocks.push(Block::decode(&key, value).unwrap());
        } else if keys::parse_resource(ResourceKind::IpPool, &key).is_some() {
            pools.push(Pool::decode(&key, value).unwrap());
        } else if keys::parse_resource(ResourceKind::IpReservation, &key).is_some() {
            reserved.push(IpReservation::decode(&key, value).unwrap());
        }
    }
    let (reservations, skipped) = Reservations::from_documents(&reserved);
    assert_eq!(skipped, []);
    let ours = utilization(&pools, &blocks, &reservations);
    assert_eq!(ours.orphaned, []);

    let theirs: Value = serde_json::from_str(&fixture("utilization.json")).unwrap();
    let theirs = theirs["pools"].as_array().unwrap();
    assert_eq!(ours.pools.len(), theirs.len());
    for (ours, theirs) in ours.pools.iter().zip(theirs) {
        assert_eq!(ours.name, theirs["pool"]);
        let mut written = serde_json::to_value(ours).unwrap();
        let named = written.as_object_mut().unwrap();
        let name = named.remove("name").unwrap();
        named.insert("pool".to_owned(), name);
        assert_eq!(written, with_texts(theirs));
    }
    assert_eq!(ours.pools[1].usage.in_use, Count::new(233));

    // For each block that Calico created, Margay's search for blocks also tries the block's CIDR.
    for block in &blocks {
        let first = block.cidr().network();
        let pool = pool_of(&pools, first, PoolUse::Workload).unwrap();
        assert_eq!(block_of(pool, first), Some(block.cidr()));
        assert!(blocks_from(pool, start_of("node1")).any(|cidr| cidr == block.cidr()));
    }
}

#[test]
fn documents_times_are_printed_as_calico_does() {
    let rows: Vec<Value> = serde_json::from_str(&fixture("cluster.json")).unwrap();
    let mut seen = 0;
    for (key, value) in rows.iter().map(stored).filter(|(key, _)| keys::parse_block(key).is_some()) {
        let block = Block::decode(&key, value.as_bytes()).unwrap();
        for (_, attribute) in block.allocated() {
            let text = attribute.get("timestamp").unwrap();
            assert_eq!(go_string(parse_go_string(text).unwrap()), text);
            seen += 1;
        }
    }
    assert!(seen > 200, "{seen}");
}

/// Converts the numbers in Calico's report to strings, because Margay writes numbers as strings.
fn with_texts(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::String(number.to_string()),
        Value::Array(items) => items.iter().map(with_texts).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), with_texts(value))).collect())
        }
        other => other.clone(),
    }
}

#[test]
fn documents_of_nodes_are_known_by_key() {
    let node = Node::decode(
        &keys::resource(ResourceKind::Node, "node1"),
        br#"{"metadata":{"labels":{"foo":"bar"}},"spec":{},"status":{}}"#,
    )
    .unwrap();
    assert_eq!(node.name(), "node1");
    assert_eq!(*node.labels(), Labels::from([("foo".into(), "bar".into())]));
}

/// Generates documents with a few damaged places, in numbers, names or structure.
fn damaged() -> impl Strategy<Value = (Key, Vec<u8>)> {
    let rows: Vec<Value> = fixture("documents.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Long documents are left out, because most damage would hit only entries of a long list.
    let documents: Vec<(Key, Vec<u8>)> = rows
        .iter()
        .map(stored)
        .filter(|(_, value)| value.len() < 700)
        .map(|(key, value)| (key, value.as_bytes().to_vec()))
        .collect();
    let bytes = prop::sample::select(b"0123456789-[]{}:,\"naeE.\xff ".to_vec());
    let changes = prop::collection::vec((any::<prop::sample::Index>(), bytes), 0..4);
    (prop::sample::select(documents), changes).prop_map(|((key, mut value), changes)| {
        for (place, byte) in changes {
            let place = place.index(value.len());
            value[place] = byte;
        }
        (key, value)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn documents_never_panic_when_damaged((key, value) in damaged()) {
        let text = String::from_utf8_lossy(&value);
        let _ = round(&key, &text);
        let Ok(mut block) = Block::decode(&key, text.as_bytes()) else { return Ok(()) };
        let now = datetime!(2026-11-21 02:41:03 UTC);
        let cooldown = block.apply_cooldown(now, 60);
        prop_assert!(cooldown.freed.len() <= block.capacity());
        let free = block.free_count(&Reservations::default());
        let holder = Attribute::new(Some("h"), BTreeMap::new());
        prop_assert_eq!(block.assign_auto(usize::MAX, &holder, &Reservations::default()).len(), free);
        let _ = (block.is_empty(), block.claim_age(now), block.owner());
        let released = block.release_where(now, 0, |_, _| true);
        prop_assert!(released.released.len() >= free);
        block.bump();
        let again = Block::decode(&key, block.encode().unwrap().as_bytes());
        prop_assert_eq!(again.as_ref(), Ok(&block));
        if released.changed() {
            prop_assert_eq!(block.free_count(&Reservations::default()), block.capacity());
        }
    }
}
