//! Checks each batch of watch events for the conditions that every batch of every watch must meet.

use std::time::{Duration, SystemTime};

use futures::StreamExt;
use kv::{Batch, ErrorKind, Event, EventKind, Prev, Progress, Range, Revision, WatchRequest, WatchStream};

use crate::expect::{Checked, Failure, JudgedByRule, RECOVERY_TIMEOUT, holds, same, within};

/// A watch with a time limit for each batch and with checks of each batch.
pub(crate) struct Watcher {
    stream: WatchStream,
    request: WatchRequest,
    next: Revision,
    time: Option<SystemTime>,
    progress: Option<Revision>,
    patience: Duration,
    /// The rule to report as broken if the watch delivers no batch within the time limit.
    silence: &'static str,
}

impl Watcher {
    pub(crate) fn new(stream: WatchStream, request: WatchRequest, patience: Duration) -> Self {
        let next = request.start;
        Self { stream, request, next, time: None, progress: None, patience, silence: "W2" }
    }

    /// Extends the time limit for each batch to the time that a store may take to notice a fault and recover from it.
    pub(crate) fn through_faults(mut self) -> Self {
        self.patience = RECOVERY_TIMEOUT;
        self.silence = "W17";
        self
    }

    pub(crate) fn range(&self) -> Range {
        self.request.range.clone()
    }

    /// The revision after the last delivered batch, at which a new watch must start to miss nothing.
    pub(crate) fn resume_from(&self) -> Revision {
        self.next
    }

    pub(crate) fn seen_progress(&self) -> Option<Revision> {
        self.progress
    }

    /// Waits for the next batch of events, or for the error that ends the watch.
    pub(crate) async fn step(&mut self) -> Checked<Result<Batch, ErrorKind>> {
        let checked = format!("a watch of {:?} from {} on, at {}", self.request.range, self.request.start, self.next);
        match within(self.patience, &checked, self.stream.next()).await.of(self.silence)? {
            Some(Ok(batch)) => {
                self.check(&batch)?;
                Ok(Ok(batch))
            }
            Some(Err(error)) => Ok(Err(error.kind().clone())),
            None => Err(Failure::new(checked, "a batch or an error", "the end of the stream")).of("W2"),
        }
    }

    pub(crate) async fn next(&mut self) -> Checked<Batch> {
        self.step().await?.map_err(|kind| Failure::new("a watch", "a batch", format!("the error {kind:?}")))
    }

    pub(crate) async fn take(&mut self, count: usize) -> Checked<Vec<Batch>> {
        let mut batches = Vec::with_capacity(count);
        while batches.len() < count {
            batches.push(self.next().await?);
        }
        Ok(batches)
    }

    /// Waits for all batches up to the batch at revision `last`; fails if the watch ends before that revision.
    pub(crate) async fn until(&mut self, last: Revision) -> Checked<Vec<Batch>> {
        let mut batches = Vec::new();
        while self.next <= last {
            batches.push(self.next().await?);
        }
        same("the last batch's revision", batches.last().map(|batch| batch.revision), Some(last)).of("W2")?;
        Ok(batches)
    }

    /// Checks that the watch stream has ended after its error.
    pub(crate) async fn over(&mut self) -> Checked {
        match within(self.patience, "a watch after its error", self.stream.next()).await? {
            None => Ok(()),
            Some(item) => Err(Failure::new("a watch after its error", "the end", format!("{item:?}"))),
        }
    }

    fn check(&mut self, batch: &Batch) -> Checked {
        let may_be_empty = self.request.progress == Progress::Report;
        holds("a batch has events", may_be_empty || !batch.events.is_empty(), batch).of("W3")?;
        let was_reported = self.progress >= Some(batch.revision);
        let rule = if batch.is_progress() || was_reported { "W18" } else { "W2" };
        holds(&format!("no batch before revision {}", self.next), batch.revision >= self.next, batch).of(rule)?;
        for event in &batch.events {
            same("the mod revision of an event", event.kv.mod_revision, batch.revision).of("W3")?;
            let wanted = self.request.range.contains(event.kv.key.as_bytes());
            holds("only keys in the watched range", wanted, event).of("W4")?;
            check_event(event, self.request.prev)?;
        }
        if let (Some(before), Some(now)) = (self.time, batch.time) {
            holds("a commit's time is not before the one before it", now >= before, &(before, now)).of("W15")?;
        }
        self.time = batch.time.or(self.time);
        if batch.is_progress() {
            self.progress = Some(batch.revision);
        }
        self.next = batch.revision.next();
        Ok(())
    }
}

fn check_event(event: &Event, prev: Prev) -> Checked {
    match event.kind {
        EventKind::Put => {
            let new = event.kv.create_revision == event.kv.mod_revision;
            holds("a put has version 1 if and only if the key is new", new == (event.kv.version == 1), event)
                .of("W5")?;
        }
        EventKind::Delete => {
            let bare = !event.kv.create_revision.is_set() && event.kv.version == 0 && event.kv.value.is_empty();
            holds("a deletion has no create revision, version or value", bare, event).of("W5")?;
        }
    }
    let fits = match &event.prev {
        None => true,
        Some(old) => prev == Prev::Return && old.key == event.kv.key && old.mod_revision < event.kv.mod_revision,
    };
    holds("an older previous value of the same key, only if requested", fits, event).of("W6")
}
