//! Tests that damage is found when the store is opened, by a complete check, or at the latest when the damaged row is
//! read. A store must never treat damaged rows as intact.

use futures::StreamExt;
use kv::{ErrorKind, Op, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest};
use kv_mvcc::{MAX_ROW_BYTES, MemoryTable, MvccStore, Options, Table, Write};

use crate::wrapped::rows;

/// Creates a store with live and deleted keys, history, a compaction mark and a long value.
async fn sample() -> MemoryTable {
    let table = MemoryTable::new();
    let store = open(&table).unwrap();
    for i in 0..6 {
        store.put(format!("key{}", i % 3), format!("value{i}")).await.unwrap();
    }
    store.put("long", vec![7; 2 * MAX_ROW_BYTES]).await.unwrap();
    store.txn(Txn::new().with_success([Op::put("a", "1"), Op::delete("key0"), Op::put("empty", "")])).await.unwrap();
    store.compact(Revision::new(3)).await.unwrap();
    store.verify().await.unwrap();
    store.close().await.unwrap();
    table
}

fn open(table: &MemoryTable) -> kv::Result<MvccStore> {
    MvccStore::open(Box::new(table.clone()), Options::default())
}

fn table_of(rows: &[(Vec<u8>, Vec<u8>)]) -> MemoryTable {
    let table = MemoryTable::new();
    let writes: Vec<_> = rows.iter().map(|(key, value)| Write::Put(key.clone(), value.clone())).collect();
    table.commit(&writes).unwrap();
    table
}

/// Opens and then verifies the store; returns the kind of the first error.
async fn found(table: &MemoryTable) -> Option<ErrorKind> {
    match open(table) {
        Ok(store) => store.verify().await.err().map(|error| error.kind().clone()),
        Err(error) => Some(error.kind().clone()),
    }
}

#[tokio::test]
async fn damage_is_found_when_row_is_lost() {
    let rows = rows(&sample().await);
    for lost in 0..rows.len() {
        let mut left = rows.clone();
        let (key, _) = left.remove(lost);
        let table = table_of(&left);
        assert_eq!(found(&table).await, Some(ErrorKind::Corrupt), "without {}", key.escape_ascii());
        assert_eq!(crate::wrapped::rows(&table), left, "a damaged table stays as it is");
    }
}

#[tokio::test]
async fn damage_is_found_when_bit_is_flipped() {
    let rows = rows(&sample().await);
    for at in 0..rows.len() {
        let bits = 8 * rows[at].1.len();
        // Flips all bits of each short row, and some bits of each long row, one at a time.
        for bit in (0..bits).step_by((bits / 256).max(1)) {
            let mut flipped = rows.clone();
            flipped[at].1[bit / 8] ^= 1 << (bit % 8);
            let key = flipped[at].0.escape_ascii().to_string();
            assert_eq!(found(&table_of(&flipped)).await, Some(ErrorKind::Corrupt), "bit {bit} of {key}");
        }
    }
}

#[tokio::test]
async fn damage_is_found_when_row_is_cut() {
    let rows = rows(&sample().await);
    for at in 0..rows.len() {
        for len in [0, 1, 4, rows[at].1.len() - 1] {
            let mut cut = rows.clone();
            cut[at].1.truncate(len);
            let key = cut[at].0.escape_ascii().to_string();
            assert_eq!(found(&table_of(&cut)).await, Some(ErrorKind::Corrupt), "{key} cut to {len}");
        }
    }
}

#[tokio::test]
async fn damage_is_found_when_rows_are_swapped() {
    let mut rows = rows(&sample().await);
    let live: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].0[0] == b'c').collect();
    let (first, second) = (live[0], live[1]);
    let moved = rows[first].1.clone();
    rows[first].1 = std::mem::replace(&mut rows[second].1, moved);
    assert_eq!(found(&table_of(&rows)).await, Some(ErrorKind::Corrupt));
}

#[tokio::test]
async fn damage_is_found_when_older_entry_replaces_newest() {
    let table = MemoryTable::new();
    let store = open(&table).unwrap();
    store.put("k", "1").await.unwrap();
    let old = rows(&table).into_iter().find(|(key, _)| key == b"ck").unwrap();
    store.put("k", "2").await.unwrap();
    store.close().await.unwrap();
    table.commit(&[Write::Put(old.0, old.1)]).unwrap();
    assert_eq!(found(&table).await, Some(ErrorKind::Corrupt));
}

#[tokio::test]
async fn damage_is_error_and_not_gap_when_history_is_lost() {
    let table = sample().await;
    let log: Vec<_> = rows(&table).into_iter().filter(|(key, _)| key[0] == b'l').collect();
    table.commit(&[Write::Delete(log[2].0.clone())]).unwrap();
    let store = open(&table).unwrap();
    let mut stream = store.watch(WatchRequest::new(Range::All, Revision::new(3))).await.unwrap();
    let mut last = Ok(());
    while let Some(item) = stream.next().await {
        last = item.map(drop);
    }
    assert_eq!(*last.unwrap_err().kind(), ErrorKind::Corrupt);
    let past = RangeRequest::new(Range::All).with_at(Revision::new(3));
    assert_eq!(*store.range(past).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(store.get("a").await.unwrap().is_some(), "a live key cannot be read");
}

#[tokio::test]
async fn damage_is_found_when_whole_store_is_lost() {
    let table = sample().await;
    let id = open(&table).unwrap().id();
    let options = || Options { expected_id: Some(id), ..Options::default() };
    assert!(MvccStore::open(Box::new(table), options()).is_ok());
    let empty = MemoryTable::new();
    let error = MvccStore::open(Box::new(empty.clone()), options()).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::Corrupt);
    assert!(rows(&empty).is_empty(), "nothing was written");
    let other = MemoryTable::new();
    open(&other).unwrap();
    let error = MvccStore::open(Box::new(other), options()).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn newer_format_is_refused() {
    let table = sample().await;
    // The format row says format 3, which a future version may use.
    let mut row = 3_u32.to_be_bytes().to_vec();
    let mut sum = crc32fast::Hasher::new();
    sum.update(b"mformat");
    sum.update(&row);
    row.extend(sum.finalize().to_be_bytes());
    table.commit(&[Write::Put(b"mformat".to_vec(), row)]).unwrap();
    let before = rows(&table);
    let error = open(&table).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::UnknownFormat { found: 3 });
    assert_eq!(rows(&table), before);
}
