//! Reading a store at one revision, in several openings, so that no plugin waits long: after 10 ms the reader closes
//! the store as soon as another process waits, and goes on at that revision when it has the store lock again.

use std::time::Instant;

use datastore::OpenStore;
use datastore::held::LEAST_HOLD;
use kv::{ErrorKind, Key, Kv, Lease, Range, Revision};

use super::Stop;
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

/// The number of bytes that one opening reads. They are in memory meanwhile.
const TURN_BYTES: usize = 16 << 20;
/// The number of bytes that a page should have: of an embedded store, and of a cluster.
const PAGE_BYTES: usize = 256 << 10;
const CLUSTER_PAGE_BYTES: usize = 8 << 20;

/// The reader of a part of a store at one revision, from its first key to its last.
pub(crate) struct Snapshot<'l> {
    store: StoreAt<'l>,
    /// The revision; unset before the first opening.
    at: Revision,
    about: Option<Identity>,
    pages: Pages,
}

/// The identity of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The engine.
    pub(crate) engine: &'static str,
    /// The store's id, or the cluster's.
    pub(crate) id: String,
    /// The leases of an embedded store whose format has them. A cluster's leases are its clients' and are not read.
    pub(crate) leases: Option<Vec<Lease>>,
}

impl<'l> Snapshot<'l> {
    /// A reader of these ranges, which ascend, at the newest revision.
    pub(crate) fn of(store: StoreAt<'l>, ranges: Vec<Range>) -> Self {
        Self { store, at: Revision::UNSET, about: None, pages: Pages::of(ranges) }
    }

    /// Reads at this revision instead, which may not be readable any more.
    pub(crate) fn at(mut self, revision: Revision) -> Self {
        self.at = revision;
        self
    }

    /// The store.
    pub(super) fn store(&self) -> StoreAt<'l> {
        self.store
    }

    /// The revision; unset before the first opening.
    pub(crate) fn revision(&self) -> Revision {
        self.at
    }

    /// The identity of the store; known after the first opening.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.about.as_ref()
    }

    /// True if there is nothing left to read.
    pub(crate) fn is_over(&self) -> bool {
        self.pages.is_over()
    }

    /// Opens the store, reads the next keys, ascending, and closes it. `None` after the last key.
    pub(crate) async fn batch(&mut self) -> Result<Option<Vec<Kv>>, Stop> {
        if self.is_over() {
            return Ok(None);
        }
        let store = self.store;
        let open = store.open_files(Need::Read).await?;
        store.and_close(open, async |open: &OpenStore| self.read(open).await).await.map(Some)
    }

    async fn read(&mut self, open: &OpenStore) -> Result<Vec<Kv>, Stop> {
        let store = self.store;
        let found = identity(store, open).await?;
        if self.about.get_or_insert_with(|| found.clone()).id != found.id {
            return Err(Failure::new(format!("{store} was replaced by another store meanwhile"))
                .hint("try again")
                .into());
        }
        let (began, mut bytes, mut kvs) = (Instant::now(), 0, Vec::new());
        while !self.pages.is_over() {
            let page = self.pages.next(open, self.at).await.map_err(|error| match error.kind() {
                ErrorKind::Compacted { .. } => Stop::Overtaken,
                _ => Stop::Failed(store.explain(error)),
            })?;
            self.at = page.at;
            bytes += page.kvs.iter().map(Kv::size).sum::<usize>();
            kvs.extend(page.kvs);
            let over = bytes >= TURN_BYTES
                || kvs.len() >= store.location.facts().keys_in_a_turn
                || (began.elapsed() >= LEAST_HOLD && store.somebody_waits().await?);
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
    /// The current range of a cluster.
    begun: Option<kv::Pages>,
}

/// Some keys.
pub(crate) struct Page {
    /// The revision at which they were read.
    pub(crate) at: Revision,
    /// The keys with their values, ascending.
    pub(crate) kvs: Vec<Kv>,
}

impl Pages {
    /// The pages of these ranges, which ascend.
    pub(crate) fn of(mut ranges: Vec<Range>) -> Self {
        ranges.reverse();
        Self { rest: ranges, begun: None }
    }

    /// True if there is nothing left to read.
    pub(crate) fn is_over(&self) -> bool {
        self.rest.is_empty() && self.begun.is_none()
    }

    /// Reads the next page at a revision, or at the newest one if that is unset.
    pub(crate) async fn next(&mut self, open: &OpenStore, at: Revision) -> kv::Result<Page> {
        if let Some(store) = open.embedded() {
            let Some(range) = self.rest.pop() else { return Ok(Page { at, kvs: Vec::new() }) };
            // A page of the engine's own: the contract's `range` also counts the keys that are left, which takes long.
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
pub(crate) async fn identity(at: StoreAt<'_>, open: &OpenStore) -> Result<Identity> {
    let engine = at.location.facts().name;
    if let Some(cluster) = open.cluster() {
        let about = cluster.about().await.map_err(|error| at.explain(error))?;
        return Ok(Identity { engine, id: format!("{:x}", about.cluster), leases: None });
    }
    let Some(store) = open.embedded() else {
        let id = open.served().map(|daemon| daemon.id().to_owned()).unwrap_or_default();
        return Ok(Identity { engine, id, leases: None });
    };
    let leases = if store.has_leases() { Some(store.leases().await) } else { None };
    let leases = leases.transpose().map_err(|error| at.explain(error))?;
    Ok(Identity { engine, id: store.id().to_string(), leases })
}
