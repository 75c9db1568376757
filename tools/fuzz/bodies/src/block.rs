//! Checks that a decoded block encodes and decodes to an equal block, and that it stays consistent under every
//! operation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use arbitrary::{Result, Unstructured};
use ipam_core::model::{AddressState, Attribute, Block, Document, Owner, ReleaseRequest, keys};
use ipam_core::reservations::Reservations;
use ipnet::IpNet;
use kv::Key;
use serde_json::Value;
use time::{Duration, OffsetDateTime};

/// Maximum number of input bytes that choose operations on the block.
const STEPS: usize = 24;

/// Runs the fuzz target `block_json` on an input. The input is the JSON document of a block. If the first byte is not
/// `{`, it says how many operation bytes follow before the document.
pub fn block_json(data: &[u8]) {
    let (work, text) = match data.split_first() {
        Some((count, rest)) if *count != b'{' => rest.split_at((usize::from(*count) % STEPS).min(rest.len())),
        _ => (&[][..], data),
    };
    let Ok(mut block) = Block::decode(&key_of(text), text) else { return };
    check(&block);
    let mut work = Unstructured::new(work);
    while !work.is_empty() {
        step(&mut block, &mut work).unwrap();
        check(&block);
    }
}

/// Returns the store key of the block that a JSON text seems to contain.
fn key_of(text: &[u8]) -> Key {
    let json: Value = serde_json::from_slice(text).unwrap_or_default();
    let cidr = json["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok());
    cidr.map_or_else(|| "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-26".into(), |cidr| keys::block(cidr.trunc()))
}

fn now() -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + Duration::days(20_000)
}

/// Checks that a block encodes and decodes to an equal block, and that each of its addresses is either free or
/// allocated.
fn check(block: &Block) {
    let key = keys::block(block.cidr());
    let text = block.encode().unwrap();
    let again = Block::decode(&key, text.as_bytes()).unwrap();
    assert_eq!(again, *block);
    assert_eq!(again.encode().unwrap(), text);
    let taken: BTreeSet<IpAddr> = block.allocated().map(|(ip, _)| ip).collect();
    let free: Vec<IpAddr> = block.free_addresses().collect();
    let all: BTreeSet<IpAddr> = taken.iter().chain(&free).copied().collect();
    assert_eq!(taken.len() + free.len(), block.capacity(), "an address is missing or there twice");
    assert_eq!(all.len(), block.capacity(), "an address is free and taken");
    assert!(all.iter().all(|ip| block.cidr().contains(ip)));
    assert!(free.iter().all(|ip| block.lookup(*ip) == AddressState::Free));
}

fn address(block: &Block, work: &mut Unstructured<'_>) -> Result<IpAddr> {
    let ordinal = usize::from(work.arbitrary::<u8>()?) % block.capacity();
    let all: BTreeSet<IpAddr> = block.allocated().map(|(ip, _)| ip).chain(block.free_addresses()).collect();
    Ok(all.into_iter().nth(ordinal).unwrap())
}

fn step(block: &mut Block, work: &mut Unstructured<'_>) -> Result<()> {
    let none = Reservations::new([]);
    let holder = Attribute::new(Some("net.c1"), BTreeMap::from([("node".to_owned(), "n1".to_owned())]));
    match work.int_in_range(0..=8)? {
        0 => {
            let wanted = usize::from(work.arbitrary::<u8>()?);
            let free = block.free_count(&none);
            let got = block.assign_auto(wanted, &holder, &none);
            assert_eq!(got.len(), wanted.min(free));
            assert_eq!(block.free_count(&none), free - got.len());
            for ip in got {
                assert!(block.attributes_of(ip).is_some_and(|entry| entry.has_handle("net.c1")), "{ip}");
            }
        }
        1 => {
            let ip = address(block, work)?;
            let was_free = block.lookup(ip) == AddressState::Free;
            assert_eq!(block.assign_specific(ip, &holder).is_ok(), was_free, "{ip}");
            assert!(block.lookup(ip) != AddressState::Free);
        }
        2 => {
            let held = block.ips_by_handle("net.c1");
            let released = block.release_by_handle("net.c1", now(), i64::from(work.arbitrary::<i8>()?));
            assert_eq!(released.released, held);
            assert!(block.ips_by_handle("net.c1").is_empty());
        }
        3 => {
            let request = ReleaseRequest::new(address(block, work)?);
            let number: u64 = work.arbitrary()?;
            let before = block.clone();
            let request = if work.arbitrary()? { request.with_sequence_number(number) } else { request };
            if block.release_addresses(&[request], now(), work.arbitrary()?).is_err() {
                assert_eq!(*block, before, "a refusal changes nothing");
            }
        }
        4 => {
            let done = block.apply_cooldown(now(), work.arbitrary()?);
            assert!(done.freed.iter().all(|ip| block.lookup(*ip) == AddressState::Free));
        }
        5 => block.renew(address(block, work)?, [("pod", Some("p")), ("namespace", None)]),
        6 => block.set_owner(&Owner::from("host:n1"), now()),
        7 => block.clear_owner(),
        _ => {
            let number = block.sequence_number();
            block.bump();
            assert_eq!(block.sequence_number(), number.wrapping_add(1));
        }
    }
    Ok(())
}
