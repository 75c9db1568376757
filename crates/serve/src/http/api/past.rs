//! The past, as far as a store still knows it.
//!
//! A watch reports every change, but not that it has reported all of them. So its revisions are compared with those at
//! which the keys were last written. Once the watch has come to the newest of these, and is silent for a while, that
//! was all.

use std::time::Duration;

use futures::StreamExt;
use kv::{Batch, Content, ErrorKind, Operation, Prev, Range, Revision, Store, StoreExt, WatchRequest};
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
