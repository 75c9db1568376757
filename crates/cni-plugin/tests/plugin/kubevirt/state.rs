//! The state of a datastore: the recorded state, the stored state, and a brief form of both for comparison.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

/// The prefix of all etcd keys that the allocator uses.
const IPAM: &str = "/calico/ipam/v2/";
const BLOCKS: &str = "/calico/ipam/v2/assignment/";
const HANDLES: &str = "/calico/ipam/v2/handle/";

pub(crate) type State = BTreeMap<String, Value>;

/// Replaces the recording's placeholders in a JSON value with concrete values.
fn concrete(value: &mut Value) {
    match value {
        Value::String(text) => {
            let number = |text: &str| text.trim_end_matches('>').parse::<u64>().unwrap();
            if let Some(rest) = text.strip_prefix("<seq:") {
                let (block, more) = rest.split_once('+').unwrap_or((rest, "0"));
                *value = (number(block) * 1_000_000 + more.parse::<u64>().unwrap()).into();
            } else if let Some(rest) = text.strip_prefix("<time:") {
                *text = format!("2026-11-23 08:24:{:02} +0000 UTC", number(rest));
            } else if text == "<claimed>" || text == "<released>" {
                let before = OffsetDateTime::now_utc() - Duration::seconds(30);
                *text = before.format(&Rfc3339).unwrap();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(concrete),
        Value::Object(fields) => fields.values_mut().for_each(concrete),
        _ => {}
    }
}

/// Updates a recorded state with the effects of one step of the recording.
pub(crate) fn advance(state: &mut State, step: &Value) {
    let key = || step["key"].as_str().unwrap().to_owned();
    match step["do"].as_str().unwrap() {
        "store" => drop(state.insert(key(), step["value"].clone())),
        "delete" => drop(state.remove(&key())),
        _ => {}
    }
    if let Some(documents) = step["etcd"]["ipam_documents"].as_object() {
        state.retain(|key, _| !key.starts_with(IPAM));
        for (key, document) in documents {
            let mut document = document.clone();
            concrete(&mut document);
            state.insert(key.clone(), document);
        }
    }
}

/// Returns a state in the form of `etcd.ipam` in the recording: the handles, and the holder of each address, without
/// times and without Margay's own attributes.
pub(crate) fn brief(state: &State) -> Value {
    let (mut addresses, mut handles) = (Map::new(), Map::new());
    for (key, document) in state {
        if let Some(id) = key.strip_prefix(HANDLES) {
            handles.insert(id.to_owned(), document["block"].clone());
        } else if key.starts_with(BLOCKS) {
            for (address, entry, _) in allocations(document) {
                addresses.insert(address.to_string(), holder(entry));
            }
        }
    }
    json!({"addresses": addresses, "handles": handles})
}

fn holder(entry: &Value) -> Value {
    if entry.get("releasedAt").is_some() {
        return json!({"released": true});
    }
    let owner = |name: &str| {
        let mut owner = entry[name].as_object().cloned().unwrap_or_default();
        let time = owner.remove("timestamp");
        assert_eq!(time.is_some(), !owner.is_empty(), "each owner has a time: {entry}");
        // Margay stores no attributes of its own on a virtual machine's address, since such an address belongs to no
        // container.
        if !entry["handle_id"].as_str().unwrap_or_default().contains(".vmi.") {
            owner.retain(|name, _| !name.starts_with("margay"));
        }
        owner
    };
    let mut holder = json!({"handle": entry["handle_id"], "attributes": owner("secondary")});
    let alternate = owner("alternateOwnerAttrs");
    if !alternate.is_empty() {
        holder["alternate"] = alternate.into();
    }
    holder
}

/// Returns the assigned addresses of a block document, each with its attribute entry and its ordinal.
fn allocations(block: &Value) -> Vec<(IpAddr, &Value, usize)> {
    let cidr: IpNet = block["cidr"].as_str().unwrap().parse().unwrap();
    let first = u128_of(cidr.network());
    let given = block["allocations"].as_array().unwrap().iter().enumerate();
    let given = given.filter_map(|(ordinal, index)| Some((ordinal, index.as_u64()?)));
    given
        .map(|(ordinal, index)| {
            let entry = &block["attributes"][usize::try_from(index).unwrap()];
            (address_of(first + ordinal as u128, cidr.addr().is_ipv4()), entry, ordinal)
        })
        .collect()
}

fn u128_of(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u32::from(ip).into(),
        IpAddr::V6(ip) => ip.into(),
    }
}

fn address_of(number: u128, is_v4: bool) -> IpAddr {
    if is_v4 { IpAddr::V4(u32::try_from(number).unwrap().into()) } else { IpAddr::V6(number.into()) }
}

/// Returns the `sequenceNumberForAllocation` of each held address, by address and handle.
pub(crate) fn numbers(state: &State) -> BTreeMap<(IpAddr, String), Value> {
    let blocks = state.iter().filter(|(key, _)| key.starts_with(BLOCKS));
    let numbers = blocks.flat_map(|(_, block)| {
        let number = |ordinal: usize| block["sequenceNumberForAllocation"][ordinal.to_string()].clone();
        allocations(block).into_iter().filter_map(move |(address, entry, ordinal)| {
            Some(((address, entry["handle_id"].as_str()?.to_owned()), number(ordinal)))
        })
    });
    numbers.collect()
}

/// Returns a function that replaces addresses in any JSON value. The returned function replaces each address that a
/// plugin call has assigned by the address that was expected. The assigned and the expected addresses are sorted within
/// each family and paired in order.
pub(crate) fn renaming(before: &Value, expected: &Value, found: &Value) -> impl Fn(&Value) -> Value + use<> {
    let new = |state: &Value| -> Vec<IpAddr> {
        let named = state["addresses"].as_object().unwrap().keys();
        let mut new: Vec<IpAddr> = named
            .filter(|address| before["addresses"].get(*address).is_none())
            .map(|address| address.parse().unwrap())
            .collect();
        new.sort_unstable();
        new
    };
    let pairs: Vec<(IpAddr, IpAddr)> = new(found).into_iter().zip(new(expected)).collect();
    move |value| renamed(value, &pairs)
}

fn renamed(value: &Value, pairs: &[(IpAddr, IpAddr)]) -> Value {
    let other = |address: IpAddr| pairs.iter().find(|(from, _)| *from == address).map(|(_, to)| *to);
    let text = |text: &String| {
        if let Ok(address) = text.parse::<IpAddr>() {
            return other(address).map_or_else(|| text.clone(), |to| to.to_string());
        }
        let Ok(net) = text.parse::<IpNet>() else { return text.clone() };
        if net.addr() != net.network() || net.prefix_len() == net.max_prefix_len() {
            return other(net.addr()).map_or_else(|| text.clone(), |to| format!("{to}/{}", net.prefix_len()));
        }
        // Treat a CIDR string without host bits as a block. A single address printed as CIDR looks the same if it is
        // the block's first address.
        let in_block = pairs.iter().find(|(from, _)| net.contains(from));
        in_block.map_or_else(|| text.clone(), |(_, to)| IpNet::new(*to, net.prefix_len()).unwrap().trunc().to_string())
    };
    match value {
        Value::String(string) => text(string).into(),
        Value::Array(items) => items.iter().map(|item| renamed(item, pairs)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (text(name), renamed(value, pairs))).collect(),
        other => other.clone(),
    }
}
