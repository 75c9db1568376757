//! Reads of keys as they are now, newer than the attempt's revision: hints for a search.

use super::Transaction;
use crate::error::Result;
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
        let found = self.ask_now(keys, content).await?;
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

    /// True if the commit relies on a key as it was before a peek found it. The guards need not notice: a key that is absent
    /// at `at` and at the commit may have been there for the peek.
    pub(super) fn is_older_than_a_peek(&self) -> bool {
        self.newer.iter().any(|(key, seen)| self.guards.get(key).is_some_and(|guard| guard != seen))
    }

    /// Keys as they are now, each with the revision of the answer: as many in one request as one can ask for.
    async fn ask_now(&mut self, keys: &[Key], content: Content) -> Result<Vec<(Option<Kv>, Revision)>> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MAX_TXN_OPS) {
            let ops = keys.iter().map(|key| Op::Range(TxnRange::new(Range::Key(key.clone())).with_content(content)));
            let answer = self.ask_txn(Txn::new().with_success(ops)).await?;
            found.extend(answer.results.into_iter().map(|result| match result {
                OpResult::Range(found) => (found.kvs.into_iter().next(), answer.revision),
                _ => (None, answer.revision),
            }));
        }
        Ok(found)
    }
}
