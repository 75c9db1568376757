//! Provides the reads and writes for the body of a transaction. A peek reads keys at the latest revision, which is
//! newer than the attempt's revision, and returns them as hints.

use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;

use futures::future::try_join_all;

use super::{Deadline, pause};
use crate::error::{Error, ErrorKind, InvalidArgument, Operation, Result};
use crate::key::{Key, Range, Revision, Value};
use crate::request::{Content, Kv, Op, OpResult, RangeRequest, RangeResponse, Txn, TxnRange, TxnResponse};
use crate::store::{Store, StoreExt};
use crate::validate::MAX_TXN_OPS;

/// Maximum number of keys in a range that a transaction guards against all changes. The size is limited because each
/// etcd member checks every key of a guarded range when it applies the commit.
pub const MAX_GUARDED_KEYS: usize = 64;
/// Maximum number of keys in a range that a transaction guards only against the creation of keys.
/// `MAX_CREATION_GUARDED_KEYS` is higher than [`MAX_GUARDED_KEYS`] because guards against creation are rare.
pub const MAX_CREATION_GUARDED_KEYS: usize = 4096;

/// One attempt of a [`transact!`](crate::transact!) call.
///
/// The first answer of the store fixes the revision at which an attempt reads. All later reads of an attempt, except
/// for peeks, are at the attempt's revision.
///
/// | Method | The commit fails if | Round trips | Sees own writes |
/// |---|---|---|---|
/// | [`get`](Self::get) | the key has changed | 1, none if the key was read or prefetched | yes |
/// | [`list`](Self::list) | a key of the range is created or changed | 1, none if the range was read | yes |
/// | [`snapshot_get`](Self::snapshot_get) | never | as `get` | yes |
/// | [`snapshot_list`](Self::snapshot_list) | never | as `list` | yes |
/// | [`snapshot_keys`](Self::snapshot_keys) | never | as `list`; no values | no |
/// | [`snapshot_is_empty`](Self::snapshot_is_empty) | never | 1 | no |
/// | [`peek`](Self::peek) | a key that [`get`](Self::get) then reads differs from what the peek saw | 1; reads the latest revision | no |
/// | [`peek_ranges`](Self::peek_ranges) | never | 1, none if all ranges were read; reads the latest revision; no values | no |
/// | [`guard_creation`](Self::guard_creation) | a key is created in the range | as `peek_ranges` | no |
/// | [`prefetch`](Self::prefetch) | never | 1 for everything | no |
/// | [`put`](Self::put), [`delete`](Self::delete) | the key, which must be guarded, has changed | none before the commit | |
/// | [`times_overtaken`](Self::times_overtaken), [`revision`](Self::revision), [`written_at`](Self::written_at), [`forget_writes`](Self::forget_writes) | | none | |
///
/// A body that reads without a guard must stay correct if the keys change before the commit.
#[derive(Debug)]
pub struct Transaction {
    pub(super) store: Arc<dyn Store>,
    pub(super) deadline: Deadline,
    /// Number of earlier commits of the `transact!` call that failed because another writer was quicker.
    pub(super) overtaken: u32,
    /// The revision at which the attempt reads; unset until the store's first answer.
    pub(super) at: Revision,
    /// The keys that the attempt has read, with their state at revision `at`; `None` for an absent key.
    seen: BTreeMap<Key, Option<Kv>>,
    /// Ranges that the attempt read completely: all their keys are in `seen`.
    listed: Vec<Range>,
    /// The keys in ranges that the attempt read without values.
    pub(super) keys: BTreeMap<Range, Vec<Key>>,
    /// For each range that a peek read, the keys that the range contained, and the revision of the peek.
    peeked_ranges: BTreeMap<Range, (Vec<Key>, Revision)>,
    /// Keys that were absent in a peek, with the revision of the peek.
    pub(super) absent: BTreeMap<Key, Revision>,
    /// Keys that a peek found to be written after revision `at`, with their mod revisions.
    pub(super) newer: BTreeMap<Key, Revision>,
    /// Keys that were absent in a peek and must be absent at the commit, with the revision of the peek.
    pub(super) presumed: BTreeMap<Key, Revision>,
    /// Keys that must not have changed when the attempt commits, with their mod revisions; unset for absent keys.
    pub(super) guards: BTreeMap<Key, Revision>,
    /// Ranges in which no key may be created or changed before the attempt commits.
    pub(super) guarded_ranges: Vec<Range>,
    /// Ranges in which no key may be created between the given revision and the attempt's commit.
    pub(super) creation_guards: BTreeMap<Range, Revision>,
    /// The keys that the commit writes, with their values; `None` deletes the key.
    pub(super) writes: BTreeMap<Key, Option<Value>>,
    /// Keys that the first request of the attempt prefetches, together with the first keys that the body reads.
    extra_reads: Vec<Key>,
    stale: bool,
    /// Says whether the attempt may rely on a peek: false if an earlier attempt that relied on a peek ended without
    /// sending a commit.
    pub(super) may_rely_on_peek: bool,
    /// True once the attempt treated a key as absent only because a peek, which reads a newer revision, did not find
    /// it.
    pub(super) relied_on_peek: bool,
}

impl Transaction {
    pub(super) fn new(store: Arc<dyn Store>, deadline: Deadline) -> Self {
        Self {
            store,
            deadline,
            overtaken: 0,
            at: Revision::UNSET,
            seen: BTreeMap::new(),
            listed: Vec::new(),
            keys: BTreeMap::new(),
            peeked_ranges: BTreeMap::new(),
            absent: BTreeMap::new(),
            newer: BTreeMap::new(),
            presumed: BTreeMap::new(),
            guards: BTreeMap::new(),
            guarded_ranges: Vec::new(),
            creation_guards: BTreeMap::new(),
            writes: BTreeMap::new(),
            extra_reads: Vec::new(),
            stale: false,
            may_rely_on_peek: true,
            relied_on_peek: false,
        }
    }

    pub(super) fn with_extra_reads(mut self, keys: Vec<Key>) -> Self {
        self.extra_reads = keys;
        self
    }

    /// Number of earlier attempts of the same [`transact!`](crate::transact!) call that could not be committed because
    /// another writer was quicker. If many writers make the same choice, all but one fail; a body can use this number to
    /// choose differently from the others the next time.
    pub fn times_overtaken(&self) -> u32 {
        self.overtaken
    }

    /// The revision at which this attempt reads; unset before its first read.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// Returns true if the attempt's revision was compacted: in this case the transaction needs another attempt.
    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }

    /// Reads keys and key ranges in one round trip; later reads of these keys and ranges then need no request to the
    /// store. `prefetch` guards none of the keys that it reads. If a range was prefetched with [`Content::KeysOnly`],
    /// only [`snapshot_keys`](Self::snapshot_keys) needs no further request for this range. `prefetch` does not read a
    /// range with [`Content::CountOnly`], because no later read uses a count. `prefetch` ignores the limits on the
    /// number of keys in a range.
    ///
    /// # Errors
    /// Any store error.
    pub async fn prefetch(&mut self, keys: Vec<Key>, ranges: Vec<TxnRange>) -> Result<()> {
        let keys = keys.into_iter().filter(|key| !self.knows(key)).map(|key| (Range::Key(key), Content::Full));
        let mut wanted: Vec<_> = keys.collect();
        let unread = ranges.into_iter().filter(|read| match read.content {
            Content::Full => !self.listed.contains(&read.range),
            Content::KeysOnly => !self.keys.contains_key(&read.range),
            Content::CountOnly => false,
        });
        wanted.extend(unread.map(|read| (read.range, read.content)));
        wanted.sort();
        wanted.dedup();
        self.fetch(wanted).await
    }

    /// Reads one key; the commit fails if the key changes after the attempt's revision.
    ///
    /// If a [`peek`](Self::peek) found the key absent, `get` returns `None` without a request. If `get` relied on a
    /// peek, the commit fails if the key exists when the commit is applied. An attempt that relied on a peek and ended
    /// without a commit is discarded, because the peek is newer than the attempt's revision. After an attempt that was
    /// discarded because of a peek, the next attempt reads the key from the store.
    ///
    /// # Errors
    /// Any store error.
    pub async fn get(&mut self, key: &Key) -> Result<Option<Value>> {
        if let Some(peeked_at) = self.absent.get(key)
            && self.may_rely_on_peek
            && !self.knows(key)
            && !self.writes.contains_key(key)
        {
            self.presumed.insert(key.clone(), *peeked_at);
            self.guards.insert(key.clone(), Revision::UNSET);
            self.relied_on_peek = true;
            return Ok(None);
        }
        let value = self.snapshot_get(key).await?;
        self.guard(key);
        Ok(value)
    }

    /// Reads all keys of a range, in ascending order. After `list`, the commit fails if a key in the range was created
    /// or changed since the attempt's revision. The commit succeeds even if another client has deleted a listed key, so
    /// use `list` only where outdated entries do no harm. The guard of `list` is one compare for the range, whatever
    /// the number of its keys.
    ///
    /// # Errors
    /// An error of the kind `ReadSetTooLarge` if the range has more than 64 keys, or any store error.
    pub async fn list(&mut self, range: &Range) -> Result<Vec<(Key, Value)>> {
        self.load(range).await?;
        let known = self.known(range);
        if known.len() > MAX_GUARDED_KEYS {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards: known.len() }));
        }
        self.guard_range(range);
        Ok(known)
    }

    /// Reads the keys of a range without values and without a guard, in ascending order. The result of `snapshot_keys`
    /// does not show the transaction's own writes.
    ///
    /// # Errors
    /// Any store error.
    pub async fn snapshot_keys(&mut self, range: &Range) -> Result<Vec<Key>> {
        if let Some(keys) = self.keys.get(range) {
            return Ok(keys.clone());
        }
        let at = self.at;
        let mut attempt = 0;
        let listing = loop {
            match self.store.list_at(range.clone(), at, Content::KeysOnly).await {
                Ok(listing) => break listing,
                Err(error) => self.pause_after(&mut attempt, error).await?,
            }
        };
        if !self.at.is_set() {
            self.at = listing.revision;
        }
        Ok(listing.kvs.into_iter().map(|kv| kv.key).collect())
    }

    /// Returns true if a key range contains no key; reads no values and adds no guard.
    ///
    /// # Errors
    /// Any store error.
    pub async fn snapshot_is_empty(&mut self, range: &Range) -> Result<bool> {
        let request = RangeRequest::new(range.clone()).with_at(self.at).with_limit(1).with_content(Content::KeysOnly);
        let answers = self.send_ranges(vec![request]).await?;
        if let (false, Some(answer)) = (self.at.is_set(), answers.first()) {
            self.at = answer.revision;
        }
        Ok(answers.iter().all(|answer| answer.kvs.is_empty()))
    }

    /// The revision at which a key was last written; `None` if the key is absent or was not read.
    pub fn written_at(&self, key: &Key) -> Option<Revision> {
        self.seen.get(key)?.as_ref().map(|kv| kv.mod_revision)
    }

    /// Reads one key without adding a guard.
    ///
    /// # Errors
    /// Any store error.
    pub async fn snapshot_get(&mut self, key: &Key) -> Result<Option<Value>> {
        if let Some(written) = self.writes.get(key) {
            return Ok(written.clone());
        }
        if !self.knows(key) {
            self.fetch(vec![(Range::Key(key.clone()), Content::Full)]).await?;
        }
        Ok(self.seen.get(key).and_then(|kv| kv.as_ref().map(|kv| kv.value.clone())))
    }

    /// Reads all keys of a range, in ascending order, without adding a guard.
    ///
    /// # Errors
    /// Any store error.
    pub async fn snapshot_list(&mut self, range: &Range) -> Result<Vec<(Key, Value)>> {
        self.load(range).await?;
        Ok(self.known(range))
    }

    /// Writes a key when the transaction commits; the transaction body must have read the key with [`get`](Self::get)
    /// before.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument` if the transaction has no guard on the key. Without a guard on the
    /// written key, `transact!` could not find out the outcome of an unanswered commit.
    pub fn put(&mut self, key: &Key, value: impl Into<Value>) -> Result<()> {
        self.write(key, Some(value.into()))
    }

    /// Deletes a key when the transaction commits; the transaction body must have read the key with [`get`](Self::get)
    /// before.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument` if the transaction has no guard on the key.
    pub fn delete(&mut self, key: &Key) -> Result<()> {
        self.write(key, None)
    }

    pub(super) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Drops all writes of the attempt and returns their keys, for callers that only need the result of the transaction
    /// body.
    pub fn forget_writes(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.writes).into_keys().collect()
    }

    fn guard(&mut self, key: &Key) {
        let revision = match self.seen.get(key) {
            Some(Some(kv)) => kv.mod_revision,
            _ => Revision::UNSET,
        };
        self.guards.insert(key.clone(), revision);
    }

    fn guard_range(&mut self, range: &Range) {
        if !self.guarded_ranges.contains(range) {
            self.guarded_ranges.push(range.clone());
        }
    }

    fn write(&mut self, key: &Key, value: Option<Value>) -> Result<()> {
        if !self.guards.contains_key(key) {
            return Err(self.error(InvalidArgument::UnguardedWrite(key.clone()).into()));
        }
        self.writes.insert(key.clone(), value);
        Ok(())
    }

    /// Returns true if the attempt has already read the key, or a range that contains it, so that no request is needed.
    fn knows(&self, key: &Key) -> bool {
        self.seen.contains_key(key)
            || self.listed.iter().any(|range| range.contains(key.as_bytes()))
            || self.keys.iter().any(|(range, keys)| range.contains(key.as_bytes()) && keys.binary_search(key).is_err())
    }

    /// Reads a range into `seen`, unless it was read before.
    async fn load(&mut self, range: &Range) -> Result<()> {
        let known = match range {
            Range::Key(key) => self.knows(key),
            _ => self.listed.contains(range),
        };
        if known { Ok(()) } else { self.fetch(vec![(range.clone(), Content::Full)]).await }
    }

    /// The keys of the range as this transaction sees them: the keys that were read, overlaid with the transaction's
    /// own writes.
    fn known(&self, range: &Range) -> Vec<(Key, Value)> {
        let (from, to) = range.bounds();
        let mut present: BTreeMap<&Key, &Value> = span(&self.seen, &from, to.as_ref())
            .filter_map(|(key, kv)| kv.as_ref().map(|kv| (key, &kv.value)))
            .collect();
        for (key, value) in span(&self.writes, &from, to.as_ref()) {
            match value {
                Some(value) => present.insert(key, value),
                None => present.remove(key),
            };
        }
        present.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Reads ranges; in the first call of an attempt, one transaction reads all of them and fixes the attempt's
    /// revision. Later calls of `fetch` in the same attempt read at this revision.
    async fn fetch(&mut self, mut ranges: Vec<(Range, Content)>) -> Result<()> {
        if ranges.is_empty() {
            return Ok(());
        }
        if !self.at.is_set() {
            let extra_reads = self.extra_reads.iter().map(|key| (Range::Key(key.clone()), Content::Full));
            let extra_reads: Vec<_> = extra_reads.filter(|read| !ranges.contains(read)).collect();
            ranges.splice(0..0, extra_reads);
            let later = ranges.split_off(ranges.len().min(MAX_TXN_OPS));
            let reads = ranges.iter().cloned().map(|(range, content)| TxnRange::new(range).with_content(content));
            let answer = self.send_txn(Txn::new().with_success(reads.map(Op::Range))).await?;
            self.at = answer.revision;
            for (range, result) in ranges.into_iter().zip(answer.results) {
                if let OpResult::Range(found) = result {
                    self.remember(range, found);
                }
            }
            ranges = later;
        }
        let reads = ranges.iter().cloned();
        let reads = reads.map(|(range, content)| RangeRequest::new(range).with_at(self.at).with_content(content));
        let answers = self.send_ranges(reads.collect()).await?;
        for (range, found) in ranges.into_iter().zip(answers) {
            self.remember(range, found);
        }
        Ok(())
    }

    fn remember(&mut self, (range, content): (Range, Content), found: RangeResponse) {
        if content == Content::KeysOnly {
            self.keys.insert(range, found.kvs.into_iter().map(|kv| kv.key).collect());
            return;
        }
        for kv in found.kvs {
            self.seen.insert(kv.key.clone(), Some(kv));
        }
        match range {
            Range::Key(key) => {
                self.seen.entry(key).or_insert(None);
            }
            range => self.listed.push(range),
        }
    }

    /// Sends a read-only transaction to the store, and repeats it after transient errors.
    async fn send_txn(&mut self, txn: Txn) -> Result<TxnResponse> {
        let mut attempt = 0;
        loop {
            match self.store.txn(txn.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => self.pause_after(&mut attempt, error).await?,
            }
        }
    }

    /// Sends several reads concurrently, and repeats all of them if one fails with a transient error.
    async fn send_ranges(&mut self, reads: Vec<RangeRequest>) -> Result<Vec<RangeResponse>> {
        let mut attempt = 0;
        loop {
            let asked: Vec<_> = reads.iter().map(|read| self.store.range(read.clone())).collect();
            match try_join_all(asked).await {
                Ok(answers) => return Ok(answers),
                Err(error) => self.pause_after(&mut attempt, error).await?,
            }
        }
    }

    /// Pauses before a failed read is repeated, or returns the read's error if it is not transient or if no time is
    /// left.
    async fn pause_after(&mut self, attempt: &mut u32, error: Error) -> Result<()> {
        if !error.kind().is_transient() || self.deadline.work_is_over() {
            self.stale |= matches!(error.kind(), ErrorKind::Compacted { .. });
            return Err(error);
        }
        *attempt += 1;
        pause(*attempt, self.deadline.remaining_for_work()).await;
        Ok(())
    }

    pub(super) fn error(&self, kind: ErrorKind) -> Error {
        Error::new(kind, Operation::Transact, "store")
    }
}

/// The entries of `map` whose keys are from `from` (inclusive) to `to` (exclusive).
fn span<'m, V>(map: &'m BTreeMap<Key, V>, from: &Key, to: Option<&Key>) -> impl Iterator<Item = (&'m Key, &'m V)> {
    let to = to.cloned();
    map.range(from.clone()..).take_while(move |(key, _)| to.as_ref().is_none_or(|to| *key < to))
}

impl Transaction {
    /// Reads keys at the latest revision in one request, and returns them in the order of `keys`; `None` for absent
    /// keys. The states that a peek returns are hints: they are newer than the attempt's revision, have no guard, and
    /// do not show the transaction's own writes.
    ///
    /// After a peek, the body must call [`get`](Self::get) for each key that its result depends on. If the peek found
    /// the key absent, `get` needs no request, unless an earlier attempt was discarded because of a peek. If the peek
    /// found that the key was written after the attempt's revision, the commit fails and the transaction body runs
    /// again.
    ///
    /// # Errors
    /// Any store error.
    pub async fn peek(&mut self, keys: &[Key], content: Content) -> Result<Vec<Option<Kv>>> {
        self.peek_with(keys, content, &[]).await
    }

    /// Like [`peek`](Self::peek), but its request also reads the keys in `ranges`; a later
    /// [`peek_ranges`](Self::peek_ranges) of these ranges needs no request.
    ///
    /// # Errors
    /// Any store error.
    pub async fn peek_with(&mut self, keys: &[Key], content: Content, ranges: &[Range]) -> Result<Vec<Option<Kv>>> {
        let found = self.read_newest(keys, content, ranges).await?;
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

    /// Reads the keys in ranges, without values, and returns them in the order of `ranges`. `peek_ranges` returns
    /// prefetched ranges as of the attempt's revision. `peek_ranges` reads ranges that were not prefetched at the
    /// latest revision, in one request. `peek_ranges` adds no guards, and its result does not show the transaction's
    /// own writes.
    ///
    /// # Errors
    /// Any store error.
    pub async fn peek_ranges(&mut self, ranges: &[Range]) -> Result<Vec<Vec<Key>>> {
        let unread: Vec<Range> = ranges.iter().filter(|range| self.keys_in(range).is_none()).cloned().collect();
        if !unread.is_empty() {
            self.read_newest(&[], Content::KeysOnly, &unread).await?;
        }
        Ok(ranges.iter().map(|range| self.keys_in(range).map(|(keys, _)| keys).unwrap_or_default()).collect())
    }

    /// Reads the keys in a range, without values, as [`peek_ranges`](Self::peek_ranges) does. The commit fails if a key
    /// was created in the range after the read, so the returned list of keys is still complete at the commit. Changes
    /// and deletions of the keys that `guard_creation` returned do not make the commit fail.
    ///
    /// # Errors
    /// An error of the kind `ReadSetTooLarge` if the range has more than 4,096 keys, or any store error.
    pub async fn guard_creation(&mut self, range: &Range) -> Result<Vec<Key>> {
        let keys = self.peek_ranges(slice::from_ref(range)).await?.pop().unwrap_or_default();
        if keys.len() > MAX_CREATION_GUARDED_KEYS {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards: keys.len() }));
        }
        let read_at = self.keys_in(range).map_or(self.at, |(_, at)| at);
        self.creation_guards.entry(range.clone()).or_insert(read_at);
        Ok(keys)
    }

    /// If the attempt has already read this range (or a range that contains it), returns the keys in this range and the
    /// revision at which they were read.
    fn keys_in(&self, range: &Range) -> Option<(Vec<Key>, Revision)> {
        if let Some(keys) = self.keys.get(range) {
            return Some((keys.clone(), self.at));
        }
        let peeked = self.peeked_ranges.iter().map(|(read, (keys, at))| (read, keys, *at));
        let mut known = peeked.chain(self.keys.iter().map(|(read, keys)| (read, keys, self.at)));
        let (_, keys, at) = known.find(|(read, ..)| read.covers(range))?;
        Some((keys.iter().filter(|key| range.contains(key.as_bytes())).cloned().collect(), at))
    }

    /// Returns true if a peek already shows that one of the attempt's guards cannot hold. Checking the guards at the
    /// commit is not enough: a key that is absent at revision `at` and at the commit may have existed at the peek.
    pub(super) fn is_older_than_a_peek(&self) -> bool {
        self.newer.iter().any(|(key, seen)| self.guards.get(key).is_some_and(|guard| guard != seen))
    }

    /// Reads keys, and the keys in ranges, at the latest revision, in as few requests as possible. Returns each key's
    /// state with the revision of the store's answer that contained it.
    async fn read_newest(
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
            let answer = self.send_txn(Txn::new().with_success(reads.iter().cloned().map(Op::Range))).await?;
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
