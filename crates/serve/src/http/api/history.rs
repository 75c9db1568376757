//! The history of an address, and of the addresses of a container, a pod or a node.

use std::collections::VecDeque;

use ipam_core::model::keys;
use ipam_core::samples::oldest_revision;
use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{EventRow, Happening, What, of_batch, of_listed};
use ipam_operator::history::{HistoryOf, time_after, time_of};
use kv::{Batch, Content, ErrorKind, Pages, Range, RangeRequest, Revision};
use serde::Serialize;

use super::super::Shown;
use super::super::answer::{Answer, Failure};
use super::super::asked::MOMENT;
use super::search::Party;
use super::{Query, made, past};

/// The most events in an answer: the newest.
const MOST: usize = 500;
/// The most attempts, as the store may give up history while it is read.
const ATTEMPTS: usize = 3;

#[derive(Default, Serialize)]
struct Reported {
    /// The oldest revision that can be read.
    oldest_revision: i64,
    oldest_time: Option<String>,
    /// The events, newest first.
    events: VecDeque<EventRow>,
    /// True if older events are left out.
    more: bool,
}

/// The subject of a history.
enum Whose {
    Known(HistoryOf),
    Pod(Party),
}

impl Whose {
    fn of(query: &Query) -> Result<Self, Failure> {
        if query.need("kind")? == "address" {
            return Ok(Self::Known(HistoryOf::Address(query.parsed("of")?)));
        }
        Ok(match Party::of(query)? {
            Party::Container(name) => Self::Known(HistoryOf::Name(name)),
            Party::Node(name) => Self::Known(HistoryOf::Node(name)),
            pod @ Party::Pod(_) => Self::Pod(pod),
        })
    }

    fn ranges(&self) -> Vec<Range> {
        match self {
            Self::Known(subject) => subject.ranges(),
            Self::Pod(_) => vec![Range::Prefix(keys::blocks_prefix(None))],
        }
    }

    fn concerns(&self, happening: &Happening) -> bool {
        match (self, &happening.what) {
            (Self::Known(subject), _) => subject.concerns(happening),
            (Self::Pod(pod), What::Moved { from, to, .. }) => pod.has(from) || pod.has(to),
            (Self::Pod(pod), what) => what.holder().is_some_and(|entry| pod.has(entry)),
        }
    }
}

pub(super) async fn answer(shown: &Shown, query: &Query) -> Result<Answer, Failure> {
    let whose = Whose::of(query)?;
    let question = format!("{} {}", query.need("kind")?, query.need("of")?);
    let read = shown.asked.alone(history(shown, &whose));
    Ok(made(&shown.asked.history.get(&question, MOMENT, read).await?))
}

async fn history(shown: &Shown, whose: &Whose) -> Result<String, Failure> {
    for _ in 0..ATTEMPTS {
        match read(shown, whose).await {
            Ok(reported) => return serde_json::to_string(&reported).map_err(Failure::store),
            Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::store("the store gives up its history faster than it can be read; try again"))
}

async fn read(shown: &Shown, whose: &Whose) -> kv::Result<Reported> {
    let store = &*shown.store;
    let newest = store.range(RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly)).await?;
    let oldest = oldest_revision(store, newest.revision).await?;
    let mut reported = Reported { oldest_revision: oldest.get(), ..Reported::default() };
    for range in whose.ranges() {
        if !reported.events.is_empty() {
            break;
        }
        // First the state at the beginning, then the changes after it.
        let mut pages = Pages::new(range.clone(), oldest);
        while let Some(page) = pages.next(store).await? {
            for kv in page {
                let listed = of_listed(&kv.key, kv.value.as_bytes()).unwrap_or_default();
                listed
                    .iter()
                    .filter(|one| whose.concerns(one))
                    .for_each(|one| reported.add(EventRow::listed(oldest, one)));
            }
        }
        past::since(store, &range, oldest.next(), |batch| reported.happened(batch, whose)).await?;
    }
    let everything = Range::Prefix(keys::ipam_prefix());
    reported.oldest_time = time_after(store, &everything, oldest).await?.map(rfc3339);
    Ok(reported)
}

impl Reported {
    fn happened(&mut self, batch: &Batch, whose: &Whose) {
        let Batch { revision, time, .. } = batch;
        let all = of_batch(batch).happenings;
        for one in all.iter().filter(|one| whose.concerns(one)) {
            self.add(EventRow::happened(Revision::new(revision.get()), time_of(*time, &one.what), one));
        }
    }

    fn add(&mut self, row: EventRow) {
        self.events.push_front(row);
        if self.events.len() > MOST {
            self.events.pop_back();
            self.more = true;
        }
    }
}
