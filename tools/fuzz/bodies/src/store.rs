//! Opens stores for the fuzz targets.

use std::future::Future;
use std::time::{Duration, UNIX_EPOCH};

use kv_mvcc::{Blocking, Clock, MvccStore, Options, Retention, Table};

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Opens a store that works on the calling thread and has a fixed clock, so that runs with the same input have the same
/// result.
pub(crate) fn open(table: Box<dyn Table>) -> kv::Result<MvccStore> {
    let clock = Clock::new(|| UNIX_EPOCH + Duration::from_secs(1_767_225_600));
    let retention = Retention { revisions: Some(50), ..Retention::default() };
    MvccStore::open(
        table,
        Options { name: "fuzz", clock, retention, blocking: Blocking::InPlace, ..Options::default() },
    )
}
