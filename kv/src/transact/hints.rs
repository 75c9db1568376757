//! What an attempt learns of keys as they are now, which is newer than its revision: hints for a search.

use super::Transaction;
use crate::error::Result;
use crate::key::{Key, Range, Revision};
use crate::request::{Content, Op, Txn, TxnRange};
use crate::response::{Kv, OpResult};
use crate::validate::MAX_TXN_OPS;

impl Transaction {
    /// When each of these keys was last written, `None` for those that are absent: in one round trip that moves no values.
    /// A hint, newer than the attempt's revision: [`get`](Self::get) the one that matters before relying on it. That usually
    /// reads nothing if it was found absent here.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn probe(&mut self, keys: &[Key]) -> Result<Vec<Option<Revision>>> {
        let found = self.ask_now(keys, Content::KeysOnly).await?;
        for (key, (kv, at)) in keys.iter().zip(&found) {
            if kv.is_none() {
                self.probed.insert(key.clone(), *at);
            }
        }
        Ok(found.into_iter().map(|(kv, _)| kv.map(|kv| kv.mod_revision)).collect())
    }

    /// Many keys in one request, as they are now, without a guard, and without keeping what was read: for who looks through
    /// more than it can hold. In the order of `keys`; what this transaction writes is not seen. Like
    /// [`probe`](Self::probe) a hint: [`get`](Self::get) the one that matters, and the attempt starts anew if the look found a
    /// write that is newer than the revision of the attempt.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn look(&mut self, keys: &[Key]) -> Result<Vec<Option<Kv>>> {
        let found: Vec<_> = self.ask_now(keys, Content::Full).await?.into_iter().map(|(kv, _)| kv).collect();
        let newer = found.iter().flatten().filter(|kv| kv.mod_revision > self.at);
        self.looked.extend(newer.map(|kv| (kv.key.clone(), kv.mod_revision)));
        Ok(found)
    }

    /// True if the commit relies on a key as it was before a look found it. The guards need not notice: a key that is absent
    /// at `at` and at the commit may have been there for the look.
    pub(super) fn is_older_than_a_look(&self) -> bool {
        self.looked.iter().any(|(key, seen)| self.guards.get(key).is_some_and(|guard| guard != seen))
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
