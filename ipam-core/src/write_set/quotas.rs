//! Counts how a transaction changes the number of addresses of subjects with quotas.
//!
//! A commit that assigns to a subject with a quota guards and writes the subject's counter, so one of two concurrent
//! assignments fails and retries. A counter is an upper bound. Releases that skip the counter, and releases by other
//! programs, only make the counter too high. Before an assignment is refused, the subject's addresses in all blocks are
//! therefore counted at the attempt's revision.

use kv::{Key, Pages, Range, Revision, Store, Transaction, Value};

use super::WriteSet;
use crate::error::{Error, QuotaReached, Result};
use crate::model::{Attribute, Block, Document, QuotaCount, QuotaKind, QuotaSubject, Quotas, keys};
use crate::sticky::waits_until;

/// Maximum number of counters that one commit lowers. Each lowered counter needs a guard.
const MAX_LOWERED_COUNTERS: usize = 8;
/// Percentage of a quota from which a check logs a warning.
const QUOTA_WARNING_PERCENT: u64 = 80;

/// The quotas of a store, and the address changes that count against them in a transaction.
#[derive(Debug, Default)]
pub(super) enum QuotaLimits {
    /// The quotas have not been read.
    #[default]
    Unread,
    /// No subject has a limit.
    None,
    /// Some subjects have a limit.
    Some(Box<QuotaChanges>),
}

/// The address changes of a transaction for subjects with a limit. There are few such subjects, so searching a list is
/// as fast as a map.
#[derive(Debug)]
pub(super) struct QuotaChanges {
    quotas: Quotas,
    /// The revision at which the quotas document was last written.
    at: Revision,
    /// The addresses in the changed blocks before the change, as negative numbers.
    before: Vec<QuotaChange>,
    /// Whether updates of counters that are not required are skipped.
    leaves: bool,
}

/// The change of the number of addresses of a subject with a limit.
#[derive(Clone, Debug)]
struct QuotaChange {
    subject: QuotaSubject,
    /// The change of the number of addresses that Margay assigned to attachments.
    own: i64,
    /// The change of the number of all other addresses. The counter lacks such addresses if they were assigned after
    /// the counter was written.
    other: i64,
    /// The number of the subject's addresses before this change, which is known once the quota was found to suffice.
    used: Option<u64>,
}

impl QuotaChange {
    fn is_of(&self, kind: QuotaKind, name: &str) -> bool {
        self.subject.kind == kind && self.subject.name == name
    }

    fn key(&self) -> Key {
        keys::quota_use(self.subject.kind, &self.subject.name)
    }

    fn all(&self) -> i64 {
        self.own + self.other
    }

    /// Returns the change of the subject's counter. Addresses that the counter may lack are never subtracted.
    fn counted(&self) -> i64 {
        self.own + self.other.max(0)
    }
}

/// Passes each address in use that counts for a subject with a limit to `see`, with the subject's kind and name and the
/// address's entry. Addresses in cooldown, and addresses that wait for their workloads, do not count.
pub(crate) fn each_of(quotas: &Quotas, block: &Block, mut see: impl FnMut(QuotaKind, &str, &Attribute)) {
    let is_in_use = |entry: &Attribute| entry.released_at().is_none() && waits_until(entry).is_none();
    for (_, entry) in block.allocated().filter(|(_, entry)| is_in_use(entry)) {
        for kind in QuotaKind::ALL {
            if let Some(name) = kind.name_in(entry).filter(|name| quotas.limit(kind, name).is_some()) {
                see(kind, name, entry);
            }
        }
    }
}

/// Adds the addresses of a block to the changes, or subtracts them with a `sign` of -1.
fn add(changes: &mut Vec<QuotaChange>, quotas: &Quotas, block: &Block, sign: i64) {
    each_of(quotas, block, |kind, name, entry| {
        let (own, other) = if entry.network().is_some() { (sign, 0) } else { (0, sign) };
        match changes.iter_mut().find(|change| change.is_of(kind, name)) {
            Some(change) => (change.own, change.other) = (change.own + own, change.other + other),
            None => changes.push(QuotaChange { subject: QuotaSubject::new(kind, name), own, other, used: None }),
        }
    });
}

impl QuotaLimits {
    fn of(stored: Option<&Value>, at: Option<Revision>) -> Result<Self> {
        let (Some(stored), Some(at)) = (stored, at) else { return Ok(Self::None) };
        let quotas = Quotas::decode(&keys::quotas(), stored.as_bytes())?;
        if quotas.is_empty() {
            return Ok(Self::None);
        }
        Ok(Self::Some(Box::new(QuotaChanges { quotas, at, before: Vec::new(), leaves: false })))
    }

    /// Subtracts the current addresses of a block that is about to be changed.
    pub(super) fn note(&mut self, block: &Block) {
        if let Self::Some(counts) = self {
            add(&mut counts.before, &counts.quotas, block, -1);
        }
    }
}

impl WriteSet<'_> {
    /// Reads the quotas for an assignment, and adds a guard for them.
    ///
    /// # Errors
    /// `Malformed` if the stored value is damaged. Any store error.
    pub async fn heed_quotas(&mut self) -> Result<()> {
        let stored = self.tx.get(&keys::quotas()).await?;
        self.limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()))?;
        Ok(())
    }

    /// Reads the quotas for a change other than an assignment, without a guard. Damaged quotas are logged and ignored,
    /// so that they block no release.
    pub(super) async fn read_quotas(&mut self) -> Result<()> {
        if !matches!(self.limits, QuotaLimits::Unread) {
            return Ok(());
        }
        let stored = self.tx.snapshot_get(&keys::quotas()).await?;
        let limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()));
        self.limits = limits.unwrap_or_else(|error| {
            tracing::warn!(%error, "skipping a damaged quota document");
            QuotaLimits::None
        });
        Ok(())
    }

    /// Skips the counters of released addresses, for a caller whose earlier attempts conflicted on these counters.
    pub async fn leave_counters(&mut self) -> Result<()> {
        self.read_quotas().await?;
        if let QuotaLimits::Some(counts) = &mut self.limits {
            counts.leaves = true;
        }
        Ok(())
    }

    /// Returns the address changes so far, by subject.
    fn quota_changes(&self, counts: &QuotaChanges) -> Vec<QuotaChange> {
        let mut changes = counts.before.clone();
        for block in self.changed.iter().filter_map(|cidr| self.blocks.get(cidr)?.as_ref()) {
            add(&mut changes, &counts.quotas, block, 1);
        }
        changes
    }

    /// Checks that every subject that gains addresses stays within its quota. Without a store, addresses cannot be
    /// counted, so the counters are trusted, and a warning is logged for a quota that is nearly used up.
    ///
    /// # Errors
    /// `Quota` if a quota is exceeded. Any store error.
    pub async fn check_quotas(&mut self, store: Option<&dyn Store>) -> Result<()> {
        let QuotaLimits::Some(counts) = &self.limits else { return Ok(()) };
        let changes = self.quota_changes(counts);
        let QuotaLimits::Some(counts) = &mut self.limits else { return Ok(()) };
        counts.check(self.tx, changes, store).await
    }

    pub(super) async fn write_counters(&mut self) -> Result<()> {
        self.read_quotas().await?;
        let QuotaLimits::Some(counts) = &self.limits else { return Ok(()) };
        counts.write(self.tx, self.quota_changes(counts)).await
    }
}

impl QuotaChanges {
    fn limit(&self, of: &QuotaSubject) -> u64 {
        self.quotas.limit(of.kind, &of.name).unwrap_or(u64::MAX)
    }

    async fn check(
        &mut self,
        tx: &mut Transaction,
        changes: Vec<QuotaChange>,
        store: Option<&dyn Store>,
    ) -> Result<()> {
        let mut unsure = Vec::new();
        tx.prefetch(counters(&changes), Vec::new()).await?;
        for mut change in changes {
            if change.counted() <= 0 {
                continue;
            }
            let limit = self.limit(&change.subject);
            let stored = tx.get(&change.key()).await?;
            change.used = change.used.or_else(|| QuotaCount::good(stored.as_ref(), self.at));
            match change.used {
                Some(used) if used.saturating_add_signed(change.counted()) <= limit => {
                    if store.is_none() && used.saturating_mul(100) >= limit.saturating_mul(QUOTA_WARNING_PERCENT) {
                        tracing::warn!(quota = %change.subject, used, limit, "a quota is nearly used up");
                    }
                    self.set(change);
                }
                _ => unsure.push(change),
            }
        }
        if let (Some(store), false) = (store, unsure.is_empty()) {
            count(store, &self.quotas, tx.revision(), &mut unsure).await?;
        }
        for change in unsure {
            let (limit, Some(used)) = (self.limit(&change.subject), change.used) else { continue };
            if change.all() > 0 && used.saturating_add_signed(change.all()) > limit {
                let subject = change.subject;
                return Err(Error::Quota(QuotaReached { subject, limit, used, over_leftovers: false }));
            }
            self.set(change);
        }
        Ok(())
    }

    /// Stores the checked number of a subject's addresses for [`Self::write`].
    fn set(&mut self, change: QuotaChange) {
        match self.before.iter_mut().find(|before| before.subject == change.subject) {
            Some(before) => before.used = change.used,
            None => self.before.push(QuotaChange { own: 0, other: 0, ..change }),
        }
    }

    async fn write(&self, tx: &mut Transaction, mut changes: Vec<QuotaChange>) -> Result<()> {
        let mut left = if self.leaves { 0 } else { MAX_LOWERED_COUNTERS };
        changes.retain(|change| {
            let must = change.counted() > 0 || (change.counted() < 0 && change.used.is_some());
            let may = must || (change.counted() < 0 && left > 0);
            left -= usize::from(!must && may);
            may
        });
        tx.prefetch(counters(&changes), Vec::new()).await?;
        for change in changes {
            let key = change.key();
            let stored = tx.snapshot_get(&key).await?;
            let count = match change.used.or_else(|| QuotaCount::good(stored.as_ref(), self.at)) {
                Some(used) => QuotaCount { used: used.saturating_add_signed(change.counted()), quotas: self.at.get() },
                // An invalid counter makes a concurrent assignment that is counting addresses fail and count again.
                None if change.counted() > 0 => QuotaCount { used: 0, quotas: 0 },
                None => continue,
            };
            tx.get(&key).await?;
            tx.put(&key, count.encode())?;
        }
        Ok(())
    }
}

fn counters(changes: &[QuotaChange]) -> Vec<Key> {
    changes.iter().map(QuotaChange::key).collect()
}

/// Counts the addresses of these subjects in all blocks at a revision, reading the blocks in pages.
async fn count(store: &dyn Store, quotas: &Quotas, at: Revision, of: &mut [QuotaChange]) -> Result<()> {
    of.iter_mut().for_each(|change| change.used = Some(0));
    let mut pages = Pages::new(Range::Prefix(keys::blocks_prefix(None)), at);
    while let Some(page) = pages.next(store).await? {
        for kv in page {
            match Block::decode(&kv.key, kv.value.as_bytes()) {
                Ok(block) => each_of(quotas, &block, |kind, name, _| {
                    let change = of.iter_mut().find(|change| change.is_of(kind, name));
                    if let Some(used) = change.and_then(|change| change.used.as_mut()) {
                        *used += 1;
                    }
                }),
                Err(error) => tracing::warn!(%error, "skipping a damaged block"),
            }
        }
    }
    Ok(())
}

/// Returns the keys of the counters of an attachment's network and node and of its pod's namespace, for a prefetch.
pub(crate) fn likely_counters(network: &str, node: &str, namespace: Option<&str>) -> impl Iterator<Item = Key> {
    let known = [(QuotaKind::Network, Some(network)), (QuotaKind::Node, Some(node)), (QuotaKind::Namespace, namespace)];
    known.map(|(kind, name)| name.map(|name| keys::quota_use(kind, name))).into_iter().flatten()
}
