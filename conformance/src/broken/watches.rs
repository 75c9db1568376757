//! Defines stores with faults in watches.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::{Stream, StreamExt, stream};
use kv::{
    Batch, ErrorKind, EventKind, Prev, Progress, Range, RangeRequest, Result, Revision, Store, WatchRequest,
    WatchStream,
};
use tokio::sync::mpsc;

use super::Twist;

/// Creates a watch stream in which each batch of `stream` is replaced by the batches that `change` returns.
fn change<S, I>(stream: S, mut change: impl FnMut(Batch) -> I + Send + 'static) -> WatchStream
where
    S: Stream<Item = Result<Batch>> + Send + 'static,
    I: IntoIterator<Item = Batch>,
    I::IntoIter: Send + 'static,
{
    stream
        .flat_map(move |item| {
            let items: Vec<Result<Batch>> = match item {
                Ok(batch) => change(batch).into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            stream::iter(items)
        })
        .boxed()
}

#[derive(Debug, Default)]
pub(super) struct LosesAnEvent;

#[async_trait]
impl Twist for LosesAnEvent {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        Ok(change(inner.watch(request).await?, |mut batch| {
            if batch.events.len() > 1 {
                batch.events.pop();
            }
            [batch]
        }))
    }
}

#[derive(Debug, Default)]
pub(super) struct SplitsBatches;

#[async_trait]
impl Twist for SplitsBatches {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        Ok(change(inner.watch(request).await?, |batch| {
            let (revision, time) = (batch.revision, batch.time);
            batch.events.into_iter().map(move |event| Batch { revision, time, events: vec![event] })
        }))
    }
}

#[derive(Debug, Default)]
pub(super) struct Repeats;

#[async_trait]
impl Twist for Repeats {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        let mut count = 0;
        Ok(change(inner.watch(request).await?, move |batch| {
            count += 1;
            if count % 10 == 0 { vec![batch.clone(), batch] } else { vec![batch] }
        }))
    }
}

#[derive(Debug, Default)]
pub(super) struct SkipsAhead;

#[async_trait]
impl Twist for SkipsAhead {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        let (inner, again) = (inner.clone(), request.clone());
        let stream = inner.watch(request).await?;
        Ok(stream
            .then(move |item| {
                let (inner, mut again) = (inner.clone(), again.clone());
                async move {
                    match item {
                        Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {
                            if let ErrorKind::Compacted { compact_revision } = error.kind() {
                                again.start = *compact_revision;
                            }
                            inner.watch(again).await.unwrap_or_else(|error| stream::iter([Err(error)]).boxed())
                        }
                        item => stream::iter([item]).boxed(),
                    }
                }
            })
            .flatten()
            .boxed())
    }
}

#[derive(Debug, Default)]
pub(super) struct LosesDeletionAtMark(Arc<AtomicI64>);

#[async_trait]
impl Twist for LosesDeletionAtMark {
    async fn compact(&self, inner: &dyn Store, revision: Revision) -> Result<()> {
        inner.compact(revision).await?;
        self.0.fetch_max(revision.get(), Ordering::SeqCst);
        Ok(())
    }

    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        let mark = self.0.clone();
        Ok(change(inner.watch(request).await?, move |mut batch| {
            if batch.revision.get() == mark.load(Ordering::SeqCst) {
                batch.events.retain(|event| event.kind != EventKind::Delete);
            }
            Some(batch).filter(|batch| !batch.events.is_empty())
        }))
    }
}

#[derive(Debug, Default)]
pub(super) struct WatchesTooMuch;

#[async_trait]
impl Twist for WatchesTooMuch {
    async fn watch(&self, inner: &Arc<dyn Store>, mut request: WatchRequest) -> Result<WatchStream> {
        request.check("broken")?;
        if let Range::Key(key) = request.range {
            request.range = Range::Prefix(key);
        }
        inner.watch(request).await
    }
}

#[derive(Debug, Default)]
pub(super) struct NoPrev;

#[async_trait]
impl Twist for NoPrev {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        inner.watch(request.with_prev(Prev::Omit)).await
    }
}

#[derive(Debug, Default)]
pub(super) struct DropsForTheSlow;

#[async_trait]
impl Twist for DropsForTheSlow {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        /// Number of revisions by which a watcher may lag behind the store before it loses batches.
        const ROOM: i64 = 5000;
        let store = inner.clone();
        let fetched = inner.watch(request).await?.filter_map(move |item| {
            let store = store.clone();
            async move {
                let now = store.range(RangeRequest::new(Range::key("?"))).await.map_or(0, |found| found.revision.get());
                let lost = item.as_ref().is_ok_and(|batch| now - batch.revision.get() > ROOM);
                (!lost).then_some(item)
            }
        });
        Ok(fetched.boxed())
    }
}

/// A broken store whose watches report progress before they deliver the events that the report covers.
#[derive(Debug, Default)]
pub(super) struct RunsAhead;

#[async_trait]
impl Twist for RunsAhead {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        let reports = request.progress == Progress::Report;
        Ok(change(inner.watch(request).await?, move |batch| {
            let early = (reports && !batch.is_progress()).then(|| Batch::progress(batch.revision));
            early.into_iter().chain([batch])
        }))
    }
}

/// A broken store that keeps the tasks of ended watches until the store is dropped.
#[derive(Debug, Default)]
pub(super) struct LeaksTasks(Mutex<Vec<mpsc::Sender<()>>>);

#[async_trait]
impl Twist for LeaksTasks {
    async fn watch(&self, inner: &Arc<dyn Store>, request: WatchRequest) -> Result<WatchStream> {
        let stream = inner.watch(request).await?;
        let (hold, mut held) = mpsc::channel(1);
        tokio::spawn(async move { held.recv().await });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(hold);
        Ok(stream)
    }
}
