//! Determines how a transaction changes the number of addresses that count against each quota, and updates the stored
//! quota counters.
//!
//! If an assignment counts against a quota, its commit guards and writes the counter of the quota's subject, so one of
//! two concurrent assignments to the subject fails and is retried. A quota counter is only an upper bound of the number
//! of addresses, because some releases of Margay and all releases of other programs do not lower the counter. The
//! counter may be too high, so before an assignment fails because of a quota, the subject's addresses in all blocks are
//! counted at the transaction's revision.

use kv::{Key, Pages, Range, Revision, Store, Transaction, Value};

use super::WriteSet;
use crate::error::{Error, QuotaReached, Result};
use crate::model::{Attribute, Block, Document, QuotaCount, QuotaKind, QuotaSubject, Quotas, keys};
use crate::sticky::waits_until;

/// Maximum number of optional decrements of quota counters in one commit. A commit that lowers a quota counter must
/// guard the counter's key.
const MAX_LOWERED_COUNTERS: usize = 8;
/// Percentage of a quota in use from which a trial assignment logs a warning.
const QUOTA_WARNING_PERCENT: u64 = 80;

/// The quotas of a store, and how a transaction changes the number of addresses that count against each quota.
#[derive(Debug, Default)]
pub(super) enum QuotaLimits {
    #[default]
    Unread,
    None,
    Some(Box<QuotaChanges>),
}

/// For each subject with a quota, the change that a transaction makes to the subject's number of addresses. The changes
/// are in lists instead of maps, because one transaction concerns only a few subjects.
#[derive(Debug)]
pub(super) struct QuotaChanges {
    quotas: Quotas,
    /// The revision at which the quotas document was last written.
    at: Revision,
    /// For each subject, the negated number of its addresses in the changed blocks, counted before the blocks were
    /// changed.
    before: Vec<QuotaChange>,
    /// True if the commit skips every optional decrement of a quota counter.
    leaves: bool,
}

/// The change that a transaction makes to the number of addresses of one quota subject.
#[derive(Clone, Debug)]
struct QuotaChange {
    subject: QuotaSubject,
    /// The change in the subject's number of addresses, counting only addresses that Margay has assigned to
    /// attachments.
    own: i64,
    /// The change in the number of the subject's addresses that have no attachment attributes, for example because
    /// another program assigned them. The quota counter may omit addresses that other programs assigned, because these
    /// programs do not update it.
    other: i64,
    /// The number of the subject's addresses without the transaction's changes; `None` until [`WriteSet::check_quotas`]
    /// has succeeded.
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

    /// Returns by how much the transaction changes the subject's quota counter. If it is unknown whether the counter
    /// includes the released addresses, the release does not lower the counter.
    fn counted(&self) -> i64 {
        self.own + self.other.max(0)
    }
}

/// Calls `see` for each address of a block that counts against a quota, with the kind and name of the quota's subject
/// and the address's entry. Addresses in cooldown, and addresses that wait for their workloads, do not count.
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

/// For each quota subject, counts its addresses in a block, and adds the count, multiplied by `sign` (1 or -1), to the
/// change in the subject's number of addresses.
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

    /// Subtracts the addresses that each quota subject has in a block from the subject's change in the number of
    /// addresses. Callers call `note` before they change the block.
    pub(super) fn note(&mut self, block: &Block) {
        if let Self::Some(counts) = self {
            add(&mut counts.before, &counts.quotas, block, -1);
        }
    }
}

impl WriteSet<'_> {
    /// Reads and guards the quotas, so that an assignment cannot exceed a quota that is changed before the commit.
    ///
    /// # Errors
    /// `Malformed` if the quotas are damaged. Any store error.
    pub async fn heed_quotas(&mut self) -> Result<()> {
        let stored = self.tx.get(&keys::quotas()).await?;
        self.limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()))?;
        Ok(())
    }

    /// Reads the quotas without a guard, for any change except an assignment. Damaged quotas are logged and ignored, so
    /// that addresses can still be released.
    pub(super) async fn read_quotas(&mut self) -> Result<()> {
        if !matches!(self.limits, QuotaLimits::Unread) {
            return Ok(());
        }
        let stored = self.tx.snapshot_get(&keys::quotas()).await?;
        let limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()));
        self.limits = limits.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot decode the stored quotas; continuing as if no quota were set");
            QuotaLimits::None
        });
        Ok(())
    }

    /// Makes the commit of a release leave the quota counters unchanged. After several attempts that may have
    /// conflicted on quota counters, callers stop updating the counters.
    pub async fn leave_counters(&mut self) -> Result<()> {
        self.read_quotas().await?;
        if let QuotaLimits::Some(counts) = &mut self.limits {
            counts.leaves = true;
        }
        Ok(())
    }

    /// Returns, for each subject, how the transaction has changed the number of the subject's addresses so far.
    fn quota_changes(&self, counts: &QuotaChanges) -> Vec<QuotaChange> {
        let mut changes = counts.before.clone();
        for block in self.changed.iter().filter_map(|cidr| self.blocks.get(cidr)?.as_ref()) {
            add(&mut changes, &counts.quotas, block, 1);
        }
        changes
    }

    /// Checks that every subject that gets addresses stays within its quota. In a trial assignment, `store` is `None`.
    /// A trial assignment checks only the stored counters, and logs a warning if a quota is nearly used up.
    ///
    /// # Errors
    /// `Quota` if the transaction would exceed a quota. Any store error.
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

    /// Keeps the number of a subject's addresses that the quota check has found, so that [`WriteSet::write`] can write
    /// the counter.
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
                // The quota counter is set to an invalid value, so that the next assignment counts the subject's
                // addresses again. Writing the quota counter makes the commit of a concurrent assignment that counts
                // the subject's addresses fail, so the assignment counts again.
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

/// Counts the addresses of the given subjects in all blocks at one revision, reading the blocks in pages.
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
                Err(error) => tracing::warn!(
                    %error,
                    "skipping a stored block that cannot be decoded; the addresses of the block do not count in quotas"
                ),
            }
        }
    }
    Ok(())
}

/// Returns the keys of the quota counters of an attachment's network, its node and its pod's namespace, for a prefetch.
pub(crate) fn likely_counters(network: &str, node: &str, namespace: Option<&str>) -> impl Iterator<Item = Key> {
    let known = [(QuotaKind::Network, Some(network)), (QuotaKind::Node, Some(node)), (QuotaKind::Namespace, namespace)];
    known.map(|(kind, name)| name.map(|name| keys::quota_use(kind, name))).into_iter().flatten()
}
