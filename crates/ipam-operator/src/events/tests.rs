//! Tests the events that are derived from pairs of block versions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;
use ipam_core::reservations::Reservations;
use ipam_core::timestamps::go_string;
use kv::{Prev, Store, StoreExt, Txn, WatchRequest};
use proptest::prelude::*;
use time::Duration;
use time::macros::datetime;

use super::*;

const NOW: OffsetDateTime = datetime!(2026-11-21 02:41:03 UTC);

fn cidr() -> IpNet {
    "10.0.0.0/29".parse().unwrap()
}

fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn holder(handle: &str, attributes: &[(&str, &str)]) -> Attribute {
    let attributes = attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Attribute::new(Some(handle), attributes)
}

fn block(owner: Option<&str>) -> Block {
    Block::new(cidr(), owner.map(Owner::host).as_ref(), NOW, None).unwrap()
}

fn holding(entry: &Attribute) -> Block {
    let mut block = block(Some("a"));
    block.assign_specific(ip(1), entry).unwrap();
    block
}

/// Returns the kinds of the events between two versions of a block.
fn between(before: Option<&Block>, after: Option<&Block>) -> Vec<BlockEventKind> {
    of_block(cidr(), before, after).into_iter().map(|one| one.what).collect()
}

#[test]
fn events_claim_block_before_use_and_release_after() {
    let entry = holder("net.c1", &[("node", "a"), ("timestamp", &go_string(NOW))]);
    let held = holding(&entry);
    let (owner, address) = (Owner::host("a"), ip(1));
    let reported = between(None, Some(&held));
    let claimed = BlockEventKind::Claimed { owner: owner.clone(), former: None, at: Some(NOW) };
    assert_eq!(reported, [claimed, BlockEventKind::Assigned { address, holder: entry.clone() }]);
    assert!(reported.iter().all(|what| what.recorded_at() == Some(NOW)));
    let reported = between(Some(&held), None);
    assert_eq!(reported, [BlockEventKind::Released { address, holder: entry }, BlockEventKind::GivenUp { owner }]);
    assert_eq!(between(Some(&held), Some(&held)), []);
}

#[test]
fn events_show_cooldown_of_released_address() {
    let entry = holder("net.c1", &[]);
    let (held, mut resting, address) = (holding(&entry), holding(&entry), ip(1));
    assert!(resting.release_by_handle("net.c1", NOW, 60).changed());
    let rest = |holder| BlockEventKind::InCooldown { address, holder, since: NOW };
    assert_eq!(between(Some(&held), Some(&resting)), [rest(Some(entry))]);
    assert_eq!(between(Some(&block(Some("a"))), Some(&resting)), [rest(None)]);
    assert_eq!(between(Some(&resting), Some(&block(Some("a")))), [BlockEventKind::CooldownOver { address }]);
    // If the address is assigned after its cooldown, one write of the block replaces the old entry by the new entry.
    let next = holding(&holder("net.c2", &[]));
    assert_eq!(
        between(Some(&resting), Some(&next)),
        [BlockEventKind::Assigned { address, holder: holder("net.c2", &[]) }]
    );
}

#[test]
fn events_tell_repeated_request_from_move_and_from_another() {
    let before = holder("net.vm", &[("pod", "x"), (NETWORK, "net"), (INTERFACE, "eth0"), (TIMESTAMP, "t1")]);
    let changed = |name: &str, value: &str| {
        let mut attributes = before.attributes().clone();
        attributes.insert(name.to_owned(), value.to_owned());
        Attribute::new(Some("net.vm"), attributes)
    };
    let reported = |to: &Attribute| between(Some(&holding(&before)), Some(&holding(to)));
    let address = ip(1);
    for name in [TIMESTAMP, BOOT] {
        let to = changed(name, "later");
        assert_eq!(reported(&to), [BlockEventKind::Renewed { address, holder: to }]);
    }
    let moved = changed("pod", "y");
    assert_eq!(reported(&moved), [BlockEventKind::Moved { address, from: before.clone(), to: moved }]);
    for other in [changed(INTERFACE, "eth1"), holder("net.other", &[])] {
        let expected = [
            BlockEventKind::Released { address, holder: before.clone() },
            BlockEventKind::Assigned { address, holder: other.clone() },
        ];
        assert_eq!(reported(&other), expected);
    }
}

/// After its release, a sticky address has no holder until its workload gets the address again.
#[test]
fn events_release_and_assign_sticky_address_once_each() {
    let of = |handle: &str, wait: &str| holder(handle, &[(STICKY, "shop/web"), (STICKY_FOR, wait), (NETWORK, "net")]);
    let (first, again, address) = (of("net.c1", "60"), of("net.c2", "60"), ip(1));
    let held = holding(&first);
    let mut waiting = held.clone();
    waiting.release_by_handle("net.c1", NOW, 0);
    assert!(waits_until(waiting.attributes_of(address).unwrap()).is_some());
    assert_eq!(between(Some(&held), Some(&waiting)), [BlockEventKind::Released { address, holder: first }]);
    let mut taken = waiting.clone();
    taken.keep(address, &again);
    assert_eq!(between(Some(&waiting), Some(&taken)), [BlockEventKind::Assigned { address, holder: again }]);
    let listed = between(None, Some(&waiting));
    assert!(!listed.iter().any(|what| matches!(what, BlockEventKind::Assigned { .. })), "{listed:?}");
    // Pinning an address is reported as a renewal, not as a move to another container.
    let mut pinned = taken.clone();
    pinned.renew(address, [(STICKY_FOR, Some("pinned"))]);
    assert!(matches!(between(Some(&taken), Some(&pinned))[..], [BlockEventKind::Renewed { .. }]));
}

#[test]
fn events_show_block_changing_owner() {
    let (a, b, unowned) = (block(Some("a")), block(Some("b")), block(None));
    let claimed = BlockEventKind::Claimed { owner: Owner::host("b"), former: Some(Owner::host("a")), at: Some(NOW) };
    assert_eq!(between(Some(&a), Some(&b)), [claimed]);
    assert_eq!(between(Some(&a), Some(&unowned)), [BlockEventKind::GivenUp { owner: Owner::host("a") }]);
    assert_eq!(between(Some(&unowned), None), []);
}

#[test]
fn events_read_holder_from_entry() {
    let entry = holder("my.net.0a1b", &[(NETWORK, "my.net"), (INTERFACE, "eth0"), ("pod", "web"), ("node", "a")]);
    let expected = Holder {
        handle: Some("my.net.0a1b"),
        network: Some("my.net"),
        container: Some("0a1b"),
        interface: Some("eth0"),
        pod: Some("web"),
        node: Some("a"),
        namespace: None,
    };
    assert_eq!(Holder::of(&entry), expected);
    assert_eq!(Holder::of(&holder("net.c", &[])).container, None, "nothing splits a handle at a dot");
}

/// Commits a transaction, and returns the events that a watch reports for the transaction's revision.
async fn reported_of(store: &Arc<dyn Store>, txn: Txn) -> BatchEvents {
    let revision = store.txn(txn).await.unwrap().revision;
    let watch = WatchRequest::new(kv::Range::All, revision).with_prev(Prev::Return);
    of_batch(&store.watch(watch).await.unwrap().next().await.unwrap().unwrap())
}

#[tokio::test]
async fn events_tell_affinity_only_when_block_does_not() {
    let store: Arc<dyn Store> = Arc::new(kv_mvcc::memory());
    let owner = Owner::host("a");
    let key = keys::affinity(&owner, cidr()).unwrap();
    let put = |state| kv::Op::put(key.clone(), Affinity::new(state).encode().unwrap());
    let put_block = kv::Op::put(keys::block(cidr()), block(Some("a")).encode().unwrap());
    let affinity = |state| BlockEvent::of(cidr(), BlockEventKind::Affinity { owner: owner.clone(), state });
    // Calico claims a block in steps: first a pending affinity, then the block, then the confirmed affinity.
    let reported = reported_of(&store, Txn::new().with_success([put(AffinityState::Pending)])).await;
    assert_eq!(reported.block_events, [affinity(Some(AffinityState::Pending))]);
    let reported = reported_of(&store, Txn::new().with_success([put_block, put(AffinityState::Confirmed)])).await;
    assert!(
        matches!(reported.block_events[..], [BlockEvent { what: BlockEventKind::Claimed { .. }, .. }]),
        "{reported:?}"
    );
    let reported = reported_of(&store, Txn::new().with_success([put(AffinityState::Confirmed)])).await;
    assert_eq!(reported, BatchEvents::default());
    let gone = [kv::Op::delete(keys::block(cidr())), kv::Op::delete(key.clone())];
    let reported = reported_of(&store, Txn::new().with_success(gone)).await;
    assert_eq!(reported.block_events, [BlockEvent::of(cidr(), BlockEventKind::GivenUp { owner: owner.clone() })]);
}

#[tokio::test]
async fn events_say_what_is_unreadable_or_unknown() {
    let store: Arc<dyn Store> = Arc::new(kv_mvcc::memory());
    let key = keys::block(cidr());
    let damaged = BlockEvent::of(cidr(), BlockEventKind::Damaged);
    let reported = reported_of(&store, Txn::new().with_success([kv::Op::put(key.clone(), "{")])).await;
    assert_eq!(reported.block_events, std::slice::from_ref(&damaged));
    let held = holding(&holder("h", &[]));
    let reported =
        reported_of(&store, Txn::new().with_success([kv::Op::put(key.clone(), held.encode().unwrap())])).await;
    assert_eq!(reported.block_events.len(), 2, "{reported:?}");
    // For a change at the compacted revision, a store may no longer have the key's previous version.
    let at = store.put(key.clone(), block(None).encode().unwrap()).await.unwrap();
    let mut changes = store.watch(WatchRequest::new(kv::Range::All, at)).await.unwrap();
    let reported = of_batch(&changes.next().await.unwrap().unwrap());
    assert_eq!((reported.block_events, reported.unreported), (Vec::new(), vec![cidr()]));
    assert_eq!(of_listed(&key, b"{"), Some(vec![damaged]));
    assert_eq!(of_listed(&keys::handle("h"), b"{}"), None);
}

/// The state of a block, reconstructed from events.
#[derive(Debug, Default, PartialEq, Eq)]
struct Replayed {
    held: BTreeMap<IpAddr, Attribute>,
    resting: BTreeSet<IpAddr>,
    owner: Option<Owner>,
}

impl Replayed {
    fn of(block: &Block) -> Self {
        let mut this = Self { owner: block.owner(), ..Self::default() };
        for (address, entry) in block.allocated() {
            match entry.released_at() {
                None => drop(this.held.insert(address, entry.clone())),
                Some(_) => drop(this.resting.insert(address)),
            }
        }
        this
    }

    fn apply(&mut self, what: BlockEventKind) {
        match what {
            BlockEventKind::Assigned { address, holder } => {
                self.resting.remove(&address);
                assert_eq!(self.held.insert(address, holder), None, "{address} is given to one at a time");
            }
            BlockEventKind::Renewed { address, holder: to } | BlockEventKind::Moved { address, to, .. } => {
                assert!(self.held.insert(address, to).is_some(), "{address} is held");
            }
            BlockEventKind::Released { address, holder } => assert_eq!(self.held.remove(&address), Some(holder)),
            BlockEventKind::InCooldown { address, holder, .. } => {
                assert_eq!(self.held.remove(&address), holder);
                assert!(self.resting.insert(address));
            }
            BlockEventKind::CooldownOver { address } => assert!(self.resting.remove(&address)),
            BlockEventKind::Claimed { owner, former, .. } => assert_eq!(self.owner.replace(owner), former),
            BlockEventKind::GivenUp { owner } => assert_eq!(self.owner.take(), Some(owner)),
            BlockEventKind::Affinity { .. } | BlockEventKind::Damaged => {
                panic!("a list of blocks yields no events of affinities or damage")
            }
        }
    }
}

/// A random operation on a block.
#[derive(Clone, Debug)]
enum Step {
    Assign(u8, usize),
    Release(u8),
    ReleaseOne(u8),
    Renew(u8, u8),
    Own(Option<u8>),
    Delete,
    Wait(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_u8, 1..4_usize).prop_map(|(who, count)| Step::Assign(who, count)),
        2 => (0..4_u8).prop_map(Step::Release),
        2 => (0..8_u8).prop_map(Step::ReleaseOne),
        1 => (0..8_u8, 0..3_u8).prop_map(|(address, at)| Step::Renew(address, at)),
        1 => proptest::option::of(0..2_u8).prop_map(Step::Own),
        1 => Just(Step::Delete),
        1 => (0..100_u8).prop_map(Step::Wait),
    ]
}

fn carry_out(step: &Step, stored: &mut Option<Block>, now: OffsetDateTime, rest: i64) {
    let block = stored.get_or_insert_with(|| block(None));
    let _ = block.apply_cooldown(now, rest);
    match step {
        Step::Assign(who, count) => {
            let entry = holder(&format!("net.c{who}"), &[("node", "a"), (NETWORK, "net"), (INTERFACE, "eth0")]);
            let _ = block.assign_auto(*count, &entry, &Reservations::default());
        }
        Step::Release(who) => drop(block.release_by_handle(&format!("net.c{who}"), now, rest)),
        Step::ReleaseOne(last) => drop(block.release_where(now, rest, |address, _| address == ip(*last))),
        Step::Renew(last, at) => block.renew(ip(*last), [(TIMESTAMP, Some(["x", "y", "z"][usize::from(*at)]))]),
        Step::Own(Some(who)) => block.set_owner(&Owner::host(["a", "b"][usize::from(*who)]), now),
        Step::Own(None) => block.clear_owner(),
        Step::Delete => *stored = None,
        Step::Wait(_) => {}
    }
}

proptest! {
    #[test]
    fn events_replayed_give_current_state(
        steps in proptest::collection::vec((step(), any::<bool>()), 0..60),
        rest in prop_oneof![Just(0), Just(60)],
    ) {
        let (mut now, mut stored, mut seen, mut replayed) = (NOW, None, None, Replayed::default());
        for (step, is_written) in &steps {
            if let Step::Wait(seconds) = step {
                now += Duration::seconds(i64::from(*seconds));
            }
            carry_out(step, &mut stored, now, rest);
            // Between two stored versions of the block, the test may have applied several random operations to it.
            if *is_written {
                for one in of_block(cidr(), seen.as_ref(), stored.as_ref()) {
                    replayed.apply(one.what);
                }
                seen.clone_from(&stored);
                prop_assert_eq!(&replayed, &seen.as_ref().map(Replayed::of).unwrap_or_default());
            }
        }
    }
}
