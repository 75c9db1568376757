//! A watch that goes on after a hand-over: a revision is all that it has to remember.

use std::time::Instant;

use futures::StreamExt;
use futures::stream::unfold;
use kv::{Batch, ErrorKind, Operation, Progress, Result, Store, WatchRequest, WatchStream};
use kv_mvcc::Purpose;

use crate::held::{Held, KeptOpen, WAIT};

/// Watches the store, and the same store after each hand-over.
///
/// # Errors
/// Those of a watch.
pub(crate) async fn watch_on(held: Held, kept: KeptOpen, request: WatchRequest) -> Result<WatchStream> {
    let wants_progress = request.progress == Progress::Report;
    // It says where a quiet watch goes on after a hand-over, when the history from its start may be gone.
    let request = request.with_progress(Progress::Report);
    let stream = kept.store(Purpose::Any)?.watch(request.clone()).await?;
    let cursor = Cursor { held, generation: kept.generation, request, wants_progress, stream: Some(stream) };
    Ok(unfold(cursor, |mut cursor| async move { cursor.next().await.map(|item| (item, cursor)) }).boxed())
}

/// A watch that goes on after a hand-over.
struct Cursor {
    held: Held,
    generation: u64,
    /// The rest of the watch.
    request: WatchRequest,
    /// Whether the client gets reports of progress.
    wants_progress: bool,
    /// The watch on the open store; `None` once it has ended.
    stream: Option<WatchStream>,
}

impl Cursor {
    async fn next(&mut self) -> Option<Result<Batch>> {
        loop {
            match self.stream.as_mut()?.next().await {
                Some(Ok(batch)) => {
                    self.request.start = batch.revision.next();
                    if self.wants_progress || !batch.is_progress() {
                        return Some(Ok(batch));
                    }
                }
                Some(Err(error)) if *error.kind() == ErrorKind::Closed => {
                    // A hand-over is rare, and the future large: thousands of watches would have the room for it.
                    if let Err(error) = Box::pin(self.resume()).await {
                        self.stream = None;
                        return Some(Err(error));
                    }
                }
                Some(Err(error)) => {
                    self.stream = None;
                    return Some(Err(error));
                }
                None => self.stream = None,
            }
        }
    }

    /// Waits for the end of the hand-over, and watches on.
    async fn resume(&mut self) -> Result<()> {
        let kept = loop {
            match self.held.keep_open(Instant::now() + WAIT).await {
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                kept => break kept?,
            }
        };
        if kept.generation != self.generation {
            return Err(self.held.replaced(Operation::Watch));
        }
        self.stream = Some(kept.store(Purpose::Any)?.watch(self.request.clone()).await?);
        Ok(())
    }
}
