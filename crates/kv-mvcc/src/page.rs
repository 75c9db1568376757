//! Reading all of one revision, a part at a time.
//!
//! A range says how many keys there are beyond its limit, and so looks at all of them each time. A caller that reads a
//! whole store in parts wants the parts only, and none larger than its memory.

use std::ops::ControlFlow;

use kv::{Key, Kv, Operation, Range, Result, Revision};

use crate::entries::{Entries, with_values};
use crate::error::revision;
use crate::store::MvccStore;

/// How many keys a part has at most.
const MAX_KEYS: usize = 4096;

/// A part of a store at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The revision.
    pub at: Revision,
    /// The keys, ascending.
    pub kvs: Vec<Kv>,
    /// Where to go on; `None` at the end.
    pub next: Option<Key>,
}

impl MvccStore {
    /// Reads the keys at or after `from` as they were at revision `at` (below 1: the latest), until there are `bytes` of
    /// keys and values; at least one key if there is one.
    ///
    /// # Errors
    /// `Compacted` and `FutureRevision`, as for any read; those of the table.
    pub async fn page(&self, from: Key, at: Revision, bytes: usize) -> Result<Page> {
        self.inner()
            .blocking(Operation::Range, move |inner, table| {
                inner.pinned(table, at, &Range::From(from.clone()), |pinned| {
                    let (mut found, mut size, mut next) = (Vec::new(), 0, None);
                    pinned.each(from.as_bytes(), None, &mut |key, pointer| {
                        if size >= bytes || found.len() >= MAX_KEYS {
                            next = Some(Key::from(key));
                            return ControlFlow::Break(());
                        }
                        size += key.len() + pointer.len as usize;
                        found.push((Key::from(key), pointer));
                        ControlFlow::Continue(())
                    })?;
                    let kvs = with_values(pinned, found)?;
                    Ok(Page { at: revision(pinned.at()), kvs, next })
                })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use kv::{ErrorKind, Store, StoreExt};

    use super::*;
    use crate::memory;

    async fn all(store: &MvccStore, at: Revision, bytes: usize) -> Result<(Vec<Kv>, usize)> {
        let (mut from, mut kvs, mut pages) = (Some(Key::from("")), Vec::new(), 0);
        while let Some(key) = from {
            let page = store.page(key, at, bytes).await?;
            assert_eq!(page.at, at);
            kvs.extend(page.kvs);
            (from, pages) = (page.next, pages + 1);
        }
        Ok((kvs, pages))
    }

    #[tokio::test]
    async fn the_parts_are_the_whole_of_one_revision() {
        let store = memory();
        for number in 0..100 {
            store.put(format!("k{number:03}"), vec![7; number]).await.unwrap();
        }
        let at = store.range(kv::RangeRequest::new(Range::All)).await.unwrap().revision;
        let then = store.list_at(Range::All, at, kv::Content::Full).await.unwrap().kvs;
        for (bytes, pages) in [(1, 100), (1000, 6), (usize::MAX, 1)] {
            assert_eq!(all(&store, at, bytes).await.unwrap(), (then.clone(), pages));
            // Later changes are not seen.
            store.put("k050", "other").await.unwrap();
            store.delete(Range::key("k099")).await.unwrap();
            store.put(format!("k0{bytes}x"), "new").await.unwrap();
        }
        assert_eq!(store.page("k".into(), Revision::UNSET, 1).await.unwrap().kvs.len(), 1);
        store.compact(at.next()).await.unwrap();
        assert!(matches!(all(&store, at, 1).await.unwrap_err().kind(), ErrorKind::Compacted { .. }));
    }
}
