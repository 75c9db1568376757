//! Fills a target store with the rows of a source. Each part of the source is compared with the target store before the
//! part is written, so that an interrupted run can be started again. A final comparison shows whether the source and
//! the target store are equal.

use std::fmt;

use datastore::{Create, Location, OpenStore, maintenance};
use futures::StreamExt;
use futures::future::try_join_all;
use ipam_operator::moving::{
    self, Change, DocumentCounts, ImportLock, compare, import_lock_key, ranges, ranges_between, ranges_to_be_empty,
    role_of,
};
use kv::{
    Compare, Content, ErrorKind, Key, Kv, MAX_TXN_OPS, Op, Range, RangeRequest, Revision, StoreExt, Txn, TxnResponse,
    Value,
};

use super::{
    BackupHeader, RangePages, Row, RowBatch, Sink, Source, StoreIdentity, TransferStop, group_by_size, read_identity,
    run_blocking, transfer_rows,
};
use crate::digest::Sha256;
use crate::error::{CommandFailure, CommandResult};
use crate::output::{KeyProgress, printable};
use crate::store::{StoreAccess, StoreUse};

/// Maximum number of keys that are written in one transaction. Each transaction guards the import lock, and may also
/// guard each key that it writes.
const MAX_TXN_KEYS: usize = MAX_TXN_OPS - 1;
/// When keys are removed, one range request lists enough keys for at most this number of transactions.
const MAX_TXNS_PER_REMOVAL: usize = 32;

/// Maximum number of parts of the target store that are read back in parallel. All keys and values of the parts that
/// are being read back are in memory at the same time.
const MAX_PARTS_AT_ONCE: usize = 4;

/// Whether the target store had keys in a part of the key space before the part was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FormerContents {
    Nothing,
    /// The target store had keys in the range to be written, or it is unknown whether it had any.
    #[default]
    Something,
}

/// A store that a command fills from a source or compares with a source. If the target store does not exist, it counts
/// as empty.
pub(crate) struct Target<'l> {
    at: StoreAccess<'l>,
    open: Option<OpenStore>,
    mark: Option<PlacedMark>,
}

/// The import lock in a store, with the revisions at which it was created and last written.
struct PlacedMark {
    mark: ImportLock,
    made: Revision,
    written: Revision,
}

impl<'l> Target<'l> {
    /// Opens a store as a target, and creates the store if necessary.
    pub(crate) async fn make(at: StoreAccess<'l>) -> CommandResult<Self> {
        Self::new(at, Some(at.open_files(StoreUse::Make).await?)).await
    }

    /// Opens an existing store as a target; a missing store counts as empty.
    pub(crate) async fn inspect(at: StoreAccess<'l>) -> CommandResult<Self> {
        let open = match datastore::open(at.location, &Create::Never.with_wait(at.wait)).await {
            Ok(open) => Some(open),
            Err(error) if *error.kind() == ErrorKind::Missing && at.location.path().is_some() => None,
            Err(error) => return Err(at.explain(error)),
        };
        Self::new(at, open).await
    }

    async fn new(at: StoreAccess<'l>, open: Option<OpenStore>) -> CommandResult<Self> {
        let mut target = Self { at, open, mark: None };
        let Some(store) = target.open.as_ref().map(OpenStore::store) else { return Ok(target) };
        let found = store.get(import_lock_key()).await.map_err(|error| at.explain(error))?;
        target.mark = found.map(|kv| decode_mark(at.location, &kv)).transpose()?;
        Ok(target)
    }

    pub(crate) fn mark(&self) -> Option<&ImportLock> {
        self.mark.as_ref().map(|marked| &marked.mark)
    }

    /// Returns the identity of the target store, or `None` if the store does not exist.
    pub(crate) async fn identity(&self) -> CommandResult<Option<StoreIdentity>> {
        match &self.open {
            Some(open) => read_identity(self.at, open).await.map(Some),
            None => Ok(None),
        }
    }

    /// Fails if the store has IPAM documents, or if it could not be created. Returns the revision at which the store
    /// was found to have no IPAM documents.
    pub(crate) async fn require_empty(&self) -> CommandResult<Revision> {
        let mut at = Revision::UNSET;
        let Some(open) = &self.open else {
            maintenance::check_creatable(self.at.location).await.map_err(|error| self.failed(error))?;
            return Ok(at);
        };
        for range in ranges_to_be_empty() {
            let request = RangeRequest::new(range).with_at(at).with_limit(1).with_content(Content::KeysOnly);
            let found = open.store().range(request).await.map_err(|error| self.failed(error))?;
            if let Some(kv) = found.kvs.first() {
                return Err(CommandFailure::new(format!("{} is not empty: it has {}", self.at, kv.key))
                    .hint("name a store that has no pools and no addresses; nothing was changed"));
            }
            if !at.is_set() {
                at = found.revision;
            }
        }
        Ok(at)
    }

    /// Writes the import lock into a store that has no IPAM documents.
    pub(crate) async fn begin(&mut self, mark: ImportLock) -> CommandResult<()> {
        let at = self.require_empty().await?;
        let empty = ranges_to_be_empty().into_iter().map(|range| Compare::nothing_newer(range, at));
        let txn = Txn::new()
            .with_compares([Compare::absent(import_lock_key())])
            .with_compares(empty)
            .with_success([Op::put(import_lock_key(), mark.encode())]);
        let made = self.txn(txn).await?.revision;
        self.mark = Some(PlacedMark { mark, made, written: made });
        Ok(())
    }

    /// Replaces the content of the store's import lock.
    pub(crate) async fn remark(&mut self, mark: ImportLock) -> CommandResult<()> {
        let txn = self.marked_txn()?.with_success([Op::put(import_lock_key(), mark.encode())]);
        let written = self.txn(txn).await?.revision;
        if let Some(marked) = &mut self.mark {
            (marked.mark, marked.written) = (mark, written);
        }
        Ok(())
    }

    /// Removes the store's import lock, so that plugins can use the store.
    pub(crate) async fn unmark(&mut self) -> CommandResult<()> {
        let txn = self.marked_txn()?.with_success([Op::delete(import_lock_key())]);
        self.txn(txn).await?;
        self.mark = None;
        Ok(())
    }

    /// Reads the keys in the given ranges in ascending order, except the key of the import lock.
    pub(super) async fn read(&self, ranges: Vec<Range>) -> CommandResult<Vec<Kv>> {
        let Some(open) = &self.open else { return Ok(Vec::new()) };
        let (mut pages, mut at, mut found) = (RangePages::of(ranges), Revision::UNSET, Vec::new());
        let mark = import_lock_key();
        while !pages.is_over() {
            let page = pages.next(open, at).await.map_err(|error| self.failed(error))?;
            at = page.at;
            found.extend(page.kvs.into_iter().filter(|kv| kv.key != mark));
        }
        Ok(found)
    }

    /// True if all parts of the target store in `parts` have the recorded checksums. The parts that a run recorded
    /// together cover all keys of the target store.
    async fn has_checksums(&mut self, parts: &[PartChecksum], progress: &KeyProgress) -> CommandResult<bool> {
        let mut keys = 0;
        for some in parts.chunks(MAX_PARTS_AT_ONCE) {
            for found in try_join_all(some.iter().map(|part| self.count_equal_keys(part))).await? {
                let Some(found) = found else { return Ok(false) };
                keys += found;
            }
            progress.at(keys);
            self.yield_store().await?;
        }
        Ok(true)
    }

    /// Returns the number of keys in a part of the target store, or `None` if the part's checksum differs from the
    /// recorded one.
    async fn count_equal_keys(&self, part: &PartChecksum) -> CommandResult<Option<u64>> {
        let kvs = self.read(ranges_between(&part.from, part.to.as_ref())).await?;
        let expected = part.sum.clone();
        run_blocking(move || Ok((DocumentsChecksum::of(&kvs) == expected).then_some(kvs.len() as u64))).await
    }

    /// Writes changes to one part of the target store, in ascending order of the keys. Each transaction fails if the
    /// import lock, or a key that the transaction writes, has changed since that key was read.
    async fn write(&self, changes: Vec<Change>, before: FormerContents) -> CommandResult<()> {
        let in_flight = self.at.location.facts().writes_in_flight;
        let size = |change: &Change| change.key.as_bytes().len() + change.value.as_ref().map_or(0, Value::len);
        let groups = group_by_size(changes, MAX_TXN_KEYS, size).into_iter();
        let txns: Vec<Txn> = groups.map(|group| self.build_txn(group, before)).collect::<CommandResult<_>>()?;
        let mut answers =
            futures::stream::iter(txns).map(|txn| async move { self.txn(txn).await }).buffer_unordered(in_flight);
        while let Some(answer) = answers.next().await {
            answer?;
        }
        Ok(())
    }

    /// Removes all keys that were written to the target store since it got the import lock, and returns the number of
    /// these keys.
    pub(crate) async fn remove_written_keys(&mut self) -> CommandResult<u64> {
        let made = self.mark.as_ref().map_or(Revision::UNSET, |marked| marked.made);
        let mut removed = 0;
        for range in ranges() {
            let mut from = range.bounds().0;
            loop {
                let changes = self.list_own_keys(range.rest(from), made).await?;
                let Some(last) = changes.1 else { break };
                removed += changes.0.len() as u64;
                self.write(changes.0, FormerContents::Something).await?;
                self.yield_store().await?;
                from = last.successor();
            }
        }
        Ok(removed)
    }

    /// Reads the first keys of a range, and returns deletions for those keys that were written after revision `since`.
    /// Returns also the last key that was read, or `None` if the range has no keys.
    async fn list_own_keys(&self, range: Range, since: Revision) -> CommandResult<(Vec<Change>, Option<Key>)> {
        let Some(open) = &self.open else { return Ok((Vec::new(), None)) };
        let most = i64::try_from(MAX_TXN_KEYS * MAX_TXNS_PER_REMOVAL).unwrap_or(i64::MAX);
        let request = RangeRequest::new(range).with_limit(most).with_content(Content::KeysOnly);
        let found = open.store().range(request).await.map_err(|error| self.failed(error))?;
        let last = found.kvs.last().map(|kv| kv.key.clone());
        let is_ours = |kv: &Kv| match role_of(&kv.key) {
            Some(moving::KeyRole::Books) => true,
            // A node document that was written more than once is kept: another process has probably registered the node
            // since the import lock was created.
            Some(moving::KeyRole::Around) => kv.create_revision > since && kv.version == 1,
            None => false,
        };
        let ours = found.kvs.into_iter().filter(is_ours);
        Ok((ours.map(|kv| Change { key: kv.key, value: None, was: kv.mod_revision }).collect(), last))
    }

    /// Closes an embedded store for a moment if another process waits for the store lock. Plugins that wait for the
    /// store lock then see the import lock and fail at once, not after their timeout.
    async fn yield_store(&mut self) -> CommandResult<()> {
        if self.open.as_ref().is_some_and(|open| open.embedded().is_some())
            && self.at.has_waiters().await?
            && let Some(open) = self.open.take()
        {
            open.close().await.map_err(|error| self.failed(error))?;
            self.open = Some(self.at.open_files(StoreUse::Write).await?);
        }
        Ok(())
    }

    pub(crate) async fn close(self) -> CommandResult<()> {
        match self.open {
            Some(open) => open.close().await.map_err(|error| self.at.explain(error)),
            None => Ok(()),
        }
    }

    fn build_txn(&self, batch: Vec<Change>, before: FormerContents) -> CommandResult<Txn> {
        let guards = guards(&batch, before);
        let ops = batch.into_iter().map(|change| match change.value {
            Some(value) => Op::put(change.key, value),
            None => Op::delete(change.key),
        });
        Ok(self.marked_txn()?.with_compares(guards).with_success(ops))
    }

    /// Returns an empty transaction with a guard that fails if the import lock has changed.
    fn marked_txn(&self) -> CommandResult<Txn> {
        let Some(marked) = &self.mark else {
            return Err(CommandFailure::new("internal error: the store is not marked"));
        };
        Ok(Txn::new().with_compares([Compare::unchanged(import_lock_key(), marked.written)]))
    }

    /// Runs a transaction on the target store, and fails if a guard of the transaction fails.
    async fn txn(&self, txn: Txn) -> CommandResult<TxnResponse> {
        let Some(open) = &self.open else {
            return Err(CommandFailure::new(format!("there is no store at {}", self.at)));
        };
        let answer = open.store().txn(txn).await.map_err(|error| self.failed(error))?;
        if !answer.succeeded {
            return Err(CommandFailure::new(format!("{} was changed by somebody else meanwhile", self.at))
                .hint("run the same command again to copy the rest"));
        }
        Ok(answer)
    }

    fn failed(&self, error: kv::Error) -> CommandFailure {
        self.at.explain(error)
    }
}

fn decode_mark(location: &Location, kv: &Kv) -> CommandResult<PlacedMark> {
    match ImportLock::decode(kv.value.as_bytes()) {
        Some(mark) => Ok(PlacedMark { mark, made: kv.create_revision, written: kv.mod_revision }),
        None => Err(CommandFailure::new(format!("the mark on {location} cannot be read"))
            .hint("use the margay version that started the import or migration")),
    }
}

/// Returns guards that fail if one of the keys in `batch` has changed since it was read.
fn guards(batch: &[Change], before: FormerContents) -> Vec<Compare> {
    if before == FormerContents::Nothing
        && let [first, .., last] = batch
    {
        // No other process writes IPAM documents to the target store, so each transaction needs only one guard: that
        // the key range it writes is still empty. A single guard for a range is cheaper than one guard for each key,
        // and saves etcd the lookup of leases. The guard requires that its range has no keys, so the range must not
        // contain the key of the import lock, which exists.
        let span = Range::FromTo(first.key.clone(), last.key.successor());
        let has_both = |range: &Range| [first, last].iter().all(|change| range.contains(change.key.as_bytes()));
        if ranges_to_be_empty().iter().any(has_both) && !span.contains(import_lock_key().as_bytes()) {
            return vec![Compare::all_absent(span)];
        }
    }
    batch.iter().map(|change| Compare::unchanged(change.key.clone(), change.was)).collect()
}

/// Maximum number of keys that an error message lists as different.
const MAX_NAMED_KEYS: usize = 10;

/// How the target store is changed where it differs from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FillMode {
    /// Keys that the target store lacks are written. The run fails if a key's values differ, or if the target store has
    /// a key that the source lacks.
    Fill,
    /// The target store is made equal to the source.
    Update,
    /// The target store is not changed; the source's documents and the differences are counted.
    DryRun,
    /// The target store is not changed. Only keys and differences are counted, because the documents were counted when
    /// they were written.
    Verify,
}

/// The result of comparing a source with a target store.
#[derive(Debug, Default)]
pub(crate) struct Differences {
    /// The number of documents in the source, by kind; with [`FillMode::Verify`], only the number of keys.
    pub(crate) tally: DocumentCounts,
    /// If the run wrote to the target store, the checksums of all parts of the target store after the run.
    sums: Vec<PartChecksum>,
    /// The number of keys that the target store lacked.
    pub(crate) missing: u64,
    /// The number of keys whose value in the target store differed from the value in the source.
    pub(crate) different: u64,
    /// The number of keys that are in the target store but not in the source.
    pub(crate) extra: u64,
    /// The number of the target store's own documents about the cluster, such as nodes, which are never changed.
    pub(crate) kept: u64,
    /// The first keys that differ between the source and the target store, each with the kind of difference.
    named: Vec<String>,
}

impl Differences {
    /// Reads the target store back, and returns true if its keys and values have not changed since the run that filled
    /// the store.
    pub(crate) async fn are_unchanged_in(&self, target: &mut Target<'_>) -> CommandResult<bool> {
        target.has_checksums(&self.sums, &KeyProgress::new("comparing", Some(self.tally.keys))).await
    }

    /// Fails if a key still differs although the target store was just filled; `at` names the target store in the
    /// error.
    pub(crate) fn require_none(&self, at: &impl fmt::Display, hint: &str) -> CommandResult<()> {
        if self.total() == 0 {
            return Ok(());
        }
        let keys = self.list_keys();
        Err(CommandFailure::new(format!("{at} was changed by somebody else meanwhile:{keys}")).hint(hint))
    }

    /// Returns the number of keys that differ between the source and the target store, or that differed before the run
    /// wrote them.
    pub(crate) fn total(&self) -> u64 {
        self.missing + self.different + self.extra
    }

    /// Lists the first keys that differ between the source and the target store, one key in each line.
    pub(crate) fn list_keys(&self) -> String {
        let more = self.total().saturating_sub(self.named.len() as u64);
        let mut list = self.named.iter().map(|line| format!("\n  {line}")).collect::<String>();
        if more > 0 {
            list.push_str(&format!("\n  and {more} more"));
        }
        list
    }

    fn count(&mut self, changes: &[Change]) {
        for change in changes {
            let (counter, word) = match (&change.value, change.was.is_set()) {
                (Some(_), false) => (&mut self.missing, "new"),
                (Some(_), true) => (&mut self.different, "changed"),
                (None, _) => (&mut self.extra, "gone"),
            };
            *counter += 1;
            if self.named.len() < MAX_NAMED_KEYS {
                let key = String::from_utf8_lossy(change.key.as_bytes()).into_owned();
                self.named.push(format!("{} ({word})", printable(&key)));
            }
        }
    }
}

/// Fills a target store from a source, or compares the target store with the source.
pub(crate) struct TargetFiller<'f, 'l> {
    target: &'f mut Target<'l>,
    work: FillMode,
    progress: KeyProgress,
    from: Key,
    /// The changes to the previous part of the target store, which are written while the next part is compared.
    pending: Option<(Vec<Change>, FormerContents)>,
    found: Differences,
}

impl<'f, 'l> TargetFiller<'f, 'l> {
    /// Compares the source with the target store, and changes the target store as the mode `work` says. `keys` is the
    /// number of keys in the source, if this number is known.
    ///
    /// # Errors
    /// With [`FillMode::Fill`], the target store has a key that the source lacks, or a value that differs from the
    /// source's; any store error.
    pub(crate) async fn run(
        source: &mut Source<'_>,
        target: &'f mut Target<'l>,
        work: FillMode,
        keys: Option<u64>,
    ) -> Result<Differences, TransferStop> {
        let what = match work {
            FillMode::Fill => "writing",
            FillMode::Update => "copying",
            FillMode::DryRun | FillMode::Verify => "comparing",
        };
        let mut filling = Self {
            target,
            work,
            progress: KeyProgress::new(what, keys),
            from: Key::default(),
            pending: None,
            found: Differences::default(),
        };
        transfer_rows(source, &mut filling).await?;
        Ok(filling.found)
    }
}

impl Sink for TargetFiller<'_, '_> {
    async fn begin(&mut self, _header: BackupHeader) -> CommandResult<()> {
        Ok(())
    }

    async fn take(&mut self, part: RowBatch) -> CommandResult<()> {
        let to = part.rows.last().filter(|_| !part.is_last).map(|row| row.key.successor());
        let (changes, before) = self.pending.take().unwrap_or_default();
        let target = &*self.target;
        // A part of the source ends at its last key. An empty part has none, so it is compared only if it is the last
        // part, which ends at the end of the key space.
        let compared = async {
            if to.is_none() && !part.is_last {
                return Ok(Default::default());
            }
            self.found.compare_part(target, part.rows, &self.from, to.as_ref(), self.work).await
        };
        let (compared, written) = futures::join!(compared, target.write(changes, before));
        written?;
        self.pending = Some(compared?);
        self.progress.at(self.found.tally.keys);
        if part.is_last {
            let (changes, before) = self.pending.take().unwrap_or_default();
            return self.target.write(changes, before).await;
        }
        self.from = to.unwrap_or(std::mem::take(&mut self.from));
        self.target.yield_store().await
    }
}

impl Differences {
    /// Compares a part of the source, from the key `from` to the key `to`, with the same part of the target store.
    /// Returns the changes to write, and whether the target store had keys in this part of the key space.
    async fn compare_part(
        &mut self,
        target: &Target<'_>,
        rows: Vec<Row>,
        from: &Key,
        to: Option<&Key>,
        work: FillMode,
    ) -> CommandResult<(Vec<Change>, FormerContents)> {
        let there = target.read(ranges_between(from, to)).await?;
        let before = if there.is_empty() { FormerContents::Nothing } else { FormerContents::Something };
        let (mut tally, mut sum, writes) = (
            std::mem::take(&mut self.tally),
            DocumentsChecksum::default(),
            matches!(work, FillMode::Fill | FillMode::Update),
        );
        // The comparison runs on another thread, so that the next part of the source can be read in the meantime.
        let (tally, sum, found) = run_blocking(move || {
            match work {
                FillMode::Verify => tally.keys += rows.len() as u64,
                FillMode::Fill | FillMode::Update | FillMode::DryRun => {
                    rows.iter().for_each(|row| tally.add(&row.key, row.value.as_bytes()));
                }
            }
            let rows = rows.into_iter().map(|row| (row.key, row.value)).collect();
            let found = compare(rows, there, |key, value| {
                if writes {
                    sum.add(key, value);
                }
            });
            Ok((tally, sum, found))
        })
        .await?;
        self.tally = tally;
        if writes {
            self.sums.push(PartChecksum { from: from.clone(), to: to.cloned(), sum });
        }
        self.kept += found.kept;
        self.count(&found.changes);
        match work {
            FillMode::DryRun | FillMode::Verify => Ok((Vec::new(), before)),
            FillMode::Fill if found.changes.iter().any(|change| change.was.is_set()) => Err(foreign_keys_failure(self)),
            FillMode::Fill | FillMode::Update => Ok((found.changes, before)),
        }
    }
}

fn foreign_keys_failure(found: &Differences) -> CommandFailure {
    let list = found.list_keys();
    CommandFailure::new(format!(
        "the store has keys that are other than in the file, or not in it; nothing was written over:{list}"
    ))
    .hint("another process has written to the store; delete the imported data with --abort, and start again")
}

/// A SHA-256 over keys and values, each preceded by its length in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
struct DocumentsChecksum(Sha256);

impl DocumentsChecksum {
    fn of(kvs: &[Kv]) -> Self {
        let mut sum = Self::default();
        kvs.iter().for_each(|kv| sum.add(&kv.key, &kv.value));
        sum
    }

    fn add(&mut self, key: &Key, value: &Value) {
        for bytes in [key.as_bytes(), value.as_bytes()] {
            self.0.update(&(bytes.len() as u64).to_le_bytes());
            self.0.update(bytes);
        }
    }
}

#[derive(Debug)]
struct PartChecksum {
    from: Key,
    /// The key at which the part ends, exclusively; `None` for the last part of the store.
    to: Option<Key>,
    sum: DocumentsChecksum,
}

#[cfg(test)]
mod tests {
    use ipam_core::model::keys::{self, ResourceKind};
    use kv::Store;

    use super::*;

    fn new(key: Key) -> Change {
        Change { key, value: Some("{}".into()), was: Revision::UNSET }
    }

    #[test]
    fn guards_are_per_key_when_others_may_write() {
        let handles = || vec![new(keys::handle("a")), new(keys::handle("b")), new(keys::handle("c"))];
        assert_eq!(guards(&handles(), FormerContents::Nothing).len(), 1);
        assert_eq!(guards(&handles(), FormerContents::Something).len(), 3);
        let nodes = ["a", "b"].map(|name| new(keys::resource(ResourceKind::Node, name)));
        assert_eq!(guards(&nodes, FormerContents::Nothing).len(), 2);
        let apart = [new(keys::handle("a")), new(keys::resource(ResourceKind::IpPool, "a"))];
        assert_eq!(guards(&apart, FormerContents::Nothing).len(), 2);
        let around_the_mark = [new("/margay/v1/a".into()), new("/margay/v1/z".into())];
        assert_eq!(guards(&around_the_mark, FormerContents::Nothing).len(), 2);
    }

    #[tokio::test]
    async fn guards_notice_writes_in_between() {
        let store = kv_mvcc::memory();
        store.put(keys::handle("other"), "{}").await.unwrap();
        let batch = [new(keys::handle("a")), new(keys::handle("b")), new(keys::handle("c"))];
        let ops = || batch.iter().map(|change| Op::put(change.key.clone(), "{}"));
        let txn = || Txn::new().with_compares(guards(&batch, FormerContents::Nothing)).with_success(ops());
        store.put(keys::handle("bb"), "{}").await.unwrap();
        assert!(!store.txn(txn()).await.unwrap().succeeded);
        store.delete(Range::Key(keys::handle("bb"))).await.unwrap();
        assert!(store.txn(txn()).await.unwrap().succeeded);
        assert!(!store.txn(txn()).await.unwrap().succeeded);
    }

    #[tokio::test]
    async fn target_reads_back_exactly_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        for engine in ["redb", "sled"] {
            let location = stores::of_engine(engine, folder.path().join(engine)).unwrap();
            let mut target = Target::make(StoreAccess::of(&location)).await.unwrap();
            let mark = ImportLock {
                way: moving::MoveKind::Migrate,
                from: "a".to_owned(),
                to: "b".to_owned(),
                source: "id".to_owned(),
                state: moving::ImportState::Copying,
                revision: 0,
            };
            target.begin(mark).await.unwrap();
            let handles = (0..3000).map(|number| new(keys::handle(&format!("{number:04}"))));
            let node = keys::resource(ResourceKind::Node, "n");
            let all: Vec<Change> = handles.chain([new(node.clone())]).collect();
            let part = |from: Key, to: Option<Key>| {
                let is_in = |key: &Key| from <= *key && to.as_ref().is_none_or(|to| key < to);
                let mut sum = DocumentsChecksum::default();
                let changes = all.iter().filter(|change| is_in(&change.key));
                changes.for_each(|change| sum.add(&change.key, change.value.as_ref().unwrap()));
                PartChecksum { from, to, sum }
            };
            let ends = ["1000", "2000"].map(keys::handle);
            let parts = [
                part(Key::default(), Some(ends[0].clone())),
                part(ends[0].clone(), Some(ends[1].clone())),
                part(ends[1].clone(), None),
            ];
            target.write(all, FormerContents::Something).await.unwrap();
            let store = target.open.as_ref().unwrap().store();
            let progress = KeyProgress::new("comparing", None);
            assert!(target.has_checksums(&parts, &progress).await.unwrap());
            for key in [keys::handle("0000"), ends[1].clone(), keys::handle("2999x"), node] {
                let was = store.get(key.clone()).await.unwrap();
                store.put(key.clone(), "{ }").await.unwrap();
                assert!(!target.has_checksums(&parts, &progress).await.unwrap(), "{key}");
                store.delete(Range::Key(key.clone())).await.unwrap();
                assert_eq!(target.has_checksums(&parts, &progress).await.unwrap(), was.is_none(), "{key}");
                if let Some(kv) = was {
                    store.put(key, kv.value).await.unwrap();
                }
                assert!(target.has_checksums(&parts, &progress).await.unwrap());
            }
            drop(store);
            target.close().await.unwrap();
        }
    }
}
