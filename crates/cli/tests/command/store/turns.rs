//! Tests a backup while plugins use the store.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use datastore::Create;
use kv::{Range, StoreExt};

use crate::common::{Lab, margay};
use crate::store::content::{blocks, content, other, start, with_store, write};

const CALLERS: usize = 8;
/// Number of blocks. Enough that a backup must close the store for waiting processes before it has read all blocks.
const BLOCKS: usize = 4000;

/// Uses the store as a plugin does: opens the store, commits once and closes the store.
fn call(lab: &Lab, caller: usize, round: usize) {
    with_store(&lab.location, Create::Never, async |open| {
        let store = open.store();
        // The simulated plugin writes its two keys in one transaction.
        let put = |key: String| kv::Op::put(key, round.to_string());
        let keys = [format!("/a/{caller}"), format!("/z/{caller}")];
        store.txn(kv::Txn::new().with_success(keys.map(put))).await.unwrap();
        assert_eq!(store.list(Range::key(format!("/a/{caller}"))).await.unwrap().kvs.len(), 1);
    });
}

#[test]
fn backup_lets_callers_take_turns_and_is_of_one_revision() {
    for lab in Lab::each() {
        write(&lab.location, blocks(BLOCKS));
        for caller in 0..CALLERS {
            call(&lab, caller, 0);
        }
        let file = lab.folder().join("backup");
        let (over, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut backups = 0;
        thread::scope(|scope| {
            for caller in 0..CALLERS {
                let (lab, over, turns) = (&lab, &over, &turns);
                scope.spawn(move || {
                    for round in 1.. {
                        call(lab, caller, round);
                        turns.fetch_add(1, Ordering::Relaxed);
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            for _ in 0..2 {
                let before = turns.load(Ordering::Relaxed);
                let backup = start(&lab.location, &["store", "backup", "--force", file.to_str().unwrap()]);
                let done = backup.wait_with_output().unwrap();
                let during = turns.load(Ordering::Relaxed) - before;
                if !done.status.success() {
                    over.store(true, Ordering::Relaxed);
                }
                assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                backups += 1;
                // The store lock's queue is fair: all eight simulated plugins get the store before the backup opens it
                // again. Each backup opens the store at least four times.
                if during < 2 * CALLERS {
                    over.store(true, Ordering::Relaxed);
                }
                assert!(during >= 2 * CALLERS, "only {during} turns of others during a backup");
            }
            over.store(true, Ordering::Relaxed);
        });
        assert_eq!(backups, 2);
        let target = other(&lab);
        let done = margay(["--store", &target.to_string(), "store", "restore", file.to_str().unwrap()]);
        assert_eq!(done.code, 0, "{}", done.err);
        let (restored, now) = (content(&target), content(&lab.location));
        assert_eq!(restored.keys().collect::<BTreeSet<_>>(), now.keys().collect::<BTreeSet<_>>());
        for caller in 0..CALLERS {
            let of = |folder: &str| &restored[format!("/{folder}/{caller}").as_bytes()];
            assert_eq!(of("a"), of("z"), "caller {caller}: the first and the last key are of one revision");
        }
    }
}

#[test]
fn backup_is_spoiled_when_store_is_replaced_meanwhile() {
    let [_, lab] = Lab::each();
    write(&lab.location, blocks(BLOCKS));
    let (small, file) = (lab.folder().join("small"), lab.folder().join("backup"));
    let source = other(&lab);
    write(&source, blocks(3));
    margay(["--store", &source.to_string(), "store", "backup", small.to_str().unwrap()]).answer();
    let backup = start(&lab.location, &["store", "backup", file.to_str().unwrap()]);
    let replaced = lab.margay(&format!("store restore --replace {}", small.display()));
    assert_eq!(replaced.code, 0, "{}", replaced.err);
    let done = backup.wait_with_output().unwrap();
    if done.status.success() {
        // The backup ran before or after the restore, never during it, so it contains either only the old store's keys
        // or only the restored keys.
        let target = other(&lab);
        let restored =
            margay(["--store", &target.to_string(), "store", "restore", "--replace", file.to_str().unwrap()]);
        assert_eq!(restored.code, 0, "{}", restored.err);
        assert!([3, BLOCKS].contains(&content(&target).len()));
    } else {
        let error = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(error.contains("was replaced by another store meanwhile"), "{error}");
        assert!(!file.exists() && !lab.folder().join("backup.partial").exists());
    }
}
