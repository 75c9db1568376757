//! Reading one revision of a store in turns, so that no plugin waits long: whoever has read for 20 ms gives an embedded
//! store back as soon as somebody waits, and goes on at that revision when it has its turn again.

use std::time::{Duration, Instant};

use datastore::{Location, OpenStore, care};
use kv::{ErrorKind, Kv, Range, RangeRequest, Revision};

use crate::error::{Failure, Result};
use crate::store::{self, Use, explain};

/// How long a turn lasts at least; then it ends when somebody waits.
const TURN: Duration = Duration::from_millis(20);
/// How many bytes a page should have: what is done with one page is done in the same turn.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page of a cluster has at first, and at most. A block can have more than a megabyte.
const FIRST_PAGE_KEYS: i64 = 16;
const PAGE_KEYS: i64 = 1024;

/// Why a reading ended before its time.
pub(crate) enum Stop {
    /// The revision cannot be read any more.
    Overtaken,
    /// Something failed.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// A reading of some ranges at one revision.
pub(crate) struct Turns<'l> {
    location: &'l Location,
    /// The revision; unset before the first turn.
    at: Revision,
    /// Which store that is.
    id: Option<String>,
    /// What is still to be read, the next one last.
    rest: Vec<Range>,
    /// How many keys to ask a cluster for at a time.
    limit: i64,
}

impl<'l> Turns<'l> {
    /// A reading of these ranges, in this order.
    pub(crate) fn new(location: &'l Location, mut ranges: Vec<Range>) -> Self {
        ranges.reverse();
        Self { location, at: Revision::UNSET, id: None, rest: ranges, limit: FIRST_PAGE_KEYS }
    }

    /// The revision that is read; unset before the first turn.
    pub(crate) fn revision(&self) -> Revision {
        self.at
    }

    /// The id of the store, as hexadecimal digits or a UUID; empty before the first turn.
    pub(crate) fn id(&self) -> &str {
        self.id.as_deref().unwrap_or_default()
    }

    /// Reads for one turn, and shows what was read, in order. False when that was all.
    pub(crate) async fn next(&mut self, visit: &mut impl FnMut(&Kv)) -> Result<bool, Stop> {
        let open = store::open(self.location, Use::Existing).await?;
        let read = self.read(&open, visit).await;
        let closed = open.close().await.map_err(|error| explain(self.location, error));
        read?;
        closed?;
        Ok(!self.rest.is_empty())
    }

    async fn read(&mut self, open: &OpenStore, visit: &mut impl FnMut(&Kv)) -> Result<(), Stop> {
        let id = identity(self.location, open).await?;
        if *self.id.get_or_insert_with(|| id.clone()) != id {
            let location = self.location;
            return Err(Failure::new(format!("{location} was replaced by another store meanwhile"))
                .hint("try again")
                .into());
        }
        let began = Instant::now();
        while let Some(range) = self.rest.pop() {
            let page = self.page(open, range).await.map_err(|error| match error.kind() {
                ErrorKind::Compacted { .. } => Stop::Overtaken,
                _ => Stop::Failed(explain(self.location, error)),
            })?;
            page.iter().for_each(&mut *visit);
            if began.elapsed() >= TURN && self.somebody_waits().await? {
                break;
            }
        }
        Ok(())
    }

    /// Reads the first page of a range; what is left of it comes next.
    async fn page(&mut self, open: &OpenStore, range: Range) -> kv::Result<Vec<Kv>> {
        let end = range.bounds().1;
        if let Some(store) = open.embedded() {
            let mut page = store.page(range.bounds().0, self.at, PAGE_BYTES).await?;
            self.at = page.at;
            page.kvs.retain(|kv| range.contains(kv.key.as_bytes()));
            let next = page.next.filter(|next| range.contains(next.as_bytes()));
            self.rest.extend(next.map(|next| between(next, end)));
            return Ok(page.kvs);
        }
        let request = RangeRequest::new(range).with_at(self.at).with_limit(self.limit);
        let page = open.store().range(request).await?;
        if !self.at.is_set() {
            self.at = page.revision;
        }
        let size: usize = page.kvs.iter().map(size).sum();
        self.limit = if size > PAGE_BYTES { self.limit / 2 } else { self.limit * 2 }.clamp(1, PAGE_KEYS);
        if let (Some(last), true) = (page.kvs.last(), page.more) {
            self.rest.push(between(last.key.successor(), end));
        }
        Ok(page.kvs)
    }

    async fn somebody_waits(&self) -> Result<bool> {
        Ok(care::waiting(self.location).await.map_err(|error| explain(self.location, error))? > 0)
    }
}

fn between(from: kv::Key, end: Option<kv::Key>) -> Range {
    match end {
        Some(end) => Range::FromTo(from, end),
        None => Range::From(from),
    }
}

fn size(kv: &Kv) -> usize {
    kv.key.as_bytes().len() + kv.value.len()
}

/// The id of a store, which no other has.
pub(crate) async fn identity(location: &Location, open: &OpenStore) -> Result<String> {
    if let Some(etcd) = open.etcd() {
        let about = etcd.about().await.map_err(|error| explain(location, error))?;
        return Ok(format!("{:x}", about.cluster));
    }
    Ok(open.embedded().map(|store| store.id().to_string()).unwrap_or_default())
}
