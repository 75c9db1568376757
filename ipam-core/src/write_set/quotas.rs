//! Counting what a transaction changes for the subjects that have a quota.
//!
//! A commit that assigns to such a subject guards and writes its counter, so of two assignments at once one starts
//! again. The counter is an upper bound: a release that leaves it alone, and the releases of foreign writers, only make
//! it too high. So nothing is refused on its word; all blocks are counted first, as of the attempt's revision.

use kv::{Key, Pages, Range, Revision, Store, Transaction, Value};

use super::WriteSet;
use crate::attachment::NETWORK;
use crate::error::{Error, QuotaReached, Result};
use crate::model::{Attribute, Block, Document, QuotaCount, QuotaKind, QuotaSubject, Quotas, keys};
use crate::sticky::waits_until;

/// The most counters that one commit lowers: each is a guard.
const MAX_LOWERED_COUNTERS: usize = 8;
/// From so many percent of a quota on a check warns.
const QUOTA_WARNING_PERCENT: u64 = 80;

/// The quotas as a transaction sees them, and its changes.
#[derive(Debug, Default)]
pub(super) enum QuotaLimits {
    /// They have not been read.
    #[default]
    Unread,
    /// Nothing has a limit.
    None,
    /// Some subjects have.
    Some(Box<QuotaChanges>),
}

/// The changes of a transaction for subjects that have a limit. There are few: a list is searched as fast as a map.
#[derive(Debug)]
pub(super) struct QuotaChanges {
    quotas: Quotas,
    /// When the quotas were written.
    at: Revision,
    /// The addresses in the changed blocks as they were, as negative numbers.
    before: Vec<QuotaChange>,
    /// True if counters stay as they are where they may.
    leaves: bool,
}

/// A change of the number of a subject's addresses.
#[derive(Clone, Debug)]
struct QuotaChange {
    subject: QuotaSubject,
    /// Of those that Margay assigned to attachments.
    own: i64,
    /// Of all others: the counter does not have those that came after it.
    other: i64,
    /// How many there are without this change, once that is known to leave room.
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

    /// The change of the counter: an address that it may not have is never subtracted.
    fn counted(&self) -> i64 {
        self.own + self.other.max(0)
    }
}

/// Shows each address of a block that is in use and counts for a subject with a limit, with the subject's kind and name
/// and the address's entry. Addresses in cooldown, and those that wait for their workloads, count for nobody.
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

/// Adds the addresses of a block, or subtracts them.
fn add(changes: &mut Vec<QuotaChange>, quotas: &Quotas, block: &Block, sign: i64) {
    each_of(quotas, block, |kind, name, entry| {
        let (own, other) = if entry.get(NETWORK).is_some() { (sign, 0) } else { (0, sign) };
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

    /// Notes a block that is about to be changed.
    pub(super) fn note(&mut self, block: &Block) {
        if let Self::Some(counts) = self {
            add(&mut counts.before, &counts.quotas, block, -1);
        }
    }
}

impl WriteSet<'_> {
    /// Reads the quotas for an assignment: the commit will fail if they have changed by then.
    ///
    /// # Errors
    /// `Malformed` if what is stored are no quotas.
    pub async fn heed_quotas(&mut self) -> Result<()> {
        let stored = self.tx.get(&keys::quotas()).await?;
        self.limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()))?;
        Ok(())
    }

    /// The same for any other change, for which they are not guarded: damaged ones stand in nobody's way.
    pub(super) async fn read_quotas(&mut self) -> Result<()> {
        if !matches!(self.limits, QuotaLimits::Unread) {
            return Ok(());
        }
        let stored = self.tx.snapshot_get(&keys::quotas()).await?;
        let limits = QuotaLimits::of(stored.as_ref(), self.tx.written_at(&keys::quotas()));
        self.limits = limits.unwrap_or_else(|error| {
            tracing::warn!(%error, "passing over damaged quotas");
            QuotaLimits::None
        });
        Ok(())
    }

    /// Leaves the counters of released addresses as they are: for a caller that was overtaken on them.
    pub async fn leave_counters(&mut self) -> Result<()> {
        self.read_quotas().await?;
        if let QuotaLimits::Some(counts) = &mut self.limits {
            counts.leaves = true;
        }
        Ok(())
    }

    /// The changes so far, for each subject.
    fn quota_changes(&self, counts: &QuotaChanges) -> Vec<QuotaChange> {
        let mut changes = counts.before.clone();
        for block in self.changed.iter().filter_map(|cidr| self.blocks.get(cidr)?.as_ref()) {
            add(&mut changes, &counts.quotas, block, 1);
        }
        changes
    }

    /// Checks that all that gain addresses stay within their quotas. Without a store to count in, as a mere check has it,
    /// the counters are believed, and the log says whose quota is nearly used up.
    ///
    /// # Errors
    /// `Quota`; those of the store.
    pub async fn check_quotas(&mut self, store: Option<&dyn Store>) -> Result<()> {
        let QuotaLimits::Some(counts) = &self.limits else { return Ok(()) };
        let changes = self.quota_changes(counts);
        let QuotaLimits::Some(counts) = &mut self.limits else { return Ok(()) };
        counts.check(self.tx, changes, store).await
    }

    /// Writes the counters.
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

    /// Keeps the number of a subject.
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
                // An assignment that is counting now must count again.
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

/// Counts the addresses of these subjects in the blocks of a revision, in pages.
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
                Err(error) => tracing::warn!(%error, "passing over a damaged block"),
            }
        }
    }
    Ok(())
}

/// The keys of the counters of an attachment's network and node and of its pod's namespace, to be read along with others.
pub(crate) fn likely_counters(network: &str, node: &str, namespace: Option<&str>) -> impl Iterator<Item = Key> {
    let known = [(QuotaKind::Network, Some(network)), (QuotaKind::Node, Some(node)), (QuotaKind::Namespace, namespace)];
    known.map(|(kind, name)| name.map(|name| keys::quota_use(kind, name))).into_iter().flatten()
}
