//! Reading a store as it is at one revision, in turns, so that no plugin waits long: a reader that has read for 10 ms
//! releases the store as soon as another process waits, and goes on at that revision when it has its turn again.

use std::time::Instant;

use datastore::{Location, OpenStore, TURN};
use kv::{ErrorKind, Key, Kv, Lease, Range, Revision};
use tokio::task::spawn_blocking;

use crate::error::{Failure, Result};
use crate::store::{self, Use, explain, somebody_waits};

/// How many bytes of values a turn reads. The read keys are in memory.
const TURN_BYTES: usize = 16 << 20;
/// The most keys of a turn: the work on a turn of small documents takes no longer than on one of large ones. To open
/// sled takes longer than that.
const TURN_KEYS: usize = 16_384;
/// How many bytes of values a page of an embedded store should have, and one of a cluster.
const PAGE_BYTES: usize = 256 << 10;
const CLUSTER_PAGE_BYTES: usize = 8 << 20;

/// Why a turn ended before its time.
pub(crate) enum Stop {
    /// The revision cannot be read any more.
    Overtaken,
    /// It failed.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// A part of a store at one revision, on the way from its first key to its last.
pub(crate) struct Snapshot<'l> {
    location: &'l Location,
    /// The revision; unset before the first turn.
    at: Revision,
    about: Option<Identity>,
    pages: Pages,
}

/// Which store that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The engine.
    pub(crate) engine: &'static str,
    /// The store's id, or the cluster's.
    pub(crate) id: String,
    /// The leases of an embedded store whose format has them. Those of a cluster are its clients' and are not read.
    pub(crate) leases: Option<Vec<Lease>>,
}

impl<'l> Snapshot<'l> {
    /// These ranges, which ascend, at the newest revision.
    pub(crate) fn of(location: &'l Location, ranges: Vec<Range>) -> Self {
        Self { location, at: Revision::UNSET, about: None, pages: Pages::of(ranges) }
    }

    /// The same at a revision that may not be readable any more.
    pub(crate) fn at(mut self, revision: Revision) -> Self {
        self.at = revision;
        self
    }

    /// The revision; unset before the first turn.
    pub(crate) fn revision(&self) -> Revision {
        self.at
    }

    /// Which store it is; known after the first turn.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.about.as_ref()
    }

    /// True if there is nothing left to read.
    pub(crate) fn is_over(&self) -> bool {
        self.pages.is_over()
    }

    /// Reads for one turn: the next keys, ascending; nothing after the last. The store is closed when it returns.
    pub(crate) async fn turn(&mut self) -> Result<Option<Vec<Kv>>, Stop> {
        if self.is_over() {
            return Ok(None);
        }
        let open = store::open_files(self.location, Use::Existing).await?;
        let read = self.read(&open).await;
        let closed = open.close().await.map_err(|error| explain(self.location, error));
        let read = read?;
        closed?;
        Ok(Some(read))
    }

    async fn read(&mut self, open: &OpenStore) -> Result<Vec<Kv>, Stop> {
        let location = self.location;
        let found = identity(location, open).await?;
        if self.about.get_or_insert_with(|| found.clone()).id != found.id {
            return Err(Failure::new(format!("{location} was replaced by another store meanwhile"))
                .hint("try again")
                .into());
        }
        let (began, mut bytes, mut kvs) = (Instant::now(), 0, Vec::new());
        while !self.pages.is_over() {
            let page = self.pages.next(open, self.at).await.map_err(|error| match error.kind() {
                ErrorKind::Compacted { .. } => Stop::Overtaken,
                _ => Stop::Failed(explain(location, error)),
            })?;
            self.at = page.at;
            bytes += page.kvs.iter().map(Kv::size).sum::<usize>();
            kvs.extend(page.kvs);
            let over = bytes >= TURN_BYTES
                || (kvs.len() >= TURN_KEYS && !matches!(location, Location::Sled(_)))
                || (began.elapsed() >= TURN && somebody_waits(location).await?);
            if over {
                break;
            }
        }
        Ok(kvs)
    }
}

/// Ranges that are read page by page.
pub(crate) struct Pages {
    /// The ranges that remain to be read, the next one last.
    rest: Vec<Range>,
    /// The range of a cluster that was begun.
    begun: Option<kv::Pages>,
}

/// Some keys.
pub(crate) struct Page {
    /// The revision at which they were so.
    pub(crate) at: Revision,
    /// They themselves, ascending.
    pub(crate) kvs: Vec<Kv>,
}

impl Pages {
    /// These ranges, which ascend.
    pub(crate) fn of(mut ranges: Vec<Range>) -> Self {
        ranges.reverse();
        Self { rest: ranges, begun: None }
    }

    /// True if there is nothing left to read.
    pub(crate) fn is_over(&self) -> bool {
        self.rest.is_empty() && self.begun.is_none()
    }

    /// Reads the next page, as it was at a revision, or is now if that is unset.
    pub(crate) async fn next(&mut self, open: &OpenStore, at: Revision) -> kv::Result<Page> {
        if let Some(store) = open.embedded() {
            let Some(range) = self.rest.pop() else { return Ok(Page { at, kvs: Vec::new() }) };
            // A page of the engine's own: to count what is left of a range, as the contract has it, takes long.
            let (first, end) = range.bounds();
            let page = store.page(first, at, PAGE_BYTES).await?;
            let is_before_end = |key: &Key| end.as_ref().is_none_or(|end| key < end);
            let mut kvs = page.kvs;
            kvs.truncate(kvs.partition_point(|kv| is_before_end(&kv.key)));
            self.rest.extend(page.next.filter(is_before_end).map(|next| range.rest(next)));
            return Ok(Page { at: page.at, kvs });
        }
        let begun = self.begun.take().or_else(|| self.rest.pop().map(|range| cluster_pages(range, at)));
        let Some(mut pages) = begun else { return Ok(Page { at, kvs: Vec::new() }) };
        let kvs = pages.next(&*open.store()).await?.unwrap_or_default();
        let at = pages.revision();
        self.begun = Some(pages).filter(|pages| !pages.is_over());
        Ok(Page { at, kvs })
    }
}

fn cluster_pages(range: Range, at: Revision) -> kv::Pages {
    kv::Pages::new(range, at).with_page_bytes(CLUSTER_PAGE_BYTES)
}

/// The engine and the id of a store.
pub(crate) async fn identity(location: &Location, open: &OpenStore) -> Result<Identity> {
    if let Some(etcd) = open.etcd() {
        let about = etcd.about().await.map_err(|error| explain(location, error))?;
        return Ok(Identity { engine: "etcd", id: format!("{:x}", about.cluster), leases: None });
    }
    let engine = if matches!(location, Location::Redb(_)) { "redb" } else { "sled" };
    let Some(store) = open.embedded() else { return Ok(Identity { engine, id: String::new(), leases: None }) };
    let leases = if store.has_leases() { Some(store.leases().await) } else { None };
    let leases = leases.transpose().map_err(|error| explain(location, error))?;
    Ok(Identity { engine, id: store.id().to_string(), leases })
}

/// Does what blocks where that is no harm.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(Failure::new(error)))
}
