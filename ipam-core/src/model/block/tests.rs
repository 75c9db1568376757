//! Tests assignment, release and cooldown of a block's addresses.

use proptest::prelude::*;
use time::macros::datetime;

use super::*;
use crate::model::{Document, keys};

const NOW: OffsetDateTime = datetime!(2026-11-21 02:41:03.5 UTC);

fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn ips(last: &[u8]) -> Vec<IpAddr> {
    last.iter().map(|last| ip(*last)).collect()
}

fn block(prefix: u8) -> Block {
    let owner = Owner::Host("node1".to_owned());
    Block::new(Family::V4.network(ip(0), prefix).unwrap(), Some(&owner), NOW, None).unwrap()
}

fn holder(handle: &str) -> Attribute {
    Attribute::new(Some(handle), BTreeMap::from([("node".to_owned(), "node1".to_owned())]))
}

fn none() -> Reservations {
    Reservations::default()
}

fn json(block: &Block) -> serde_json::Value {
    serde_json::from_slice(block.encode().unwrap().as_bytes()).unwrap()
}

fn reread(block: &Block) -> Block {
    Block::decode(&keys::block(block.cidr()), block.encode().unwrap().as_bytes()).unwrap()
}

#[test]
fn block_lifecycle_matches_calico_writes() {
    let mut block = block(30);
    assert_eq!(
        json(&block),
        serde_json::json!({"cidr":"10.0.0.0/30","affinity":"host:node1","affinity_claim_time":"2026-11-21T02:41:03Z",
            "allocations":[null,null,null,null],"unallocated":[0,1,2,3],"attributes":null,
            "sequenceNumber":1_795_228_863_500_000_000_u64,"sequenceNumberForAllocation":{},"deleted":false})
    );
    assert_eq!(block.assign_auto(1, &holder("net.a"), &none()), ips(&[0]));
    block.bump();
    assert_eq!(block.assign_auto(2, &holder("net.b"), &none()), ips(&[1, 2]));
    block.bump();
    assert_eq!(
        json(&block),
        serde_json::json!({"cidr":"10.0.0.0/30","affinity":"host:node1","affinity_claim_time":"2026-11-21T02:41:03Z",
            "allocations":[0,1,1,null],"unallocated":[3],"attributes":[
                {"handle_id":"net.a","secondary":{"node":"node1"}},{"handle_id":"net.b","secondary":{"node":"node1"}}],
            "sequenceNumber":1_795_228_863_500_000_002_u64,"sequenceNumberForAllocation":{
                "0":1_795_228_863_500_000_000_u64,"1":1_795_228_863_500_000_001_u64,"2":1_795_228_863_500_000_001_u64},
            "deleted":false})
    );
    let released = block.release_by_handle("net.a", NOW, 0);
    assert_eq!(released.released, ips(&[0]));
    assert_eq!(released.by_handle, BTreeMap::from([("net.a".to_owned(), 1)]));
    assert_eq!(json(&block)["allocations"], serde_json::json!([null, 0, 0, null]));
    assert_eq!(json(&block)["unallocated"], serde_json::json!([3, 0]));
    assert!(block.release_by_handle("net.b", NOW, 0).changed());
    assert!(block.is_empty());
    assert_eq!(json(&block)["attributes"], serde_json::json!([]));
    assert_eq!(json(&block)["sequenceNumberForAllocation"], serde_json::json!({}));
    assert!(!block.release_by_handle("net.b", NOW, 0).changed());
    block.clear_owner();
    assert_eq!(json(&block)["affinity"], serde_json::Value::Null);
    assert_eq!(json(&block).get("affinity_claim_time"), None);
}

#[test]
fn block_holder_shares_one_entry() {
    let mut block = block(29);
    let _ = block.assign_auto(1, &holder("a"), &none());
    let _ = block.assign_auto(1, &holder("b"), &none());
    block.assign_specific(ip(7), &holder("a")).unwrap();
    assert_eq!(block.attributes().len(), 2);
    let _ = block.assign_auto(1, &Attribute::new(Some("a"), BTreeMap::new()), &none());
    let _ = block.assign_auto(1, &Attribute::new(None, BTreeMap::new()), &none());
    assert_eq!(block.attributes().len(), 4);
    assert_eq!(block.ips_by_handle("a"), ips(&[0, 2, 7]));
    assert_eq!(block.attributes_of(ip(7)).unwrap().get("node"), Some("node1"));
    assert_eq!(block.attributes_of(ip(3)).unwrap().handle(), None);
    assert_eq!(block.lookup(ip(4)), AddressState::Free);
    assert_eq!(block.lookup(ip(8)), AddressState::Outside);
    assert_eq!(block.lookup("fd80::".parse().unwrap()), AddressState::Outside);
}

#[test]
fn block_reserved_addresses_keep_their_place() {
    let mut block = block(29);
    let reserved = Reservations::new(["10.0.0.0/31".parse().unwrap(), "10.0.0.3/32".parse().unwrap()]);
    assert_eq!(block.free_count(&reserved), 5);
    assert_eq!(block.assign_auto(2, &holder("a"), &reserved), ips(&[2, 4]));
    assert_eq!(json(&block)["unallocated"], serde_json::json!([0, 1, 3, 5, 6, 7]));
    // A reserved address can be assigned if it is specifically requested.
    block.assign_specific(ip(1), &holder("b")).unwrap();
    assert_eq!(block.assign_auto(9, &holder("c"), &reserved), ips(&[5, 6, 7]));
    assert_eq!(block.free_count(&reserved), 0);
    assert_eq!(block.assign_auto(1, &holder("d"), &reserved), ips(&[]));
    // Assigning zero addresses adds no entry to the block.
    assert!(!json(&block)["attributes"].to_string().contains("\"d\""));
    assert_eq!(block.free_count(&Reservations::new(["0.0.0.0/0".parse().unwrap()])), 0);
}

#[test]
fn block_taken_addresses_are_refused() {
    let mut block = block(30);
    block.assign_specific(ip(1), &holder("a")).unwrap();
    let before = block.clone();
    let error = block.assign_specific(ip(1), &holder("b")).unwrap_err();
    assert_eq!(error.to_string(), "resource already exists: 10.0.0.1 with error: Address already assigned in block");
    assert!(block.assign_specific(ip(9), &holder("b")).is_err());
    assert_eq!(block, before);
    let _ = block.release_by_handle("a", NOW, 60);
    assert!(block.assign_specific(ip(1), &holder("b")).is_err(), "it rests");
}

#[test]
fn block_released_addresses_cool_down() {
    let mut block = block(30);
    let _ = block.assign_auto(2, &holder("a"), &none());
    block.bump();
    let released = block.release_by_handle("a", NOW, 60);
    assert_eq!(released.released, ips(&[0, 1]));
    assert_eq!(json(&block)["attributes"], serde_json::json!([{"releasedAt":"2026-11-21T02:41:03Z"}]));
    assert_eq!(block.sequence_number_of(ip(0)), block.sequence_number());
    assert_eq!(block.lookup(ip(0)), AddressState::CoolingDown(datetime!(2026-11-21 02:41:03 UTC)));
    assert!(!block.is_empty() && block.free_count(&none()) == 2 && block.ips_by_handle("a").is_empty());
    block.bump();
    let mut block = reread(&block);

    let again = block.release_addresses(&[ReleaseRequest::new(ip(0))], NOW, 60).unwrap();
    assert_eq!((again.released, again.unallocated), (vec![], ips(&[0])));
    for seconds in [-100_000, 0, 59, 60] {
        let at = datetime!(2026-11-21 02:41:03 UTC) + Duration::seconds(seconds);
        let done = block.clone().apply_cooldown(at, 60);
        assert_eq!(done.freed, ips(&[]), "{seconds}");
    }
    assert_eq!(block.clone().apply_cooldown(NOW, 0).freed, ips(&[0, 1]), "switched off since");
    let done = block.apply_cooldown(datetime!(2026-11-21 02:42:03.001 UTC), 60);
    assert_eq!(done, Cooldown { freed: ips(&[0, 1]), moved: 0 });
    assert!(block.is_empty());
    assert_eq!(json(&block)["unallocated"], serde_json::json!([2, 3, 0, 1]));
    assert_eq!(json(&block)["attributes"], serde_json::json!([]));
    assert_eq!(block.sequence_number_of(ip(0)), 0);
}

#[test]
fn block_cooldown_from_future_ends_too() {
    let mut block = block(30);
    let _ = block.assign_auto(1, &holder("a"), &none());
    let _ = block.release_by_handle("a", NOW + Duration::days(400), 60);
    let done = block.apply_cooldown(NOW, 60);
    assert_eq!((done.freed.len(), done.moved), (0, 1));
    let mut block = reread(&block);
    assert_eq!(block.apply_cooldown(NOW + Duration::seconds(30), 60), Cooldown::default());
    assert_eq!(block.apply_cooldown(NOW + Duration::seconds(61), 60).freed, ips(&[0]));

    // A release date slightly in the future is not changed.
    let _ = block.assign_specific(ip(0), &holder("a"));
    let _ = block.release_by_handle("a", NOW + Duration::seconds(50), 60);
    assert_eq!(block.apply_cooldown(NOW, 60), Cooldown::default());
    assert_eq!(block.apply_cooldown(NOW + Duration::seconds(121), 60).freed, ips(&[0]));
    assert_eq!(block.claim_age(NOW - Duration::days(1)), Some(Duration::ZERO));
    assert_eq!(block.claim_age(NOW - Duration::days(2)), None, "a clock was wrong");
}

#[test]
fn block_cooldown_counts_as_unheld_despite_handle() {
    let key = keys::block("10.0.0.0/31".parse().unwrap());
    let text = br#"{"cidr":"10.0.0.0/31","allocations":[0,null],"unallocated":[1],
        "attributes":[{"handle_id":"h","releasedAt":"2026-11-21T02:41:03Z"}]}"#;
    let mut block = Block::decode(&key, text).unwrap();
    assert_eq!(block.ips_by_handle("h"), ips(&[]));
    assert_eq!(block.attributes_of(ip(0)), None);
    assert!(!block.release_by_handle("h", NOW, 60).changed());
    // A new holder gets its own entry, even if the entry of a released address has the same handle.
    assert_eq!(block.assign_auto(1, &Attribute::new(Some("h"), BTreeMap::new()), &none()), ips(&[1]));
    assert_eq!(block.ips_by_handle("h"), ips(&[1]));
}

#[test]
fn block_release_is_all_or_nothing() {
    let mut block = block(29);
    let _ = block.assign_auto(2, &holder("a"), &none());
    block.bump();
    let _ = block.assign_auto(1, &holder("b\r\neth0"), &none());
    let before = block.clone();
    let good = ReleaseRequest::new(ip(0)).with_handle("a").with_sequence_number(block.sequence_number_of(ip(0)));

    let stale = ReleaseRequest::new(ip(1)).with_sequence_number(7);
    let error = block.release_addresses(&[good.clone(), stale], NOW, 0).unwrap_err();
    assert_eq!(error.address(), ip(1));
    assert!(matches!(error.kind(), ReleaseConflictKind::SequenceNumber { requested: 7, .. }));
    let other = ReleaseRequest::new(ip(1)).with_handle("b");
    let error = block.release_addresses(&[good.clone(), other], NOW, 0).unwrap_err();
    assert_eq!(error.to_string(), "update conflict: 10.0.0.1: bad handle: requested b, expected a");
    assert_eq!(block, before);

    let odd = ReleaseRequest::new(ip(2)).with_handle("b");
    let free = ReleaseRequest::new(ip(5));
    let outside = ReleaseRequest::new(ip(9));
    let released = block.release_addresses(&[good.clone(), good, odd, free, outside], NOW, 0).unwrap();
    assert_eq!(released.released, ips(&[0, 2]));
    assert_eq!(released.unallocated, ips(&[5, 9]));
    assert_eq!(released.by_handle, BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 1)]));
    assert_eq!(block.ips_by_handle("a"), ips(&[1]));
}

#[test]
fn block_release_filter_chooses_within_handle() {
    let mut block = block(29);
    let on = |name: &str| Attribute::new(Some("h"), BTreeMap::from([("margay.io/ifname".to_owned(), name.to_owned())]));
    let _ = block.assign_auto(1, &on("eth0"), &none());
    let _ = block.assign_auto(1, &on("eth1"), &none());
    let eth1 = |entry: &Attribute| entry.has_handle("h") && entry.get("margay.io/ifname") == Some("eth1");
    let released = block.release_where(NOW, 0, |_, entry| eth1(entry));
    assert_eq!(released.released, ips(&[1]));
    assert_eq!(block.ips_by_handle("h"), ips(&[0]));
}

#[test]
fn block_host_reserved_ends_are_kept() {
    let reserved = HostReserved {
        start: 3,
        end: 1,
        handle: WINDOWS_RESERVED_HANDLE.to_uppercase(),
        attributes: BTreeMap::from([("note".to_owned(), "ipam ut".to_owned())]),
    };
    let cidr = "10.0.0.0/29".parse().unwrap();
    let mut block = Block::new(cidr, None, NOW, Some(&reserved)).unwrap();
    assert!(block.is_empty());
    assert_eq!(json(&block)["allocations"], serde_json::json!([0, 0, 0, null, null, null, null, 0]));
    assert_eq!(json(&block)["sequenceNumberForAllocation"], serde_json::json!({}));
    assert_eq!(block.assign_auto(9, &holder("a"), &none()), ips(&[3, 4, 5, 6]));
    assert!(!block.is_empty());
    let small = "10.0.0.0/30".parse().unwrap();
    assert_eq!(Block::new(small, None, NOW, Some(&reserved)), Err(UnusableBlock::NothingLeft(small)));
    let huge = HostReserved { start: usize::MAX, end: usize::MAX, ..reserved };
    assert!(Block::new(small, None, NOW, Some(&huge)).is_err());
    let whole = "::/0".parse().unwrap();
    assert_eq!(Block::new(whole, None, NOW, None), Err(UnusableBlock::TooLarge(whole)));
    let plain = Block::new(cidr, None, NOW, Some(&HostReserved::default())).unwrap();
    assert_eq!(json(&plain)["attributes"], serde_json::Value::Null);
}

#[test]
fn block_owner_is_required() {
    let mut block = block(30);
    let (own, other) = (Owner::Host("node1".into()), Owner::Virtual("node1".into()));
    assert_eq!(block.require_owner(&own), Ok(()));
    assert_eq!(block.require_owner(&other).unwrap_err().to_string(), "Block host affinity does not match");
    block.clear_owner();
    assert_eq!(
        block.require_owner(&own).unwrap_err().to_string(),
        "Attempt to assign from block 10.0.0.0/30 with no affinity"
    );
    assert!(!block.is_owned_by(&own));
    assert_eq!(Owner::from("host:a:b"), Owner::Host("a:b".into()));
    assert_eq!(Owner::from("a"), Owner::Other("a".into()));
}

#[test]
fn block_sequence_numbers_wrap_and_old_forms_are_renewed() {
    let key = keys::block("10.0.0.0/31".parse().unwrap());
    let text = br#"{"cidr":"10.0.0.0/31","allocations":[null,0],"unallocated":[0],"attributes":[{"handle_id":"h"}]}"#;
    let mut block = Block::decode(&key, text).unwrap();
    assert_eq!((block.sequence_number(), block.sequence_number_of(ip(1)), block.claim_age(NOW)), (0, 0, None));
    block.bump();
    assert_eq!(
        json(&block),
        serde_json::json!({"cidr":"10.0.0.0/31","affinity":null,"allocations":[null,0],"unallocated":[0],
            "attributes":[{"handle_id":"h"}],"sequenceNumber":1,"sequenceNumberForAllocation":{},"deleted":false})
    );
    let text = br#"{"cidr":"10.0.0.0/31","allocations":[null,null],"unallocated":[0,1],"sequenceNumber":18446744073709551615}"#;
    let mut block = Block::decode(&key, text).unwrap();
    block.bump();
    assert_eq!(block.sequence_number(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Auto(usize, u8),
    Specific(u8, u8),
    ByHandle(u8),
    Addresses(Vec<u8>),
    Wait(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_usize..5, 0_u8..4).prop_map(|(wanted, handle)| Step::Auto(wanted, handle)),
        (0_u8..18, 0_u8..4).prop_map(|(last, handle)| Step::Specific(last, handle)),
        (0_u8..4).prop_map(Step::ByHandle),
        prop::collection::vec(0_u8..18, 0..4).prop_map(Step::Addresses),
        (-40_i64..80).prop_map(Step::Wait),
    ]
}

proptest! {
    /// Compares a block with a map of holders after each random step.
    #[test]
    fn block_stays_consistent_under_random_history(steps in prop::collection::vec(step(), 0..40), cooldown in prop_oneof![Just(0_i64), Just(30)]) {
        let mut block = block(28);
        let mut held: BTreeMap<IpAddr, u8> = BTreeMap::new();
        let mut now = NOW;
        for step in steps {
            let _ = block.apply_cooldown(now, cooldown);
            match step {
                Step::Auto(wanted, handle) => {
                    let free = block.free_count(&none());
                    let given = block.assign_auto(wanted, &holder(&handle.to_string()), &none());
                    prop_assert_eq!(given.len(), wanted.min(free));
                    for ip in given {
                        prop_assert_eq!(held.insert(ip, handle), None);
                    }
                }
                Step::Specific(last, handle) => {
                    if block.assign_specific(ip(last), &holder(&handle.to_string())).is_ok() {
                        prop_assert_eq!(held.insert(ip(last), handle), None);
                    }
                }
                Step::ByHandle(handle) => {
                    let released = block.release_by_handle(&handle.to_string(), now, cooldown);
                    let expected: Vec<IpAddr> = held.iter().filter(|(_, of)| **of == handle).map(|(ip, _)| *ip).collect();
                    prop_assert_eq!(released.released, expected);
                    held.retain(|_, of| *of != handle);
                }
                Step::Addresses(last) => {
                    let requests: Vec<_> = last.iter().map(|last| ReleaseRequest::new(ip(*last))).collect();
                    let done = block.release_addresses(&requests, now, cooldown).unwrap();
                    for ip in &done.released {
                        prop_assert!(held.remove(ip).is_some());
                    }
                    prop_assert!(done.unallocated.iter().all(|ip| !held.contains_key(ip)));
                }
                Step::Wait(seconds) => now += Duration::seconds(seconds),
            }
            block.bump();
            prop_assert_eq!(&reread(&block), &block);
            let entries = block.attributes().len();
            let used: std::collections::BTreeSet<usize> = block.allocations.iter().flatten().copied().collect();
            prop_assert_eq!(used.len(), entries, "every entry is used");
            let ours: BTreeMap<IpAddr, u8> = block
                .allocated()
                .filter_map(|(ip, entry)| Some((ip, entry.handle()?.parse().ok()?)))
                .collect();
            prop_assert_eq!(&ours, &held);
        }
        let _ = block.apply_cooldown(now + Duration::days(1), cooldown);
        prop_assert_eq!(block.free_count(&none()) + held.len(), 16);
    }
}
