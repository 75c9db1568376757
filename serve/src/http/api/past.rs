//! The past, as far as a store still knows it.
//!
//! A watch reports every change, but not that it has reported all of them. So its revisions are compared with those at
//! which the keys were last written. Once the watch has come to the newest of these, and is silent for a while, that
//! was all.

use std::time::{Duration, SystemTime};

use futures::StreamExt;
use ipam_operator::events::of_batch;
use ipam_operator::history::time_of;
use kv::{Batch, Content, ErrorKind, Operation, Prev, Range, Revision, Store, StoreExt, WatchRequest};
use time::OffsetDateTime;
use tokio::time::timeout;

/// The wait for changes after the newest key: deletions leave no trace that could be compared.
const QUIET: Duration = Duration::from_millis(200);
/// The longest silence of the watch before it has come there.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shows everything that has happened in a range from a revision on, up to now.
pub(super) async fn since(
    store: &dyn Store,
    range: &Range,
    from: Revision,
    mut see: impl FnMut(&Batch) + Send,
) -> kv::Result<()> {
    let listing = store.list_at(range.clone(), Revision::UNSET, Content::KeysOnly).await?;
    let newest = listing.kvs.iter().map(|kv| kv.mod_revision).max().unwrap_or(Revision::UNSET);
    let mut reported = Revision::UNSET;
    let mut changes = store.watch(WatchRequest::new(range.clone(), from).with_prev(Prev::Return)).await?;
    while reported < listing.revision {
        let is_there = reported >= newest || newest < from;
        match timeout(if is_there { QUIET } else { PATIENCE }, changes.next()).await {
            Ok(Some(batch)) => {
                let batch = batch?;
                reported = batch.revision;
                see(&batch);
            }
            Ok(None) => return Ok(()),
            Err(_) if is_there => return Ok(()),
            Err(_) => {
                let error = kv::Error::new(ErrorKind::Timeout, Operation::Watch, "history");
                return Err(error.with_detail("the store tells no more of its history; try again"));
            }
        }
    }
    Ok(())
}

/// The first time that is known at a revision or after it, in a range. `None` if nothing has happened since, or without a time.
pub(super) async fn time_after(
    store: &dyn Store,
    range: &Range,
    revision: Revision,
) -> kv::Result<Option<OffsetDateTime>> {
    /// After so many revisions without a time there will be none.
    const LOOKED_AT: usize = 50;
    let mut changes = store.watch(WatchRequest::new(range.clone(), revision).with_prev(Prev::Return)).await?;
    for _ in 0..LOOKED_AT {
        let Ok(Some(batch)) = timeout(QUIET, changes.next()).await else { return Ok(None) };
        if let Some(time) = time_of_batch(&batch?) {
            return Ok(Some(time));
        }
    }
    Ok(None)
}

/// The time of a commit, by the store or else by the documents.
fn time_of_batch(batch: &Batch) -> Option<OffsetDateTime> {
    let committed: Option<SystemTime> = batch.time;
    match committed {
        Some(time) => Some(time.into()),
        None => of_batch(batch).happenings.iter().find_map(|happening| time_of(None, &happening.what)),
    }
}
