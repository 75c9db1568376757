//! Tests a migration while plugins use its source store.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use datastore::{Create, Location};
use kv::Op;

use crate::moving::fill::{Places, migrate, ours};
use crate::store::content::{blocks, content, with_store, write};

const CALLERS: usize = 4;
/// Number of blocks. Enough that a migration must close the store for waiting processes before it has read all blocks.
const BLOCKS: usize = 3000;

/// Returns the two keys that simulated plugin number `caller` writes: one near the start and one near the end of the
/// key range.
fn keys(caller: usize) -> [String; 2] {
    [format!("/calico/ipam/v2/assignment/caller-{caller}"), format!("/margay/v1/test-{caller}")]
}

/// Uses the store as a plugin does: opens the store, commits once and closes the store.
fn call(location: &Location, caller: usize, round: usize) {
    with_store(location, Create::Never, async |open| {
        let ops = keys(caller).map(|key| Op::put(key, round.to_string()));
        open.store().txn(kv::Txn::new().with_success(ops)).await.unwrap();
    });
}

#[test]
fn callers_take_turns_while_one_revision_is_copied() {
    let places = Places::new();
    for (from, to) in [(places.sled("a"), places.redb("b")), (places.redb("c"), places.sled("d"))] {
        ours(&from, 1);
        write(&from, blocks(BLOCKS));
        (0..CALLERS).for_each(|caller| call(&from, caller, 0));
        let (over, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        let done = thread::scope(|scope| {
            for caller in 0..CALLERS {
                let (from, over, turns) = (&from, &over, &turns);
                scope.spawn(move || {
                    for round in 1.. {
                        call(from, caller, round);
                        turns.fetch_add(1, Ordering::Relaxed);
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            let done = migrate(&from, &to, &[]);
            over.store(true, Ordering::Relaxed);
            done
        });
        assert_eq!(done.code, 0, "{}", done.err);
        let turns = turns.into_inner();
        assert!(turns >= 3 * CALLERS, "only {turns} turns of others");
        let copied = content(&to);
        for [first, last] in (0..CALLERS).map(keys) {
            assert_eq!(copied[first.as_bytes()], copied[last.as_bytes()], "{first}: not of one revision");
        }
        let said = migrate(&from, &to, &["--finish"]).failure();
        assert!(said.contains("are not equal"), "{said}");
        assert_eq!(migrate(&from, &to, &[]).code, 0);
        assert_eq!(migrate(&from, &to, &["--finish"]).code, 0);
        assert!(content(&to) == content(&from));
    }
}
