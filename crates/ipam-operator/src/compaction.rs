//! Compacts the history of a cluster's store, and finds how old the readable history is.
//!
//! Programs that compact an etcd share one key, [`COMPACTION_KEY`]: kube-apiserver, Calico's kube-controllers (which
//! uses kube-apiserver's code) and Margay. Each program notes the version of [`COMPACTION_KEY`] and the store's newest
//! revision, waits, and writes the key if its version is unchanged. Only the program that wins the write of
//! [`COMPACTION_KEY`] compacts, up to the revision that it noted before it waited. Because all these programs use
//! [`COMPACTION_KEY`], they compact only once per interval altogether, and a revision stays readable for at least one
//! interval.

use std::time::{Duration, SystemTime};

use ipam_core::attachment::TIMESTAMP;
use ipam_core::model::{Block, Document, keys};
use ipam_core::samples::oldest_revision;
use ipam_core::timestamps::{parse_go_string, rfc3339};
use kv::{Compare, Content, ErrorKind, Kv, Op, Range, RangeRequest, Result, Revision, Store, StoreExt, Txn};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::inspect::{Code, Finding, Subject};

/// The key that guards compactions of an etcd, `compactRevKey` in kube-apiserver; its value is the last compaction's
/// revision as decimal text.
pub const COMPACTION_KEY: &str = "compact_rev_key";

/// The facts that a compactor notes about the store before it waits. Its next run compares the `CompactionMark` with
/// the store's current state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactionMark {
    /// The revision that had last written [`COMPACTION_KEY`] when the [`CompactionMark`] was taken; 0 if the key did
    /// not exist.
    key_revision: i64,
    /// The store's newest revision when the [`CompactionMark`] was taken.
    newest: i64,
    /// The store's oldest readable revision when the [`CompactionMark`] was taken.
    oldest: i64,
    /// When the [`CompactionMark`] was taken, in seconds since 1970.
    at: u64,
}

/// The outcome of [`compact_older`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionOutcome {
    /// The history before this revision was deleted.
    Compacted {
        /// The oldest revision that is still readable.
        oldest: Revision,
    },
    /// The caller passed no usable [`CompactionMark`] of a previous call, so this call compacted nothing. The returned
    /// [`CompactionMark`] holds the revision up to which a later call compacts.
    Noted {
        /// The store's newest revision, which this call noted in the returned [`CompactionMark`].
        newest: Revision,
    },
    /// The passed [`CompactionMark`] is younger than `keep`, so this call compacted nothing.
    TooEarly {
        /// The age of the passed [`CompactionMark`], in seconds.
        noted_seconds_ago: u64,
    },
    /// Another program has written [`COMPACTION_KEY`] since the passed [`CompactionMark`] was taken, so this call
    /// compacted nothing.
    OtherCompactor,
    /// Since the passed [`CompactionMark`] was taken, the oldest readable revision has changed and [`COMPACTION_KEY`]
    /// has not. The store was compacted without a write of [`COMPACTION_KEY`], so etcd itself or a person compacts it,
    /// and this call compacted nothing.
    OtherCompaction,
    /// Nothing has changed in the store since the last compaction.
    NothingToDo,
}

/// Deletes the history that is older than the duration `keep`, unless another program compacts the store.
///
/// `mark` is the [`CompactionMark`] that the previous call returned. The caller keeps the returned [`CompactionMark`]
/// for the next call. With a `keep` of zero no mark is needed: the whole history is deleted at once.
///
/// One call of [`compact_older`] sends about 25 small requests to the store, most of them to find the oldest readable
/// revision.
///
/// # Errors
/// `Auth` if the user's role lacks the right to write [`COMPACTION_KEY`]; any other store error.
pub async fn compact_older(
    store: &dyn Store,
    mark: Option<CompactionMark>,
    keep: Duration,
    now: SystemTime,
) -> Result<(CompactionOutcome, CompactionMark)> {
    let seen = CompactionMark::read(store, now).await?;
    let mark = if keep.is_zero() { Some(seen.clone()) } else { mark };
    let Some(mark) = mark.filter(|mark| mark.at <= seen.at && mark.newest <= seen.newest) else {
        return Ok((CompactionOutcome::Noted { newest: Revision::new(seen.newest) }, seen));
    };
    if mark.key_revision != seen.key_revision {
        return Ok((CompactionOutcome::OtherCompactor, seen));
    }
    if mark.oldest != seen.oldest {
        return Ok((CompactionOutcome::OtherCompaction, seen));
    }
    let age = seen.at - mark.at;
    if age < keep.as_secs() {
        return Ok((CompactionOutcome::TooEarly { noted_seconds_ago: age }, mark));
    }
    // A compaction writes [`COMPACTION_KEY`], so an idle store has one revision more than its compacted history.
    if mark.newest <= seen.oldest + 1 {
        return Ok((CompactionOutcome::NothingToDo, seen));
    }
    let write = Txn::new()
        .with_compares([Compare::unchanged(COMPACTION_KEY, Revision::new(mark.key_revision))])
        .with_success([Op::put(COMPACTION_KEY, mark.newest.to_string())]);
    let key_revision = match store.txn(write).await {
        Ok(written) if written.succeeded => written.revision.get(),
        Ok(_) => return Ok((CompactionOutcome::OtherCompactor, CompactionMark::read(store, now).await?)),
        // An etcd that is over its space quota rejects the write of [`COMPACTION_KEY`], but is compacted nevertheless,
        // because only compaction frees space.
        Err(error) if matches!(error.kind(), ErrorKind::NoSpace) => seen.key_revision,
        Err(error) => return Err(error),
    };
    match store.compact(Revision::new(mark.newest)).await {
        Ok(()) => {
            let seen =
                CompactionMark { key_revision, newest: seen.newest.max(key_revision), oldest: mark.newest, ..seen };
            Ok((CompactionOutcome::Compacted { oldest: Revision::new(mark.newest) }, seen))
        }
        Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {
            Ok((CompactionOutcome::OtherCompaction, CompactionMark::read(store, now).await?))
        }
        Err(error) => Err(error),
    }
}

impl CompactionMark {
    async fn read(store: &dyn Store, now: SystemTime) -> Result<Self> {
        let key = store.range(RangeRequest::new(Range::Key(COMPACTION_KEY.into()))).await?;
        let newest = key.revision;
        Ok(Self {
            key_revision: key.kvs.first().map_or(0, |kv| kv.mod_revision.get()),
            newest: newest.get(),
            oldest: oldest_revision(store, newest).await?.get(),
            at: now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs(),
        })
    }
}

/// The database size and quota of one etcd member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSize {
    /// The member's endpoint.
    pub endpoint: String,
    /// The size of the member's database file, in bytes.
    pub bytes: u64,
    /// The number of bytes in use in the member's database file.
    pub bytes_in_use: u64,
    /// The database size at which the member refuses writes, in bytes.
    pub quota_bytes: u64,
    /// The problems that the member reports, for example a raised alarm.
    pub problems: Vec<String>,
}

/// The size of the database file as a share of the quota, in percent, above which [`Code::QuotaNearlyUsed`] is reported
/// as well. etcd compares the size of the file with the quota, including unused pages.
const MAX_PERCENT_SIZE: u64 = 90;
/// The share of the quota, in percent, above which [`Code::NobodyCompacts`] is reported.
const MAX_PERCENT_UNCOMPACTED: u64 = 10;
/// The age of the oldest readable revision above which [`Code::NobodyCompacts`] is reported.
const MAX_HISTORY_AGE: time::Duration = time::Duration::DAY;

/// Finds etcd alarms, members close to their quota, and history that is never compacted.
///
/// [`Code::QuotaNearlyUsed`] is reported if more than `max_percent_in_use` percent of a member's quota are in use. If no
/// member has used much of its quota, sends no request.
///
/// # Errors
/// Any store error.
pub async fn find_in_cluster(
    store: &dyn Store,
    newest: Revision,
    members: &[MemberSize],
    max_percent_in_use: u64,
    now: OffsetDateTime,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let percent = |member: &MemberSize| member.bytes_in_use.saturating_mul(100) / member.quota_bytes.max(1);
    for member in members {
        let subject = || Subject::Member(member.endpoint.clone());
        findings.extend(member.problems.iter().map(|problem| Finding::new(Code::ClusterAlarm, subject(), problem)));
        if percent(member) > max_percent_in_use {
            let used = format!("{} % of the quota of {} MiB", percent(member), member.quota_bytes >> 20);
            findings.push(Finding::new(Code::QuotaNearlyUsed, subject(), format!("{used} are in use")));
        } else if member.bytes.saturating_mul(100) / member.quota_bytes.max(1) > MAX_PERCENT_SIZE {
            let what = "the file has nearly the size of the quota, although little is in use: etcdctl defrag --cluster";
            findings.push(Finding::new(Code::QuotaNearlyUsed, subject(), what));
        }
    }
    if members.iter().any(|member| percent(member) > MAX_PERCENT_UNCOMPACTED) {
        let oldest = oldest_revision(store, newest).await?;
        if let Some(time) = time_after(store, oldest).await?.filter(|time| now - *time > MAX_HISTORY_AGE) {
            let since = format!("revision {oldest} is still readable, and was written before {}", rfc3339(time));
            findings.push(Finding::new(Code::NobodyCompacts, Subject::History, since));
        }
    }
    Ok(findings)
}

/// Maximum number of versions of one block that [`time_after`] reads.
const MAX_VERSIONS: usize = 16;
/// Maximum number of blocks among which [`time_after`] looks for the block that changed last.
const MAX_BLOCKS: i64 = 1000;

/// Finds the recorded time of an assignment that was committed after a revision: the earliest such assignment that can
/// be found. A store does not record the times of its revisions, but a block records the times of its assignments. The
/// revision was committed at or before the returned time.
///
/// Returns `None` if no assignment after the revision is found, or if the history was compacted while it was read.
/// Reads at most 16 versions of a block, and sends about 25 small requests to the store for each version.
///
/// # Errors
/// Any store error.
pub async fn time_after(store: &dyn Store, revision: Revision) -> Result<Option<OffsetDateTime>> {
    match find_time_after(store, revision).await {
        // Another program compacted the history while it was read.
        Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => Ok(None),
        found => found,
    }
}

async fn find_time_after(store: &dyn Store, revision: Revision) -> Result<Option<OffsetDateTime>> {
    let blocks = RangeRequest::new(Range::Prefix(keys::blocks_prefix(None)))
        .with_content(Content::KeysOnly)
        .with_limit(MAX_BLOCKS);
    let page = store.range(blocks).await?;
    let Some(busiest) = page.kvs.iter().max_by_key(|kv| kv.mod_revision) else { return Ok(None) };
    let version_at = async |at: Revision, content: Content| -> Result<Option<Kv>> {
        Ok(store.list_at(Range::Key(busiest.key.clone()), at, content).await?.kvs.into_iter().next())
    };
    let (mut at, mut latest) = (revision, None);
    for _ in 0..MAX_VERSIONS {
        let before = version_at(at, Content::Full).await?;
        let known = before.as_ref().and_then(newest_assignment).max(latest);
        let written = before.map_or(Revision::UNSET, |kv| kv.mod_revision);
        if written >= busiest.mod_revision {
            return Ok(None);
        }
        // Finds, by binary search, the first revision after `at` that changed the block.
        let (mut older, mut newer) = (at.get(), busiest.mod_revision.get());
        while older + 1 < newer {
            let middle = older + (newer - older) / 2;
            let version = version_at(Revision::new(middle), Content::KeysOnly).await?;
            match version.is_some_and(|kv| kv.mod_revision > written) {
                true => newer = middle,
                false => older = middle,
            }
        }
        at = Revision::new(newer);
        let assigned = version_at(at, Content::Full).await?.as_ref().and_then(newest_assignment);
        if assigned > known {
            return Ok(assigned);
        }
        latest = known;
    }
    Ok(None)
}

/// Returns the time of the newest assignment that a stored block records.
fn newest_assignment(kv: &Kv) -> Option<OffsetDateTime> {
    let block = Block::decode(&kv.key, kv.value.as_bytes()).ok()?;
    block.allocated().filter_map(|(_, entry)| entry.get(TIMESTAMP).and_then(parse_go_string)).max()
}
