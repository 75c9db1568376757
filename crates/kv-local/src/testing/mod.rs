//! Implements a test program for an [`Engine`]. The tests show how the engine's [`Table`] orders, commits and shows
//! rows, and what happens when the store's files are missing, damaged, or made by another program.
//!
//! ```no_run
//! # use std::path::Path;
//! # use kv_local::{Engine, CommitLog};
//! # #[derive(Clone, Copy)] struct MyEngine;
//! # impl Engine for MyEngine {
//! #     fn name(&self) -> &'static str { "mine" }
//! #     fn entry(&self) -> &'static str { "db" }
//! #     fn files(&self) -> &'static [&'static str] { &["db"] }
//! #     fn log(&self) -> CommitLog { CommitLog::Own }
//! #     fn open(&self, _: &Path, _: &str) -> kv::Result<Box<dyn kv_mvcc::Table>> { unimplemented!() }
//! # }
//! // tests/engine.rs, with `harness = false` in Cargo.toml.
//! fn main() -> std::process::ExitCode {
//!     kv_local::testing::main(MyEngine)
//! }
//! ```
//!
//! A complete store on top of an engine is tested by the crate `conformance`.

#![allow(clippy::unwrap_used, reason = "a failed run panics")]

mod opening;

use std::future::Future;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kv::{Op, Range, Result, Store, StoreExt, Txn};
use kv_mvcc::{MAX_ROW_BYTES, MvccStore, Table, View, Write};
use libtest_mimic::{Arguments, Trial};
use tempfile::TempDir;

use crate::{CommitLog, Create, Engine, OpenOptions, open_blocking};

/// A test of one requirement on engines; panics if the engine violates the requirement.
type Duty = fn(&dyn Engine);

/// Runs the tests of all requirements on `engine`, with the command-line arguments of `cargo test`.
pub fn main(engine: impl Engine + Copy + 'static) -> ExitCode {
    let trial = |&(name, duty): &(&str, Duty)| {
        Trial::test(name, move || {
            duty(&engine);
            Ok(())
        })
    };
    let mut trials: Vec<Trial> = TABLE_DUTIES.iter().chain(opening::DUTIES).map(trial).collect();
    trials.push(trial(&opening::JOURNAL_DUTY).with_ignored_flag(engine.log() != CommitLog::Journal));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type RawRow = (Vec<u8>, Vec<u8>);

/// The requirements on an engine's table, each with the name of its test.
const TABLE_DUTIES: &[(&str, Duty)] = &[
    ("table_is_empty_when_new", table_is_empty_when_new),
    ("table_orders_rows_by_unsigned_bytes", table_orders_rows_by_unsigned_bytes),
    ("scan_stops_when_told", scan_stops_when_told),
    ("commit_puts_replaces_and_deletes", commit_puts_replaces_and_deletes),
    ("commit_keeps_large_rows_and_batches", commit_keeps_large_rows_and_batches),
    ("view_is_snapshot", view_is_snapshot),
    ("recovery_reopens_table", recovery_reopens_table),
];

struct EngineFixture<'a> {
    engine: &'a dyn Engine,
    folder: TempDir,
}

impl<'a> EngineFixture<'a> {
    fn new(engine: &'a dyn Engine) -> Self {
        Self { engine, folder: tempfile::tempdir().unwrap() }
    }

    fn open(&self) -> Box<dyn Table> {
        self.engine.open(&self.folder.path().join(self.engine.entry()), "test").unwrap()
    }
}

fn put(key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Write {
    Write::Put(key.as_ref().to_vec(), value.as_ref().to_vec())
}

fn delete(key: impl AsRef<[u8]>) -> Write {
    Write::Delete(key.as_ref().to_vec())
}

fn scan(view: &dyn View, from: &[u8], to: &[u8]) -> Vec<RawRow> {
    let mut rows = Vec::new();
    view.scan(from, to, &mut |key, value| {
        rows.push((key.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    rows
}

fn keys(table: &dyn Table, from: &[u8], to: &[u8]) -> Vec<Vec<u8>> {
    scan(&*table.view().unwrap(), from, to).into_iter().map(|(key, _)| key).collect()
}

fn table_is_empty_when_new(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    let view = table.view().unwrap();
    assert_eq!(view.get(b"a").unwrap(), None);
    assert_eq!(scan(&*view, b"", b"\xff"), []);
    drop(view);
    table.commit(&[]).unwrap();
    table.commit(&[delete("a")]).unwrap();
    assert_eq!(table.view().unwrap().get(b"a").unwrap(), None);
}

fn table_orders_rows_by_unsigned_bytes(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    let ordered: [&[u8]; 8] = [b"\0", b"\0\0", b"a", b"a\0", b"aa", b"b", b"\x7f", b"\x80\xff"];
    let writes: Vec<Write> = ordered.iter().rev().map(|key| put(key, "v")).collect();
    table.commit(&writes).unwrap();
    assert_eq!(keys(&*table, b"", b"\xff"), ordered);
    assert_eq!(keys(&*table, b"a", b"b"), [&b"a"[..], b"a\0", b"aa"], "from is in, to is out");
    assert_eq!(keys(&*table, b"a\0", b"a\0\0"), [b"a\0"]);
    assert_eq!(keys(&*table, b"b", b"a"), [b""; 0], "an inverted range is empty");
    assert_eq!(keys(&*table, b"a", b"a"), [b""; 0]);
}

fn scan_stops_when_told(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    table.commit(&[put("a", "1"), put("b", "2"), put("c", "3")]).unwrap();
    let mut seen = 0;
    let view = table.view().unwrap();
    view.scan(b"a", b"z", &mut |_, _| {
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!(seen, 2);
}

fn commit_puts_replaces_and_deletes(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    table.commit(&[put("a", "1"), put("b", "2"), put("empty", "")]).unwrap();
    table.commit(&[put("a", "one"), delete("b"), put("c", "3"), delete("nothing")]).unwrap();
    let expected: [RawRow; 3] = [("a".into(), "one".into()), ("c".into(), "3".into()), ("empty".into(), Vec::new())];
    assert_eq!(scan(&*table.view().unwrap(), b"", b"\xff"), expected);
    drop(table);
    assert_eq!(scan(&*fixture.open().view().unwrap(), b"", b"\xff"), expected, "after opening it again");
}

fn commit_keeps_large_rows_and_batches(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    let value = |n: u32| vec![n.to_le_bytes()[0]; MAX_ROW_BYTES];
    let key = |n: u32| [vec![b'k'; 4096], n.to_be_bytes().to_vec()].concat();
    let writes: Vec<Write> = (0..1000).map(|n| put(key(n), value(n))).collect();
    table.commit(&writes).unwrap();
    drop(table);
    let table = fixture.open();
    let view = table.view().unwrap();
    for n in 0..1000 {
        assert!(view.get(&key(n)).unwrap() == Some(value(n)), "row {n}");
    }
    assert_eq!(scan(&*view, b"k", b"l").len(), 1000);
}

/// While a writer commits, each view must show either all rows of a commit or none of them.
fn view_is_snapshot(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    let many: Vec<String> = (0..40).map(|n| format!("row{n:02}")).collect();
    let commit = |n: u32| {
        let writes: Vec<Write> = many.iter().map(|key| put(key, n.to_be_bytes())).collect();
        table.commit(&writes).unwrap();
    };
    commit(0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = 0;
                while !done.load(Ordering::Acquire) {
                    let view = table.view().unwrap();
                    let rows = scan(&*view, b"row", b"rox");
                    assert_eq!(rows.len(), many.len());
                    let value = &rows[0].1;
                    assert!(rows.iter().all(|(_, other)| other == value), "half a commit: {rows:?}");
                    assert_eq!(view.get(b"row39").unwrap().as_ref(), Some(value));
                    let now = u32::from_be_bytes(value.as_slice().try_into().unwrap());
                    assert!(now >= last, "a view went back");
                    last = now;
                    drop(view);
                    thread::yield_now();
                }
            });
        }
        for n in 1..200 {
            commit(n);
        }
        done.store(true, Ordering::Release);
    });
}

fn recovery_reopens_table(engine: &dyn Engine) {
    let fixture = EngineFixture::new(engine);
    let table = fixture.open();
    for n in 0..20_u32 {
        table.commit(&[put("n", n.to_be_bytes())]).unwrap();
        table.recover().unwrap();
        assert_eq!(table.view().unwrap().get(b"n").unwrap(), Some(n.to_be_bytes().to_vec()));
    }
}

pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Opens or creates the store of `engine` in the folder `path`.
pub(crate) fn create(engine: &dyn Engine, path: &Path) -> Result<MvccStore> {
    open_blocking(engine, path, &OpenOptions::default().with_create(Create::IfMissing))
}

/// Opens the existing store of `engine` in the folder `path`.
pub(crate) fn open(engine: &dyn Engine, path: &Path) -> Result<MvccStore> {
    open_blocking(engine, path, &OpenOptions::default())
}

/// The number of keys that one [`step`] writes.
const KEYS_PER_STEP: usize = 5;

/// The value that [`step`] number `n` writes to all its keys: depending on `n`, it fits into one row or is split over
/// several rows.
fn value(n: u64) -> Vec<u8> {
    let length = [9, 300, 4000, 20_000][usize::try_from(n % 4).unwrap()];
    n.to_be_bytes().into_iter().cycle().take(length).collect()
}

/// Commits one transaction that writes `KEYS_PER_STEP` keys.
pub(crate) async fn step(store: &MvccStore, n: u64) -> Result<()> {
    let ops: Vec<Op> = (0..KEYS_PER_STEP).map(|i| Op::put(format!("k/{i}/{}", n % 20), value(n))).collect();
    store.txn(Txn::new().with_success(ops)).await.map(drop)
}

/// Checks that the store contains exactly what the [steps](step) before step `n` wrote. The inner error describes the
/// first difference from the expected content.
async fn check(store: &MvccStore, n: u64) -> Result<Result<(), String>> {
    let response = store.list(Range::All).await?;
    let mut expected: Vec<(Vec<u8>, Vec<u8>)> = (n.saturating_sub(20)..n)
        .flat_map(|n| (0..KEYS_PER_STEP).map(move |i| (format!("k/{i}/{}", n % 20).into_bytes(), value(n))))
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
