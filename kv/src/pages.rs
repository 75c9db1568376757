//! A range read in pages of bytes, not of keys.

use crate::error::Result;
use crate::key::{Range, Revision};
use crate::request::{Content, RangeRequest};
use crate::response::Kv;
use crate::store::Store;

/// How many bytes of keys and values a page should have.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page has at first, and at most: a single value can have more than a megabyte.
const FIRST: i64 = 16;
const MOST: i64 = 1024;

/// All of a range at one revision, about a megabyte at a time: for who looks through more than it can hold. The store may
/// be another one for each page, as long as it is the same data.
#[derive(Debug)]
pub struct Pages {
    range: Range,
    rest: Option<Range>,
    at: Revision,
    content: Content,
    limit: i64,
}

impl Pages {
    /// Of a range, at a revision (unset: the latest at the first page).
    pub fn new(range: Range, at: Revision) -> Self {
        Self { rest: Some(range.clone()), range, at, content: Content::Full, limit: FIRST }
    }

    /// With as much of each key as asked for.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
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
    pub async fn next(&mut self, store: &dyn Store) -> Result<Option<Vec<Kv>>> {
        let Some(range) = &self.rest else { return Ok(None) };
        let request =
            RangeRequest::new(range.clone()).with_at(self.at).with_limit(self.limit).with_content(self.content);
        let page = store.range(request).await?;
        if !self.at.is_set() {
            self.at = page.revision;
        }
        let bytes: usize = page.kvs.iter().map(Kv::size).sum();
        self.limit = if bytes > PAGE_BYTES { self.limit / 2 } else { self.limit * 2 }.clamp(1, MOST);
        self.rest = page.kvs.last().filter(|_| page.more).map(|last| self.range.rest(last.key.successor()));
        Ok(Some(page.kvs))
    }
}
