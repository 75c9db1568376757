//! That what does not agree is seen.

use kv::Revision;

use super::*;

const BLOCK: &str = "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-29";
const HANDLE: &str = "/calico/ipam/v2/handle/net.c";
const AFFINITY: &str = "/calico/ipam/v2/host/n/ipv4/block/10.0.0.0-29";

/// A block of which `c` holds the third address.
const HELD: &str = r#"{"cidr":"10.0.0.0/29","affinity":"host:n","allocations":[null,null,0,null,null,null,null,null],
    "unallocated":[3,4,5,6,7,0,1],"attributes":[{"handle_id":"net.c","secondary":{"node":"n"}}],
    "sequenceNumber":8,"deleted":false}"#;
const COUNTED: &str = r#"{"block":{"10.0.0.0/29":1},"deleted":false}"#;
const CONFIRMED: &str = r#"{"state":"confirmed","deleted":false}"#;

fn event(key: &str, value: Option<&str>) -> Event {
    let kv = Kv {
        key: key.into(),
        value: value.unwrap_or_default().into(),
        create_revision: Revision::new(2),
        mod_revision: Revision::new(2),
        version: 1,
        lease: None,
    };
    Event { kind: if value.is_some() { EventKind::Put } else { EventKind::Delete }, kv, prev: None }
}

/// The store after one revision with everything as it should be.
fn held() -> Replay {
    let mut replay = Replay::begin(&[], 1).unwrap();
    let all = [event(BLOCK, Some(HELD)), event(HANDLE, Some(COUNTED)), event(AFFINITY, Some(CONFIRMED))];
    let changes = replay.advance(2, &all).unwrap();
    assert_eq!(changes, [Change::Given("10.0.0.2".parse().unwrap(), "c".into())]);
    assert_eq!(replay.held_by("c").len(), 1);
    replay
}

/// The verdict on a further revision.
fn said(events: &[(&str, Option<&str>)]) -> String {
    let mut events: Vec<Event> = events.iter().map(|(key, value)| event(key, *value)).collect();
    // The keys are there already.
    events.iter_mut().for_each(|event| event.kv.version = 2);
    held().advance(3, &events).unwrap_err()
}

#[test]
fn all_of_it_may_go_together() {
    let mut replay = held();
    let changes = replay.advance(3, &[event(BLOCK, None), event(HANDLE, None), event(AFFINITY, None)]).unwrap();
    assert_eq!(changes, [Change::Taken("10.0.0.2".parse().unwrap(), "c".into())]);
    assert!(replay.left().is_empty());
}

#[test]
fn one_without_the_others_is_seen() {
    assert!(said(&[(HANDLE, None)]).contains("blocks hold"));
    assert!(said(&[(HANDLE, Some(&COUNTED.replace('1', "2")))]).contains("blocks hold"));
    assert!(said(&[(AFFINITY, None)]).contains("host:n has no affinity to"));
    assert!(said(&[(AFFINITY, Some(&CONFIRMED.replace("confirmed", "pending")))]).contains("is pending"));
    let other = AFFINITY.replace("/n/", "/m/");
    assert!(said(&[(&other, Some(CONFIRMED))]).contains("host:m has an affinity to, and not,"));
    assert!(said(&[(BLOCK, None)]).contains("blocks hold None"));
    assert!(said(&[(BLOCK, None), (HANDLE, None)]).contains("and not,"));
    let released = HELD.replace("null,null,0,", "null,null,null,").replace("[3,4", "[2,3,4").replace(":8", ":9");
    let released = released.replace(r#"[{"handle_id":"net.c","secondary":{"node":"n"}}]"#, "[]");
    assert!(said(&[(BLOCK, Some(&released))]).contains("blocks hold None"));
    let nobodys = released.replace(r#""host:n""#, "null");
    let said = said(&[(BLOCK, Some(&nobodys)), (HANDLE, None), (AFFINITY, None)]);
    assert!(said.contains("is empty and nobody's") && said.contains("changed: written "), "{said}");
}

#[test]
fn a_block_that_contradicts_itself_is_seen() {
    let block = |from: &str, to: &str| said(&[(BLOCK, Some(&HELD.replace(":8", ":9").replace(from, to)))]);
    assert!(block("[3,4", "[3,3,4").contains("free twice"));
    assert!(block("[3,4", "[2,3,4").contains("free and allocated"));
    assert!(block("[3,4", "[4").contains("neither free nor allocated"));
    assert!(
        block("\"attributes\":[", "\"attributes\":[{\"handle_id\":\"x\",\"secondary\":{\"node\":\"n\"}},")
            .contains("match")
    );
    assert!(block("{\"node\":\"n\"}", "{}").contains("names no node"));
    assert!(block("10.0.0.0/29", "10.0.0.8/29").contains("another block"));
    assert!(block(":9", ":10").contains("sequence number 8 to 10"));
    assert!(block("{", "").contains("expected"));
}

#[test]
fn a_revision_that_is_left_out_is_seen() {
    assert!(held().advance(4, &[]).unwrap_err().contains("it came after revision 2"));
}
