//! Reads of keys as they are now, newer than the attempt's revision: hints for a search.

use std::slice;

use super::Transaction;
use super::transaction::MAX_CREATION_GUARDED;
use crate::error::{ErrorKind, Result};
use crate::key::{Key, Range, Revision};
use crate::request::{Content, Op, Txn, TxnRange};
use crate::response::{Kv, OpResult};
use crate::validate::MAX_TXN_OPS;

impl Transaction {
    /// Many keys in one request, as they are now, in the order of `keys`; `None` for those that are absent. A hint: it is
    /// newer than the attempt's revision, guards nothing, is not kept and does not see what this transaction writes.
    ///
    /// [`get`](Self::get) the key that matters. It usually reads nothing if the key was found absent here, and the attempt
    /// starts anew if the key was found here as written after the attempt's revision.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn peek(&mut self, keys: &[Key], content: Content) -> Result<Vec<Option<Kv>>> {
        self.peek_with(keys, content, &[]).await
    }

    /// Like [`peek`](Self::peek), and reads the keys of ranges along with the rest, so that
    /// [`peek_ranges`](Self::peek_ranges) knows them.
    ///
    /// # Errors
    /// Any store error.
    pub async fn peek_with(&mut self, keys: &[Key], content: Content, ranges: &[Range]) -> Result<Vec<Option<Kv>>> {
        let found = self.ask_now(keys, content, ranges).await?;
        for (key, (kv, at)) in keys.iter().zip(&found) {
            match kv {
                None => drop(self.absent.insert(key.clone(), *at)),
                Some(kv) => {
                    self.absent.remove(key);
                    if kv.mod_revision > self.at {
                        self.newer.insert(key.clone(), kv.mod_revision);
                    }
                }
            }
        }
        Ok(found.into_iter().map(|(kv, _)| kv).collect())
    }

    /// The keys of ranges, without values, in the order of `ranges`: as of the attempt's revision where they were
    /// prefetched, else as they are now, which takes one request for all. Guards nothing, and does not see what this
    /// transaction writes.
    ///
    /// # Errors
    /// Any store error.
    pub async fn peek_ranges(&mut self, ranges: &[Range]) -> Result<Vec<Vec<Key>>> {
        let unread: Vec<Range> = ranges.iter().filter(|range| self.keys_in(range).is_none()).cloned().collect();
        if !unread.is_empty() {
            self.ask_now(&[], Content::KeysOnly, &unread).await?;
        }
        Ok(ranges.iter().map(|range| self.keys_in(range).map(|(keys, _)| keys).unwrap_or_default()).collect())
    }

    /// The keys of a range, without values. The commit will fail if a key is created in the range after they were read, so
    /// that it knows every key that is there; writes to those keys and deletions do no harm. Reads as
    /// [`peek_ranges`](Self::peek_ranges) does.
    ///
    /// # Errors
    /// `ReadSetTooLarge` if the range has more than 4,096 keys; any store error.
    pub async fn guard_creation(&mut self, range: &Range) -> Result<Vec<Key>> {
        let keys = self.peek_ranges(slice::from_ref(range)).await?.pop().unwrap_or_default();
        if keys.len() > MAX_CREATION_GUARDED {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards: keys.len() }));
        }
        let read_at = self.keys_in(range).map_or(self.at, |(_, at)| at);
        self.creation_guards.entry(range.clone()).or_insert(read_at);
        Ok(keys)
    }

    /// The keys of a range and the revision at which they were read, if it or a range around it was.
    fn keys_in(&self, range: &Range) -> Option<(Vec<Key>, Revision)> {
        if let Some(keys) = self.keys.get(range) {
            return Some((keys.clone(), self.at));
        }
        let peeked = self.peeked_ranges.iter().map(|(read, (keys, at))| (read, keys, *at));
        let mut known = peeked.chain(self.keys.iter().map(|(read, keys)| (read, keys, self.at)));
        let (_, keys, at) = known.find(|(read, ..)| read.covers(range))?;
        Some((keys.iter().filter(|key| range.contains(key.as_bytes())).cloned().collect(), at))
    }

    /// True if the commit relies on a key as it was before a peek found it. The guards need not notice: a key that is absent
    /// at `at` and at the commit may have been there for the peek.
    pub(super) fn is_older_than_a_peek(&self) -> bool {
        self.newer.iter().any(|(key, seen)| self.guards.get(key).is_some_and(|guard| guard != seen))
    }

    /// Keys as they are now, each with the revision of the answer, and the keys of ranges: as many in one request as one can
    /// ask for.
    async fn ask_now(
        &mut self,
        keys: &[Key],
        content: Content,
        ranges: &[Range],
    ) -> Result<Vec<(Option<Kv>, Revision)>> {
        let single = keys.iter().map(|key| TxnRange::new(Range::Key(key.clone())).with_content(content));
        let several = ranges.iter().cloned().map(TxnRange::keys_of);
        let reads: Vec<TxnRange> = single.chain(several).collect();
        let mut answers = Vec::with_capacity(reads.len());
        for reads in reads.chunks(MAX_TXN_OPS) {
            let answer = self.ask_txn(Txn::new().with_success(reads.iter().cloned().map(Op::Range))).await?;
            answers.extend(answer.results.into_iter().map(|result| match result {
                OpResult::Range(found) => (found.kvs, answer.revision),
                _ => (Vec::new(), answer.revision),
            }));
        }
        for (range, (kvs, at)) in ranges.iter().zip(answers.split_off(keys.len().min(answers.len()))) {
            let keys = kvs.into_iter().map(|kv| kv.key).collect();
            self.peeked_ranges.insert(range.clone(), (keys, at));
        }
        Ok(answers.into_iter().map(|(kvs, at)| (kvs.into_iter().next(), at)).collect())
    }
}
