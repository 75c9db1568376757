//! A watch that goes on after a hand-over: a revision is all that it has to remember.

use futures::StreamExt;
use futures::stream::unfold;
use kv::{Batch, ErrorKind, Progress, Result, WatchRequest, WatchStream};

use super::Held;

/// Watches the store, or the store of a generation, and the same store after each hand-over.
///
/// # Errors
/// Those of a watch; `RevisionRegressed` if another store has taken its place.
pub(super) async fn watch_on(held: Held, of: Option<u64>, request: WatchRequest) -> Result<WatchStream> {
    let wants_progress = request.progress == Progress::Report;
    // It says where a quiet watch goes on after a hand-over, when the history from its start may be gone.
    let request = request.with_progress(Progress::Report);
    let (generation, stream) = held.watch_open(of, request.clone()).await?;
    let cursor = Cursor { held, generation, request, wants_progress, stream: Some(stream) };
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
        let opened = loop {
            match self.held.watch_open(Some(self.generation), self.request.clone()).await {
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                opened => break opened?,
            }
        };
        self.stream = Some(opened.1);
        Ok(())
    }
}
