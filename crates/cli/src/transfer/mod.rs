//! Copies documents between stores and backup files. A [`Source`] returns the documents in parts, a filter keeps only
//! the IPAM documents, and a [`Sink`] writes these documents.
//!
//! | | source | filter | sink |
//! |---|---|---|---|
//! | `store backup` | store | | file |
//! | `export` | store | IPAM's | file |
//! | `store restore` | file | | new store |
//! | `import` | file | IPAM's, nodes renamed | marked store, empty before |
//! | `migrate` | store | IPAM's | marked store, made equal |
//!
//! While a store is read at one revision, it is closed and opened several times, so that no plugin waits long for the
//! store lock. If another process waits for the store, the reader closes the store once it has held it for 10 ms. After
//! reopening the store, the reader continues at the revision at which it started. While a command fills a store that
//! other processes can reach, the store carries an import lock. Plugins refuse to use a store with an import lock. The
//! import lock names the command by which an unfinished copy can be continued.

mod format;
mod reader;
mod target;
mod writer;

use std::time::{Instant, SystemTime};

use datastore::OpenStore;
use datastore::shared_store::MIN_HOLD_DURATION;
use ipam_operator::moving::{import_lock_key, ranges};
use kv::{ErrorKind, Key, Kv, Lease, LeaseId, Range, Revision, Value};
use tokio::task::spawn_blocking;

pub(crate) use self::format::BackupHeader;
pub(crate) use self::reader::{BackupRows, CheckedBackup, ImportPlan};
pub(crate) use self::target::{Differences, FillMode, Target, TargetFiller};
pub(crate) use self::writer::{BackupWriter, Overwrite, WrittenBackup};
use crate::error::{CommandFailure, CommandResult};
use crate::output::rfc3339;
use crate::store::{StoreAccess, StoreUse};

/// The key prefixes in a cluster's backup, in ascending order. The backup has the keys of Calico and Margay, but no
/// keys of other users of etcd.
pub(crate) const CLUSTER_PREFIXES: [&str; 2] = ["/calico/", "/margay/"];

/// Maximum number of attempts to read a store at one revision. A revision can be compacted before the whole store was
/// read at this revision.
const MAX_ATTEMPTS: usize = 5;
/// Maximum total size in bytes of the keys and values in one transaction, unless a single key and value are larger.
const MAX_TXN_BYTES: usize = 1_000_000;

/// A key of a store, with its value and lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) key: Key,
    pub(crate) value: Value,
    pub(crate) lease: Option<LeaseId>,
}

/// Several consecutive rows of a source, in ascending order of their keys.
pub(crate) struct RowBatch {
    pub(crate) rows: Vec<Row>,
    /// True if the batch has the last rows of the source.
    pub(crate) is_last: bool,
}

/// Selects which keys of a store a command copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyFilter {
    /// All keys of an embedded store, or those keys of a cluster that belong to Calico and Margay.
    All,
    /// The keys of IPAM documents. With `KeyFilter::Ipam`, a source store that has an import lock is refused.
    Ipam,
}

/// A store or backup file from which rows are read.
pub(crate) enum Source<'l> {
    Store(Box<Snapshot<'l>>, KeyFilter),
    File(Box<BackupRows>),
}

impl<'l> Source<'l> {
    /// Creates a source that reads the store at `revision`, or at the store's newest revision if `revision` is unset.
    pub(crate) fn store(at: StoreAccess<'l>, filter: KeyFilter, revision: Revision) -> Self {
        let ranges = match filter {
            KeyFilter::All if at.location.is_shared() => CLUSTER_PREFIXES.map(Range::prefix).to_vec(),
            KeyFilter::All => vec![Range::All],
            KeyFilter::Ipam => ranges(),
        };
        Self::Store(Box::new(Snapshot::of(at, ranges).at(revision)), filter)
    }

    async fn next(&mut self) -> Result<RowBatch, TransferStop> {
        match self {
            Self::Store(snapshot, filter) => {
                let kvs = snapshot.batch().await?.unwrap_or_default();
                let mark = import_lock_key();
                if *filter == KeyFilter::Ipam && kvs.iter().any(|kv| kv.key == mark) {
                    return Err(unfinished_target_failure(&snapshot.store().to_string()).into());
                }
                let row = |kv: Kv| Row { key: kv.key, value: kv.value, lease: kv.lease };
                Ok(RowBatch { rows: kvs.into_iter().map(row).collect(), is_last: snapshot.is_over() })
            }
            Self::File(rows) => Ok(rows.next().await?),
        }
    }

    /// Returns the description of the source store or file. The description of a store is known only after the store's
    /// first rows were read.
    fn header(&self) -> Option<BackupHeader> {
        match self {
            Self::Store(snapshot, _) => {
                let (about, revision) = (snapshot.identity()?, snapshot.revision().get());
                Some(BackupHeader::new(about, revision, rfc3339(SystemTime::now())))
            }
            Self::File(rows) => Some(rows.header().clone()),
        }
    }

    /// Returns the revision at which the source store is read. The revision is unset for a backup file, and before the
    /// first rows of a store were read.
    pub(crate) fn revision(&self) -> Revision {
        match self {
            Self::Store(snapshot, _) => snapshot.revision(),
            Self::File(_) => Revision::UNSET,
        }
    }
}

/// A store or backup file to which rows are written.
pub(crate) trait Sink {
    /// Prepares the sink for the rows of a source that `header` describes. `begin` is called again if the source is
    /// read again from the start.
    async fn begin(&mut self, header: BackupHeader) -> CommandResult<()>;

    async fn take(&mut self, part: RowBatch) -> CommandResult<()>;
}

/// Copies all rows from a source to a sink. Reads the next rows from the source while the sink writes the current rows.
pub(crate) async fn transfer_rows(source: &mut Source<'_>, sink: &mut impl Sink) -> Result<(), TransferStop> {
    let mut next = Some(source.next().await?);
    if let Some(header) = source.header() {
        sink.begin(header).await?;
    }
    while let Some(part) = next {
        let is_last = part.is_last;
        let read = async { if is_last { Ok(None) } else { source.next().await.map(Some) } };
        let (taken, read) = futures::join!(sink.take(part), read);
        taken?;
        next = read?;
    }
    Ok(())
}

/// The reason why copying rows from a source to a sink ended early.
pub(crate) enum TransferStop {
    /// The revision at which the source store was being read was compacted.
    Overtaken,
    Failed(CommandFailure),
}

impl TransferStop {
    /// Converts the error that stopped reading a backup file into a command failure.
    pub(crate) fn of_a_file(self, file: &CheckedBackup) -> CommandFailure {
        match self {
            Self::Overtaken => CommandFailure::new(format!("{} cannot be read any more", file.path())),
            Self::Failed(failure) => failure,
        }
    }
}

impl From<CommandFailure> for TransferStop {
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

/// Runs `attempt`, which reads a store at one revision, and repeats it if the revision is compacted during the reading.
pub(crate) async fn retry_at_one_revision<T>(
    at: StoreAccess<'_>,
    mut attempt: impl AsyncFnMut() -> Result<T, TransferStop>,
) -> CommandResult<T> {
    for _ in 0..MAX_ATTEMPTS {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(TransferStop::Overtaken) => {}
            Err(TransferStop::Failed(failure)) => return Err(failure),
        }
    }
    Err(history_lost(at, &format!("{MAX_ATTEMPTS} times"), "try again when fewer containers are started and stopped"))
}

/// Builds the error for a source store whose history was compacted before the store had been read completely.
fn history_lost(at: StoreAccess<'_>, times: &str, hint: &str) -> CommandFailure {
    CommandFailure::new(format!("{at} changes faster than it can be read: its history was given up {times}")).hint(hint)
}

/// Builds the error for a source store that an unfinished migration or import is still filling.
fn unfinished_target_failure(what: &str) -> CommandFailure {
    CommandFailure::new(format!("{what} is itself the target of a migration or an import that is not finished"))
        .hint("finish that migration or import first, or end it with --abort; nothing was changed")
}

/// Divides items into groups, each of which fits into one transaction. A group has at most `most` items and at most
/// [`MAX_TXN_BYTES`] bytes, except that a group with a single item may be larger.
pub(crate) fn group_by_size<T>(
    things: impl IntoIterator<Item = T>,
    most: usize,
    size: impl Fn(&T) -> usize,
) -> Vec<Vec<T>> {
    let (mut groups, mut group, mut bytes) = (Vec::new(), Vec::new(), 0);
    for thing in things {
        let more = size(&thing);
        if group.len() == most || (bytes + more > MAX_TXN_BYTES && !group.is_empty()) {
            groups.push(std::mem::take(&mut group));
            bytes = 0;
        }
        bytes += more;
        group.push(thing);
    }
    groups.extend((!group.is_empty()).then_some(group));
    groups
}

/// Runs blocking work on another thread and awaits the result.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> CommandResult<T> + Send + 'static,
) -> CommandResult<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(CommandFailure::new(error)))
}

/// Number of bytes of keys and values that are read before the store is closed again. The keys and values that were
/// read stay in memory until the store is opened again.
const TURN_BYTES: usize = 16 << 20;
/// Target size in bytes of a page of keys and values, read from an embedded store or from a cluster.
const PAGE_BYTES: usize = 256 << 10;
const CLUSTER_PAGE_BYTES: usize = 8 << 20;

/// Reads ranges of a store's keys at one revision, in ascending order.
pub(crate) struct Snapshot<'l> {
    store: StoreAccess<'l>,
    /// The revision at which the store is read; unset before the store is first opened.
    at: Revision,
    about: Option<StoreIdentity>,
    pages: RangePages,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreIdentity {
    pub(crate) engine: &'static str,
    /// The id of the store or cluster that is read.
    pub(crate) id: String,
    /// The leases of an embedded store, or `None` if the store's format does not support leases. The leases of a
    /// cluster are not read, because they belong to the cluster's clients.
    pub(crate) leases: Option<Vec<Lease>>,
}

impl<'l> Snapshot<'l> {
    /// Creates a reader of the given ranges of keys, which must be in ascending order, at the store's newest revision.
    pub(crate) fn of(store: StoreAccess<'l>, ranges: Vec<Range>) -> Self {
        Self { store, at: Revision::UNSET, about: None, pages: RangePages::of(ranges) }
    }

    /// Makes the snapshot read the store at `revision`, which might already be compacted.
    pub(crate) fn at(mut self, revision: Revision) -> Self {
        self.at = revision;
        self
    }

    fn store(&self) -> StoreAccess<'l> {
        self.store
    }

    /// Returns the revision at which the store is read; unset before the store is first opened.
    pub(crate) fn revision(&self) -> Revision {
        self.at
    }

    /// Returns the identity of the store, or `None` before the store is first opened.
    pub(crate) fn identity(&self) -> Option<&StoreIdentity> {
        self.about.as_ref()
    }

    /// True if all key ranges were read completely.
    pub(crate) fn is_over(&self) -> bool {
        self.pages.is_over()
    }

    /// Opens the store, reads the next keys in ascending order, and closes the store. Returns `None` after the last key
    /// was read.
    pub(crate) async fn batch(&mut self) -> Result<Option<Vec<Kv>>, TransferStop> {
        if self.is_over() {
            return Ok(None);
        }
        let store = self.store;
        let open = store.open_files(StoreUse::Read).await?;
        store.run_and_close(open, async |open: &OpenStore| self.read(open).await).await.map(Some)
    }

    async fn read(&mut self, open: &OpenStore) -> Result<Vec<Kv>, TransferStop> {
        let store = self.store;
        let found = read_identity(store, open).await?;
        if self.about.get_or_insert_with(|| found.clone()).id != found.id {
            return Err(CommandFailure::new(format!("{store} was replaced by another store meanwhile"))
                .hint("run the command again to read the new store")
                .into());
        }
        let (began, mut bytes, mut kvs) = (Instant::now(), 0, Vec::new());
        while !self.pages.is_over() {
            let page = self.pages.next(open, self.at).await.map_err(|error| match error.kind() {
                ErrorKind::Compacted { .. } => TransferStop::Overtaken,
                _ => TransferStop::Failed(store.explain(error)),
            })?;
            self.at = page.at;
            bytes += page.kvs.iter().map(Kv::size).sum::<usize>();
            kvs.extend(page.kvs);
            let over = bytes >= TURN_BYTES
                || kvs.len() >= store.location.facts().keys_in_a_turn
                || (began.elapsed() >= MIN_HOLD_DURATION && store.has_waiters().await?);
            if over {
                break;
            }
        }
        Ok(kvs)
    }
}

pub(crate) struct RangePages {
    /// The key ranges that are not read yet, in descending order.
    rest: Vec<Range>,
    /// The key range that is being read page by page; always `None` for an embedded store.
    begun: Option<kv::Pages>,
}

pub(crate) struct KvPage {
    /// The revision at which this page was read.
    at: Revision,
    /// The keys with their values, in ascending order of the keys.
    kvs: Vec<Kv>,
}

impl RangePages {
    /// Creates a reader of the given ranges of keys, which must be in ascending order.
    pub(crate) fn of(mut ranges: Vec<Range>) -> Self {
        ranges.reverse();
        Self { rest: ranges, begun: None }
    }

    /// True if all key ranges were read completely.
    pub(crate) fn is_over(&self) -> bool {
        self.rest.is_empty() && self.begun.is_none()
    }

    /// Reads the next page of keys at revision `at`, or at the store's newest revision if `at` is unset.
    pub(crate) async fn next(&mut self, open: &OpenStore, at: Revision) -> kv::Result<KvPage> {
        if let Some(store) = open.embedded() {
            let Some(range) = self.rest.pop() else { return Ok(KvPage { at, kvs: Vec::new() }) };
            // The page is read directly from the engine, because the store interface's `range` would also count all
            // remaining keys, which takes long.
            let (first, end) = range.bounds();
            let page = store.page(first, at, PAGE_BYTES).await?;
            let is_before_end = |key: &Key| end.as_ref().is_none_or(|end| key < end);
            let mut kvs = page.kvs;
            kvs.truncate(kvs.partition_point(|kv| is_before_end(&kv.key)));
            self.rest.extend(page.next.filter(is_before_end).map(|next| range.rest(next)));
            return Ok(KvPage { at: page.at, kvs });
        }
        let begun = self.begun.take().or_else(|| self.rest.pop().map(|range| cluster_pages(range, at)));
        let Some(mut pages) = begun else { return Ok(KvPage { at, kvs: Vec::new() }) };
        let kvs = pages.next(&*open.store()).await?.unwrap_or_default();
        let at = pages.revision();
        self.begun = Some(pages).filter(|pages| !pages.is_over());
        Ok(KvPage { at, kvs })
    }
}

fn cluster_pages(range: Range, at: Revision) -> kv::Pages {
    kv::Pages::new(range, at).with_page_bytes(CLUSTER_PAGE_BYTES)
}

/// Reads the engine, the id and the leases of an open store.
pub(crate) async fn read_identity(at: StoreAccess<'_>, open: &OpenStore) -> CommandResult<StoreIdentity> {
    let engine = at.location.facts().name;
    if let Some(cluster) = open.cluster() {
        let about = cluster.about().await.map_err(|error| at.explain(error))?;
        return Ok(StoreIdentity { engine, id: format!("{:x}", about.cluster), leases: None });
    }
    let Some(store) = open.embedded() else {
        let id = open.served().map(|daemon| daemon.id().to_owned()).unwrap_or_default();
        return Ok(StoreIdentity { engine, id, leases: None });
    };
    let leases = if store.has_leases() { Some(store.leases().await) } else { None };
    let leases = leases.transpose().map_err(|error| at.explain(error))?;
    Ok(StoreIdentity { engine, id: store.id().to_string(), leases })
}
