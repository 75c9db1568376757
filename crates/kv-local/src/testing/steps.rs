//! Stores with content that can be predicted.

use std::future::Future;
use std::path::Path;

use kv::{Op, Range, Result, Store, StoreExt, Txn};

use crate::{Create, Engine, OpenOptions, open_blocking};
use kv_mvcc::MvccStore;

/// Runs a future to its end.
pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Opens the store, or makes it.
pub(crate) fn create(engine: &dyn Engine, path: &Path) -> Result<MvccStore> {
    open_blocking(engine, path, &OpenOptions::default().with_create(Create::IfMissing))
}

/// Opens the store if it is there.
pub(crate) fn open(engine: &dyn Engine, path: &Path) -> Result<MvccStore> {
    open_blocking(engine, path, &OpenOptions::default())
}

/// How many keys one [`step`] writes.
const WIDTH: usize = 5;

/// The value that step `n` gives to all its keys: some short, some longer than a row.
fn value(n: u64) -> Vec<u8> {
    let length = [9, 300, 4000, 20_000][usize::try_from(n % 4).unwrap()];
    n.to_be_bytes().into_iter().cycle().take(length).collect()
}

/// One transaction that writes `WIDTH` keys.
pub(crate) async fn step(store: &MvccStore, n: u64) -> Result<()> {
    let ops: Vec<Op> = (0..WIDTH).map(|i| Op::put(format!("k/{i}/{}", n % 20), value(n))).collect();
    store.txn(Txn::new().with_success(ops)).await.map(drop)
}

/// The contents of the store after the steps before `n`, or their fault.
pub(crate) async fn check(store: &MvccStore, n: u64) -> Result<Result<(), String>> {
    let response = store.list(Range::All).await?;
    let mut expected: Vec<(Vec<u8>, Vec<u8>)> = (n.saturating_sub(20)..n)
        .flat_map(|n| (0..WIDTH).map(move |i| (format!("k/{i}/{}", n % 20).into_bytes(), value(n))))
        .collect();
    expected.sort();
    let found: Vec<(Vec<u8>, Vec<u8>)> =
        response.kvs.iter().map(|kv| (kv.key.as_bytes().to_vec(), kv.value.as_bytes().to_vec())).collect();
    if found == expected {
        return Ok(Ok(()));
    }
    let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    Ok(Err(format!("{} keys, not {}, of which {wrong} differ", found.len(), expected.len())))
}
