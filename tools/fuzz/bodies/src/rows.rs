//! Checks the encoding of a store's rows, and checks stores with rows whose content is wrong but whose checksums are
//! right.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use arbitrary::{Result, Unstructured};
use futures::{FutureExt, StreamExt};
use kv::{Compare, Op, Prev, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest};
use kv_mvcc::{MemoryTable, MvccStore, Table, Write, fuzzing};

use crate::store::{block_on, open};

/// Runs the fuzz target `row_codec` on an input. The input consists of the length of a key, the key, and the bytes of a
/// row.
pub fn row_codec(data: &[u8]) {
    let (key, row) = match data.split_first() {
        Some((length, rest)) => rest.split_at(usize::from(*length).min(rest.len())),
        None => (data, data),
    };
    // Checks the row as it is (its checksum is usually wrong), and then again with a correct checksum.
    fuzzing::check_row(key, row);
    let sealed = fuzzing::seal(key, row);
    fuzzing::check_row(key, &sealed);
    assert_eq!(fuzzing::unseal(key, &sealed), Some(row));
    assert_eq!(fuzzing::unseal(&[key, b"x"].concat(), &sealed), None, "a row belongs to its key");
}

/// Runs the fuzz target `damaged_rows` on an input. The input chooses which rows of a store are changed, and how.
pub fn damaged_rows(data: &[u8]) {
    static WHOLE: OnceLock<Vec<(Vec<u8>, Vec<u8>)>> = OnceLock::new();
    let whole = WHOLE.get_or_init(|| {
        let table = MemoryTable::new();
        block_on(fill(&open(Box::new(table.clone())).unwrap()));
        rows(&table)
    });
    let table = MemoryTable::new();
    table.commit(&whole.iter().map(|(key, row)| Write::Put(key.clone(), row.clone())).collect::<Vec<_>>()).unwrap();
    let mut input = Unstructured::new(data);
    while !input.is_empty() {
        let write = damage(&rows(&table), &mut input).unwrap();
        table.commit(&[write]).unwrap();
    }
    if let Err(error) = block_on(use_all(&table)) {
        let text = error.to_string();
        // The error text reports a panic of the engine, but the in-memory engine must never panic.
        assert!(!text.contains("the engine gave up"), "{text}");
    }
}

/// Fills a store with keys that have some history: overwritten, deleted and recreated keys, a value that is split into
/// several rows, and a compaction.
async fn fill(store: &MvccStore) {
    let put = |key: &str, len: usize| Op::put(key, vec![7; len]);
    for n in 0..6 {
        let txn = Txn::new().with_success([put("a", n), put(&format!("k{n}"), 100), put("large", 7000 + n)]);
        store.txn(txn).await.unwrap();
        let txn = Txn::new().with_success([Op::delete("large"), Op::delete_range(Range::prefix("k1"))]);
        store.txn(txn).await.unwrap();
    }
    store.compact(Revision::new(5)).await.unwrap();
    store.txn(Txn::new().with_success([put("last", 1)])).await.unwrap();
}

fn rows(table: &MemoryTable) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut rows = Vec::new();
    let view = table.view().unwrap();
    view.scan(&[], &[u8::MAX], &mut |key, row| {
        rows.push((key.to_vec(), row.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    rows
}

fn damage(rows: &[(Vec<u8>, Vec<u8>)], input: &mut Unstructured<'_>) -> Result<Write> {
    let Some((key, row)) = rows.get(usize::from(input.arbitrary::<u8>()?) % rows.len().max(1)) else {
        return Ok(Write::Put(input.arbitrary()?, input.arbitrary()?));
    };
    let mut payload = fuzzing::unseal(key, row).unwrap_or(row).to_vec();
    let place = usize::from(input.arbitrary::<u8>()?) % payload.len().max(1);
    match input.int_in_range(0..=6)? {
        0 => return Ok(Write::Delete(key.clone())),
        1 => return Ok(Write::Put(key.clone(), input.bytes(input.len().min(8))?.to_vec())),
        2 => payload.truncate(place),
        3 => {
            let more = input.bytes(input.len().min(9))?;
            payload.splice(place..place, more.iter().copied());
        }
        // Replaces a row's content by that of another row, which the store might be able to decode under the wrong key.
        4 => {
            let (other_key, other) = &rows[usize::from(input.arbitrary::<u8>()?) % rows.len()];
            payload = fuzzing::unseal(other_key, other).unwrap_or(other).to_vec();
        }
        5 => {
            let (mut key, byte) = (key.clone(), input.arbitrary()?);
            let place = place.min(key.len().saturating_sub(1));
            key.get_mut(place).into_iter().for_each(|place| *place = byte);
            let row = fuzzing::seal(&key, &payload);
            return Ok(Write::Put(key, row));
        }
        _ => {
            let byte = input.arbitrary()?;
            payload.get_mut(place).into_iter().for_each(|place| *place = byte);
        }
    }
    Ok(Write::Put(key.clone(), fuzzing::seal(key, &payload)))
}

/// Calls every method of a store, and stops at the first error that reports a panic of the engine.
async fn use_all(table: &MemoryTable) -> kv::Result<()> {
    let store = open(Box::new(table.clone()))?;
    let now = store.status().revision;
    let mark = store.status().compacted;
    // Each store call below may fail, because the call may read a damaged row.
    let _ = quiet(store.list(Range::All).await)?;
    for at in [mark.get(), mark.get().saturating_add(1), now.get().saturating_sub(1), now.get()] {
        let _ = quiet(store.range(RangeRequest::new(Range::All).with_at(Revision::new(at))).await)?;
    }
    for start in [mark.get().max(1), now.get().saturating_sub(3).max(1)] {
        let request = WatchRequest::new(Range::All, Revision::new(start)).with_prev(Prev::Return);
        if let Some(mut events) = quiet(store.watch(request).await)? {
            while let Some(Some(batch)) = events.next().now_or_never() {
                let _ = quiet(batch)?;
            }
        }
    }
    let txn = Txn::new()
        .with_compares([Compare::nothing_newer(Range::All, now)])
        .with_success([Op::put("a", "new"), Op::delete_range(Range::prefix("k")).with_prev()])
        .with_failure([Op::range(Range::All), Op::put("large", "small").with_prev()]);
    let _ = quiet(store.txn(txn).await)?;
    let _ = quiet(store.compact(store.status().revision).await)?;
    let _ = quiet(store.txn(Txn::new().with_success([Op::put("b", "c")])).await)?;
    let _ = quiet(store.verify().await)?;
    let _ = quiet(store.list(Range::All).await)?;
    store.close().await
}

/// Returns the answer of a store call; `None` if the call failed with an error other than a panic.
fn quiet<T>(answer: kv::Result<T>) -> kv::Result<Option<T>> {
    match answer {
        Err(error) if error.to_string().contains("the engine gave up") => Err(error),
        answer => Ok(answer.ok()),
    }
}
