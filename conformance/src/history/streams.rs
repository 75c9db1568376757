//! Checks that each watch delivered exactly the events that the store's log has for it.

use kv::{Batch, ErrorKind, Event, Prev, Revision};

use super::recorder::Stream;
use super::replay::same_events;
use super::violation::Violation;

/// The log's events after the revision `base`; each event has its key's previous state.
#[derive(Debug)]
pub(super) struct TrueEvents {
    base: Revision,
    batches: Vec<(Revision, Vec<Event>)>,
}

impl TrueEvents {
    pub(super) fn after(base: Revision) -> Self {
        Self { base, batches: Vec::new() }
    }

    pub(super) fn push(&mut self, batch: &Batch, events: Vec<Event>) {
        self.batches.push((batch.revision, events));
    }

    /// The first revision at or after `from` that has events for this watch, with these events.
    fn next(&self, stream: &Stream, from: Revision) -> Option<(Revision, Vec<Event>)> {
        let first = self.batches.partition_point(|(revision, _)| *revision < from);
        self.batches[first..].iter().find_map(|(revision, events)| {
            let wanted = |event: &&Event| stream.request.range.contains(event.kv.key.as_bytes());
            let events: Vec<Event> = events.iter().filter(wanted).cloned().collect();
            (!events.is_empty()).then_some((*revision, events))
        })
    }
}

/// Checks that every watch stays within its start revision and key range, and that its batches are complete, in order,
/// and without gaps or repetitions. If the watch requested previous states, each event must have the previous state of
/// its key. A watch may end with `Compacted` only after a client has requested a compaction.
pub(super) fn judge(streams: &[Stream], truth: &TrueEvents, compactions: &[(u64, Revision)]) -> Result<(), Violation> {
    streams.iter().try_for_each(|stream| {
        let compacted = |before: u64| {
            let asked = compactions.iter().filter(|(at, _)| *at < before);
            asked.map(|(_, to)| *to).max().unwrap_or(Revision::UNSET)
        };
        let mut time = None;
        let mut next = stream.request.start;
        for (tick, item) in &stream.items {
            match item {
                Ok(batch) => {
                    check(stream, batch, next, truth, compacted(*tick))
                        .map_err(|violation| violation.showing("batch", batch).showing("watch", &stream.request))?;
                    if batch.time.is_some_and(|now| time.is_some_and(|before| now < before)) {
                        return Err(Violation::new("W15", "a commit's time is before that of an earlier one")
                            .showing("before", &time)
                            .showing("batch", batch));
                    }
                    time = batch.time.or(time);
                    next = batch.revision.next();
                }
                Err(ErrorKind::Compacted { .. }) if compacted(*tick) <= next => {
                    return Err(Violation::new("W8", format!("a watch at {next} ended with {item:?} for no reason")));
                }
                Err(_) => {}
            }
        }
        Ok(())
    })
}

fn check(
    stream: &Stream,
    batch: &Batch,
    next: Revision,
    truth: &TrueEvents,
    compacted: Revision,
) -> Result<(), Violation> {
    let at = batch.revision;
    if at < stream.request.start {
        return Err(Violation::new("W1", format!("an event of {at} in a watch that starts later")));
    }
    if at < next {
        return Err(Violation::new("W2", format!("an event of {at} when {next} is the next that can come")));
    }
    if let Some(foreign) = batch.events.iter().find(|event| !stream.request.range.contains(event.kv.key.as_bytes())) {
        return Err(Violation::new("W4", "an event that is not in the range").showing("event", foreign));
    }
    if at <= truth.base {
        // The batch's revision belongs to an earlier part of the history, and `truth` contains only later events.
        return Ok(());
    }
    match truth.next(stream, next.max(truth.base.next())) {
        Some((revision, events)) if revision == at => same(stream, batch, &events, compacted),
        Some((revision, events)) if revision < at => {
            Err(Violation::new("W2", format!("a watch leaves out {revision}")).showing("left out", &events))
        }
        _ => Err(Violation::new("W2", format!("an event of {at}, where the log has none"))),
    }
}

/// Checks that a batch contains all events of its revision, in the form that the watch requested.
fn same(stream: &Stream, batch: &Batch, events: &[Event], compacted: Revision) -> Result<(), Violation> {
    let bare = |events: &[Event]| events.iter().map(|event| Event { prev: None, ..event.clone() }).collect::<Vec<_>>();
    if bare(&batch.events) != bare(events) {
        let rule = if batch.events.len() == events.len() { "W2" } else { "W3" };
        return Err(Violation::new(rule, "other events than the revision has, or in another order")
            .showing("expected", &events));
    }
    let may_lack = stream.request.prev == Prev::Omit || batch.revision <= compacted;
    let lacks = batch.events.iter().zip(events).any(|(got, want)| got.prev.is_none() && want.prev.is_some());
    let unasked = stream.request.prev == Prev::Omit && batch.events.iter().any(|event| event.prev.is_some());
    if unasked || (lacks && !may_lack) || !same_events(&batch.events, events) {
        return Err(Violation::new("W6", "what was there before is missing, wrong or was not asked for")
            .showing("expected", &events));
    }
    Ok(())
}
