//! A range read in pages of bytes, not of keys.

use crate::error::Result;
use crate::key::{Range, Revision};
use crate::request::{Content, RangeRequest};
use crate::response::{Kv, RangeResponse};
use crate::store::Store;

/// How many bytes of keys and values a page should have.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page has at first: a single value can have more than a megabyte.
const FIRST: usize = 16;
/// The same without values: as many of the longest keys have about two megabytes.
const FIRST_KEYS: usize = 500;
/// How many times as many keys as the page before a page has at most: what comes next may be larger.
const GROWTH: usize = 8;
/// How many bytes a key and its value count at least, so that a page of small ones is no listing of everything.
const SMALLEST: usize = 64;

/// All of a range at one revision, about a megabyte at a time, for a caller that reads more than it can hold. The store may
/// be another one for each page, as long as it is the same data.
#[derive(Debug)]
pub struct Pages {
    range: Range,
    rest: Option<Range>,
    at: Revision,
    content: Content,
    bytes: usize,
    limit: usize,
    most: usize,
}

impl Pages {
    /// Of a range, at a revision (unset: the latest at the first page).
    pub fn new(range: Range, at: Revision) -> Self {
        let (content, bytes, limit, most) = (Content::Full, PAGE_BYTES, FIRST, usize::MAX);
        Self { rest: Some(range.clone()), range, at, content, bytes, limit, most }
    }

    /// With as much of each key as asked for.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self.limit = if content == Content::Full { FIRST } else { FIRST_KEYS };
        self
    }

    /// With this many keys to a page at the most.
    #[must_use]
    pub fn with_most_keys(mut self, keys: usize) -> Self {
        self.most = keys;
        self
    }

    /// With this many bytes of keys and values to a page, about: each page of a cluster costs it a walk through all keys
    /// that are left, and each page of an embedded store keeps others waiting.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// The revision; unset before the first page if none was given.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// True after the last page.
    pub fn is_over(&self) -> bool {
        self.rest.is_none()
    }

    /// The next keys, ascending; `None` after the last.
    ///
    /// # Errors
    /// Those of [`Store::range`]; `Compacted` if the history moved past the revision between two pages.
    pub async fn next<S: Store + ?Sized>(&mut self, store: &S) -> Result<Option<Vec<Kv>>> {
        Ok(self.next_answer(store).await?.map(|page| page.kvs))
    }

    /// The next page as the store answers it.
    pub(crate) async fn next_answer<S: Store + ?Sized>(&mut self, store: &S) -> Result<Option<RangeResponse>> {
        let Some(range) = &self.rest else { return Ok(None) };
        let limit = i64::try_from(self.limit.clamp(1, self.most.max(1))).unwrap_or(i64::MAX);
        let request = RangeRequest::new(range.clone()).with_at(self.at).with_limit(limit).with_content(self.content);
        let page = store.range(request).await?;
        if !self.at.is_set() {
            self.at = page.revision;
        }
        let bytes: usize = page.kvs.iter().map(Kv::size).sum();
        let each = (bytes / page.kvs.len().max(1)).max(SMALLEST);
        self.limit = (self.bytes / each).clamp(1, self.limit.saturating_mul(GROWTH));
        self.rest = page.kvs.last().filter(|_| page.more).map(|last| self.range.rest(last.key.successor()));
        Ok(Some(page))
    }
}
