//! Tests that every kind of damage is found, reported with its finding code, and repaired if the repair needs no guess.

use std::collections::BTreeMap;
use std::sync::Arc;

use ipam_core::Nodes;
use ipam_core::assign::{AssignRequest, Gateway, RequestedAddresses};
use ipam_core::model::{Attribute, IpamConfig};
use ipam_operator::inspect::{AddressReporting, Code, Finding, Inspection, RepairResult};
use kv::StoreExt;
use serde_json::{Value, json};

use crate::Operated;
use crate::world::{World, attachment, consistent, soon};

/// The content of a store: each key with its document as text.
pub(crate) type Content = BTreeMap<String, String>;

pub(crate) async fn content(world: &World) -> Content {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    world.dump().await.iter().map(|kv| (text(kv.key.as_bytes()), text(kv.value.as_bytes()))).collect()
}

pub(crate) async fn world_of(content: &Content) -> World {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::Registered);
    for (key, value) in content {
        world.store.put(key.as_str(), value.as_str()).await.unwrap();
    }
    world
}

pub(crate) async fn inspect(world: &World) -> Inspection {
    world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap()
}

fn codes(inspection: &Inspection) -> Vec<&str> {
    inspection.findings.iter().map(|finding| finding.code.as_str()).collect()
}

fn reported(findings: &[Finding]) -> String {
    findings.iter().map(|one| format!("{} {}: {}\n", one.code, one.subject, one.what)).collect()
}

/// The content of an undamaged store: two nodes with containers in both families, an address in cooldown, a bridged
/// pool and a reservation.
pub(crate) async fn whole() -> Content {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    world.add_pool("six", "fd00::/120").await;
    world.add_pool("range", "10.9.0.0/29").await;
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    world.reserve(&["10.0.0.200/32"]).await;
    let mut both = AssignRequest::new(attachment("a", "c0"), RequestedAddresses::any(1, 1));
    both.v4_pools = vec!["main".into()];
    world.assign(&both).await.unwrap();
    for (node, container) in [("a", "c1"), ("b", "c2"), ("a", "c3")] {
        let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(1, 0));
        request.v4_pools = vec!["main".into()];
        world.assign(&request).await.unwrap();
    }
    let mut bridged = AssignRequest::new(attachment("c", "c4"), RequestedAddresses::any(1, 0));
    bridged.v4_pools = vec!["range".into()];
    bridged.bridge = Some(ipam_core::assign::Bridge { v4: Gateway::First, v6: Gateway::First });
    world.assign(&bridged).await.unwrap();
    world.release("a", "c3").await;
    consistent(&world.dump().await.into_iter().filter(|kv| !kv.key.to_string().contains("x")).collect::<Vec<_>>());
    content(&world).await
}

/// Returns the key of the IPv4 block in which a container holds an address.
fn block_of(content: &Content, container: &str) -> String {
    let holder = format!("\"net.{container}\"");
    let found = content.iter().find(|(key, value)| key.contains("/ipv4/block/") && value.contains(&holder));
    found.unwrap().0.clone()
}

fn affinity_of(content: &Content, container: &str) -> String {
    let block = block_of(content, container);
    let cidr = block.rsplit('/').next().unwrap();
    content.keys().find(|key| key.contains("/host/") && key.ends_with(cidr)).unwrap().clone()
}

fn handle(container: &str) -> String {
    format!("/calico/ipam/v2/handle/net.{container}")
}

fn edit(content: &mut Content, key: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&content[key]).unwrap();
    change(&mut value);
    content.insert(key.to_owned(), value.to_string());
}

fn edit_block(content: &mut Content, container: &str, change: impl FnOnce(&mut Value)) {
    let key = block_of(content, container);
    edit(content, &key, change);
}

/// Returns the first ordinal of a block whose address is held (if `is_held` is true) or free (if `is_held` is false).
fn ordinal(block: &Value, is_held: bool) -> usize {
    block["allocations"].as_array().unwrap().iter().position(|index| index.is_null() != is_held).unwrap()
}

fn put(content: &mut Content, key: &str, value: impl ToString) {
    content.insert(key.to_owned(), value.to_string());
}

/// Finds the block entry that records a container as the holder of an address.
fn holder<'b>(block: &'b mut Value, container: &str) -> &'b mut Value {
    let handle = format!("net.{container}");
    let mut entries = block["attributes"].as_array_mut().unwrap().iter_mut();
    &mut entries.find(|entry| entry["handle_id"] == handle.as_str()).unwrap()["secondary"]
}

/// Marks the address of a container as a sticky address of workload `shop/web`.
fn keep(block: &mut Value, container: &str) {
    let entry = holder(block, container);
    entry["margay.io/sticky"] = "shop/web".into();
    entry["margay.io/sticky-for"] = "60".into();
}

/// Creates a block without held addresses.
fn empty_block(cidr: &str, owner: &Value) -> Value {
    let size = 1_usize << (32 - cidr.rsplit('/').next().unwrap().parse::<u32>().unwrap());
    json!({"cidr": cidr, "affinity": owner, "allocations": vec![Value::Null; size], "unallocated": (0..size).collect::<Vec<_>>(),
        "attributes": [], "sequenceNumber": 7, "sequenceNumberForAllocation": {}, "deleted": false})
}

fn put_block(content: &mut Content, cidr: &str, block: &Value) {
    put(content, &format!("/calico/ipam/v2/assignment/ipv4/block/{}", cidr.replace('/', "-")), block);
}

fn put_affinity(content: &mut Content, node: &str, cidr: &str, value: &str) {
    put(content, &format!("/calico/ipam/v2/host/{node}/ipv4/block/{}", cidr.replace('/', "-")), value);
}

fn pool(cidr: &str, more: &str) -> String {
    format!(
        r#"{{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{{"name":"p"}},"spec":{{"cidr":"{cidr}"{more}}}}}"#
    )
}

fn put_endpoint(content: &mut Content, name: &str, container: &str, address: &str) {
    let node = name.split('-').next().unwrap();
    let networks = [format!("{address}/32")];
    let spec = json!({"orchestrator": "cni", "node": node, "containerID": container, "ipNetworks": networks});
    put(content, &format!("{ENDPOINTS}/{name}"), json!({"metadata": {"name": name}, "spec": spec}));
}

const ENDPOINTS: &str = "/calico/resources/v3/projectcalico.org/workloadendpoints/default";
const POOLS: &str = "/calico/resources/v3/projectcalico.org/ippools";
const RESERVATIONS: &str = "/calico/resources/v3/projectcalico.org/ipreservations";
const NODES: &str = "/calico/resources/v3/projectcalico.org/nodes";
const CLUSTER: &str = "/calico/resources/v3/projectcalico.org/clusterinformations/default";
const CONFIG: &str = "/calico/ipam/v2/config";
const RECORD: &str = "/margay/v1/sticky/shop/web";
const CONFIRMED: &str = r#"{"state":"confirmed","deleted":false}"#;

/// Whether automatic repairs remove the damage completely.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    Mended,
    Left,
}
use After::{Left, Mended as Whole};

type Damage = (&'static [&'static str], After, fn(&mut Content));

/// All kinds of damage, each with the expected findings, the expected state after the repair, and a function that
/// damages a store's content.
const DAMAGES: &[Damage] = &[
    (&["BLK-01"], Left, |c| {
        let key = block_of(c, "c2");
        put(c, &key, "{");
    }),
    (&["BLK-01"], Left, |c| edit_block(c, "c2", |b| b["allocations"] = json!([0]))),
    (&["BLK-02"], Left, |c| edit_block(c, "c2", |b| b["cidr"] = "10.0.99.0/30".into())),
    (&["BLK-03"], Whole, |c| {
        put_block(c, "10.55.0.0/30", &empty_block("10.55.0.0/30", &"host:a".into()));
        put_affinity(c, "a", "10.55.0.0/30", CONFIRMED);
    }),
    (&["BLK-03"], Left, |c| drop(c.remove(&format!("{POOLS}/range")))),
    (&["BLK-04"], Whole, |c| {
        put_block(c, "10.0.0.208/29", &empty_block("10.0.0.208/29", &"host:a".into()));
        put_affinity(c, "a", "10.0.0.208/29", CONFIRMED);
    }),
    (&["BLK-04", "BLK-05", "BLK-05"], Whole, |c| {
        for cidr in ["10.0.0.208/30", "10.0.0.212/30"] {
            put_block(c, cidr, &empty_block(cidr, &"host:b".into()));
            put_affinity(c, "b", cidr, CONFIRMED);
        }
        put_block(c, "10.0.0.208/29", &empty_block("10.0.0.208/29", &"host:a".into()));
        put_affinity(c, "a", "10.0.0.208/29", CONFIRMED);
    }),
    (&["ALC-03", "BLK-04", "BLK-05", "HND-01"], Left, |c| {
        let key = block_of(c, "c4");
        let cidr = serde_json::from_str::<Value>(&c[&key]).unwrap()["cidr"].as_str().unwrap().to_owned();
        let block: Value = serde_json::from_str(&c[&key]).unwrap();
        let ordinal = ordinal(&block, true);
        let first = cidr.parse::<ipnet::Ipv4Net>().unwrap().network().to_bits() + u32::try_from(ordinal).unwrap();
        let twin = format!("{}/32", std::net::Ipv4Addr::from_bits(first));
        put_block(
            c,
            &twin,
            &json!({"cidr": twin, "affinity": "host:c", "allocations": [0], "unallocated": [],
            "attributes": [{"handle_id": "net.c8"}], "sequenceNumber": 7}),
        );
        put_affinity(c, "c", &twin, CONFIRMED);
    }),
    (&["BLK-06"], Whole, |c| {
        let key = affinity_of(c, "c2");
        c.remove(&key);
    }),
    (&["ALC-05", "BLK-07"], Left, |c| drop(c.remove(&format!("{NODES}/b")))),
    (&["BLK-07"], Whole, |c| {
        put_block(c, "10.0.0.208/30", &empty_block("10.0.0.208/30", &"host:gone".into()));
        put_affinity(c, "gone", "10.0.0.208/30", CONFIRMED);
    }),
    (&["BLK-08"], Whole, |c| put_block(c, "10.0.0.208/30", &empty_block("10.0.0.208/30", &Value::Null))),
    (&["AFF-06", "BLK-09"], Whole, |c| edit_block(c, "c2", |b| b["affinity"] = "odd".into())),
    (&["AFF-01"], Whole, |c| put_affinity(c, "a", "10.0.0.208/30", CONFIRMED)),
    (&["AFF-07"], Whole, |c| put_affinity(c, "a", "10.0.0.208/29", CONFIRMED)),
    (&["AFF-02"], Whole, |c| put_affinity(c, "a", "10.0.0.208/30", r#"{"state":"pending"}"#)),
    (&["AFF-02"], Whole, |c| {
        let key = affinity_of(c, "c2");
        put(c, &key, r#"{"state":"pending"}"#);
    }),
    (&["AFF-03"], Whole, |c| {
        let key = affinity_of(c, "c2");
        put(c, &key, r#"{"state":"pendingDeletion"}"#);
    }),
    (&["AFF-03"], Whole, |c| {
        put_block(c, "10.0.0.208/30", &empty_block("10.0.0.208/30", &"host:a".into()));
        put_affinity(c, "a", "10.0.0.208/30", r#"{"state":"pendingDeletion"}"#);
    }),
    (&["AFF-04"], Whole, |c| {
        let key = affinity_of(c, "c2");
        put(c, &key, r#"{"state":"maybe"}"#);
    }),
    (&["AFF-05"], Whole, |c| {
        let key = affinity_of(c, "c2");
        put(c, &key, "[");
    }),
    (&["AFF-06"], Whole, |c| {
        let cidr = affinity_of(c, "c2").rsplit('/').next().unwrap().to_owned();
        put_affinity(c, "c", &cidr, CONFIRMED);
    }),
    (&["ALC-01"], Left, |c| {
        edit_block(c, "c2", |b| {
            let free = ordinal(b, false);
            b["allocations"][free] = 77.into();
            b["unallocated"].as_array_mut().unwrap().retain(|one| *one != json!(free));
        });
    }),
    (&["ALC-02"], Whole, |c| {
        edit_block(c, "c2", |b| b["attributes"].as_array_mut().unwrap().push(json!({"handle_id": "net.old"})));
    }),
    (&["ALC-04", "HND-02"], Left, |c| {
        edit_block(c, "c2", |b| drop(b["attributes"][0].as_object_mut().unwrap().remove("handle_id")));
    }),
    (&["QUE-01"], Whole, |c| {
        edit_block(c, "c2", |b| {
            let free = ordinal(b, false);
            b["unallocated"].as_array_mut().unwrap().push(free.into());
        });
    }),
    (&["QUE-02"], Whole, |c| edit_block(c, "c2", |b| drop(b["unallocated"].as_array_mut().unwrap().pop()))),
    (&["QUE-03"], Whole, |c| {
        edit_block(c, "c2", |b| {
            let held = ordinal(b, true);
            b["unallocated"].as_array_mut().unwrap().push(held.into());
        });
    }),
    (&["QUE-04"], Whole, |c| edit_block(c, "c2", |b| b["unallocated"].as_array_mut().unwrap().push(99.into()))),
    (&["SEQ-01"], Whole, |c| {
        edit_block(c, "c2", |b| {
            let free = ordinal(b, false).to_string();
            b["sequenceNumberForAllocation"][free] = 3.into();
        });
    }),
    (&["COO-01"], Whole, |c| {
        edit_block(c, "c1", |b| {
            let entry = b["attributes"].as_array_mut().unwrap().iter_mut().find(|one| one.get("releasedAt").is_some());
            entry.unwrap()["releasedAt"] = "2099-01-01T00:00:00Z".into();
        });
    }),
    (&["HND-01"], Whole, |c| drop(c.remove(&handle("c2")))),
    (&["HND-02"], Whole, |c| {
        edit(c, &handle("c2"), |h| {
            h["block"].as_object_mut().unwrap().values_mut().for_each(|count| *count = 3.into());
        });
    }),
    (&["HND-02"], Whole, |c| {
        let cidr = block_of(c, "c2").rsplit('/').next().unwrap().replace('-', "/");
        put(c, &handle("stray"), json!({"block": {cidr: 1}, "deleted": false}));
    }),
    (&["HND-03"], Whole, |c| {
        edit(c, &handle("c0"), |h| {
            h["block"].as_object_mut().unwrap().retain(|cidr, _| cidr.contains(':'));
        });
    }),
    (&["HND-04"], Whole, |c| edit(c, &handle("c2"), |h| h["block"]["10.0.0.208/30"] = 1.into())),
    (&["HND-04"], Whole, |c| edit(c, &handle("c2"), |h| h["block"]["nonsense"] = 1.into())),
    (&["HND-05"], Whole, |c| put(c, &handle("c0"), "not JSON")),
    (&["HND-05"], Whole, |c| put(c, &handle("unused"), "not JSON")),
    (&["HND-06"], Whole, |c| put(c, &handle("unused"), r#"{"block":{},"deleted":false}"#)),
    (&["STK-01"], Whole, |c| edit_block(c, "c2", |b| keep(b, "c2"))),
    (&["STK-01"], Whole, |c| {
        edit_block(c, "c2", |b| keep(b, "c2"));
        put(c, RECORD, r#"{"addresses":[]}"#);
    }),
    (&["STK-02"], Whole, |c| put(c, RECORD, r#"{"addresses":[{"address":"10.0.0.250"}]}"#)),
    (&["STK-01", "STK-02"], Whole, |c| {
        edit_block(c, "c2", |b| keep(b, "c2"));
        put(c, RECORD, r#"{"addresses":[{"address":"10.0.0.250"},{"address":"fd00::9"}]}"#);
    }),
    (&["STK-03"], Whole, |c| put(c, RECORD, "7")),
    (&["STK-03"], Whole, |c| {
        edit_block(c, "c2", |b| keep(b, "c2"));
        put(c, RECORD, "[");
    }),
    // A workload's record is not compared with an unreadable block, because the block may keep the recorded addresses.
    (&["BLK-01"], Left, |c| {
        let key = block_of(c, "c2");
        let cidr = key.rsplit('/').next().unwrap().rsplit_once('-').unwrap().0.to_owned();
        put(c, &key, "{");
        put(c, RECORD, json!({"addresses": [{"address": cidr}]}));
    }),
    (&["POL-01"], Left, |c| put(c, &format!("{POOLS}/bad"), pool("nonsense", ""))),
    (&["POL-02"], Left, |c| put(c, &format!("{POOLS}/bad"), pool("10.77.0.0/16", r#","blockSize":12"#))),
    (&["POL-02"], Left, |c| put(c, &format!("{POOLS}/bad"), pool("10.77.0.0/28", r#","blockSize":26"#))),
    (&["POL-03"], Left, |c| put(c, &format!("{POOLS}/wide"), pool("10.0.0.0/25", r#","blockSize":30"#))),
    (&["POL-04"], Left, |c| put(c, &format!("{POOLS}/bad"), pool("10.77.0.0/16", r#","nodeSelector":"((""#))),
    (&["POL-05"], Whole, |c| put(c, &format!("{POOLS}/bad"), pool("10.77.0.0/16", r#","namespaceSelector":"has(a)""#))),
    (&["POL-05"], Left, |c| put(c, &format!("{POOLS}/bad"), pool("10.77.0.0/16", r#","allowedUses":["Pods"]"#))),
    (&["RES-01"], Left, |c| put(c, &format!("{RESERVATIONS}/bad"), "7")),
    (&["RES-02"], Left, |c| {
        edit(c, &format!("{RESERVATIONS}/reserved"), |r| r["spec"]["reservedCIDRs"][0] = "10.0.0.0.9".into());
    }),
    (&["RES-03", "RES-03"], Left, |c| {
        edit(c, &format!("{RESERVATIONS}/reserved"), |r| r["spec"]["reservedCIDRs"][0] = "10.0.0.0/24".into());
    }),
    (&["RES-04"], Left, |c| {
        let name = format!("{RESERVATIONS}/margay-bridge-range");
        let document = c.remove(&name).unwrap();
        put(c, &format!("{RESERVATIONS}/margay-range-range"), document);
    }),
    (&["RES-05"], Whole, |c| {
        let reservation = format!("{RESERVATIONS}/margay-bridge-range");
        edit(c, &reservation, |r| drop(r["spec"]["reservedCIDRs"].as_array_mut().unwrap().pop()));
    }),
    (&["BLK-10"], Whole, |c| {
        put(c, CLUSTER, "{}");
        edit_block(c, "c4", |b| holder(b, "c4")["margay.io/net"] = "macvlan".into());
    }),
    (&["ALC-06", "BLK-10", "BLK-10"], Whole, |c| {
        put(c, CLUSTER, "{}");
        edit_block(c, "c4", |b| holder(b, "c4")["margay.io/net"] = "macvlan".into());
        edit_block(c, "c2", |b| holder(b, "c2")["margay.io/net"] = "macvlan".into());
    }),
    (&["BLK-10", "BLK-11"], Left, |c| {
        put(c, CLUSTER, "{}");
        edit_block(c, "c4", |b| holder(b, "c4")["margay.io/net"] = "macvlan".into());
        edit_block(c, "c0", |b| holder(b, "c0")["margay.io/node"] = "a".into());
        edit_block(c, "c0", |b| holder(b, "c0")["margay.io/net"] = "macvlan".into());
        edit_block(c, "c0", |b| drop(holder(b, "c0").as_object_mut().unwrap().remove("node")));
    }),
    (&["ALC-07"], Left, |c| {
        put_endpoint(c, "b-cni-c2x-eth0", "c2x", "192.0.2.1");
        edit_block(c, "c2", |b| {
            let pod =
                json!({"node": "b", "namespace": "shop", "pod": "web", "timestamp": "2026-01-01 00:00:00 +0000 UTC"});
            *holder(b, "c2") = pod;
        });
    }),
    (&["WEP-01"], Left, |c| put(c, &format!("{ENDPOINTS}/b-cni-c2-eth0"), "{")),
    (&["WEP-02"], Left, |c| put_endpoint(c, "b-cni-c2-eth0", "c2", "10.0.0.250")),
    (&["WEP-03"], Whole, |c| put_endpoint(c, "gone-cni-c2-eth0", "c2", "192.0.2.1")),
    (&["CFG-01"], Left, |c| put(c, CONFIG, "7")),
    (&["CFG-02"], Left, |c| put(c, CONFIG, "{}")),
    (&["CFG-02"], Left, |c| put(c, CONFIG, r#"{"auto_allocate_blocks":true,"maxBlocksPerHost":3}"#)),
    (&["NOD-01"], Left, |c| put(c, &format!("{NODES}/c"), "[]")),
    (&["KEY-01"], Left, |c| put(c, "/calico/ipam/v2/handle/a/b", "{}")),
];

/// Inspects and repairs a store until no mendable finding is left, at most four times.
pub(crate) async fn mend_all(world: &World) -> Inspection {
    let mut inspection = inspect(world).await;
    for _ in 0..4 {
        for finding in inspection.findings.iter().filter(|finding| finding.mendable) {
            let _: RepairResult = world.operator().mend(finding, inspection.revision, soon()).await.unwrap();
        }
        inspection = inspect(world).await;
    }
    inspection
}

/// Returns the held addresses of a store, each with its entry in the block.
fn held(content: &Content) -> Vec<(String, String)> {
    let mut held = Vec::new();
    for (key, value) in content.iter().filter(|(key, _)| key.contains("/assignment/")) {
        let Ok(block) = serde_json::from_str::<Value>(value) else { continue };
        for (ordinal, index) in block["allocations"].as_array().unwrap().iter().enumerate() {
            let entry = index.as_u64().and_then(|index| block["attributes"].get(usize::try_from(index).unwrap()));
            if let Some(entry) = entry.filter(|entry| entry.get("releasedAt").is_none()) {
                // A repair may rename the attributes of a block entry, but must keep their values.
                let mut entry = entry.clone();
                if entry.get("secondary").is_some() {
                    // The attributes are compared written out, because only Calico's networks have the short form.
                    let mut attributes =
                        serde_json::from_value::<Attribute>(entry.clone()).unwrap().attributes_with_network();
                    for name in ["node", "pod", "namespace"] {
                        let own = attributes.remove(&format!("margay.io/{name}"));
                        attributes.extend(own.map(|value| (name.to_owned(), value)));
                    }
                    entry["secondary"] = serde_json::to_value(attributes).unwrap();
                }
                held.push((format!("{key} {ordinal}"), entry.to_string()));
            }
        }
    }
    held
}

#[tokio::test]
async fn damage_is_found_and_repaired_without_touching_address() {
    let whole = whole().await;
    let sound = inspect(&world_of(&whole).await).await;
    assert!(sound.findings.is_empty(), "{}", reported(&sound.findings));
    let (mut kinds, mut wrong): (Vec<&str>, Vec<String>) = (Vec::new(), Vec::new());
    for (number, (expected, after, damage)) in DAMAGES.iter().enumerate() {
        let mut damaged = whole.clone();
        damage(&mut damaged);
        let world = world_of(&damaged).await;
        let found = inspect(&world).await;
        if codes(&found) != *expected {
            wrong.push(format!("{number}: found instead of {expected:?}\n{}", reported(&found.findings)));
        }
        kinds.extend(*expected);
        let left = mend_all(&world).await;
        let is_right = match after {
            Whole => left.findings.is_empty(),
            Left => !left.findings.is_empty() && left.findings.iter().all(|one| !one.mendable),
        };
        if !is_right {
            wrong.push(format!("{number}: left of {expected:?}\n{}", reported(&left.findings)));
        }
        if held(&content(&world).await) != held(&damaged) {
            wrong.push(format!("{number}: a container lost an address with {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // `NET-01` and `NET-02` are for overlaps with another store or with the machine's routes, which an inspection of
    // one store cannot find. `compaction::find_in_cluster` finds the problems of an etcd cluster.
    let missing: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).filter(|code| !kinds.contains(code)).collect();
    assert_eq!(missing, ["CLU-01", "CLU-02", "CLU-03", "NET-01", "NET-02"]);
}
