//! Sets, deletes and lists quotas.

use std::collections::BTreeMap;

use ipam_core::census::QuotaUse;
use ipam_core::model::{Document, QuotaSubject, Quotas, keys};
use ipam_core::{ErrorSubject, Result, transact};
use kv::{Deadline, Range, Transaction};
use serde::Serialize;

use crate::Operator;

/// Maximum number of quota counters deleted in one commit.
const COUNTERS_PER_COMMIT: usize = 50;

/// A quota of a namespace, network or node, and the number of addresses that count against the quota. A `QuotaRow` is
/// an entry in the JSON output of `margay quota list` and a line in the quota table of the daemon's web page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QuotaRow {
    /// The kind of the quota's subject, which is `namespace`, `network` or `node`.
    pub kind: &'static str,
    /// Maximum number of addresses that the namespace, network or node may have.
    pub limit: u64,
    /// The name of the namespace, network or node, or [`Quotas::ANY_OTHER`].
    pub name: String,
    /// Percentage of `limit` that is used, rounded down; `None` in the row of [`Quotas::ANY_OTHER`].
    pub percent: Option<u64>,
    /// Number of addresses of the namespace, network or node; `None` in the row of [`Quotas::ANY_OTHER`].
    pub used: Option<u64>,
}

impl QuotaRow {
    fn new(subject: QuotaSubject, limit: u64) -> Self {
        Self { kind: subject.kind.as_str(), limit, name: subject.name, percent: None, used: None }
    }
}

impl From<&QuotaUse> for QuotaRow {
    fn from(its: &QuotaUse) -> Self {
        Self { percent: Some(its.percent()), used: Some(its.used), ..Self::new(its.subject.clone(), its.limit) }
    }
}

impl Operator {
    /// Sets the maximum number of addresses of a namespace, network or node, and returns its previous limit. A new
    /// limit that is lower than the number of addresses in use releases no address. The name [`Quotas::ANY_OTHER`]
    /// stands for every subject without a limit of its own.
    ///
    /// # Errors
    /// `Malformed` if the stored quotas are damaged; any store error.
    pub async fn set_quota(&self, subject: &QuotaSubject, limit: u64, deadline: Deadline) -> Result<Option<u64>> {
        transact!(self.ipam(), deadline, |tx| {
            let mut quotas = read(tx).await?;
            let before = quotas.set(subject, Some(limit));
            if before != Some(limit) {
                tx.put(&keys::quotas(), quotas.encode()?)?;
            }
            Ok(before)
        })
    }

    /// Deletes a quota, and the address counters of all subjects that no longer have a limit, and returns the deleted
    /// limit.
    ///
    /// # Errors
    /// `NotFound` if the subject has no limit; `Malformed` if the stored quotas are damaged; any store error.
    pub async fn delete_quota(&self, subject: &QuotaSubject, deadline: Deadline) -> Result<u64> {
        let limit = transact!(self.ipam(), deadline, |tx| {
            let mut quotas = read(tx).await?;
            let limit = quotas.set(subject, None);
            if limit.is_none() {
                return Ok(None);
            }
            if quotas.is_empty() {
                tx.delete(&keys::quotas())?;
            } else {
                tx.put(&keys::quotas(), quotas.encode()?)?;
            }
            Ok(limit)
        })?;
        // Stale counters are deleted even if the quota is not stored, because an interrupted deletion may have deleted
        // the quota and left counters in the store.
        while self.sweep_counters(deadline).await? == COUNTERS_PER_COMMIT {}
        limit.ok_or_else(|| ErrorSubject::Quota.not_found(subject))
    }

    /// Deletes at most [`COUNTERS_PER_COMMIT`] quota counters of subjects without a limit, and returns the number of
    /// deleted counters.
    async fn sweep_counters(&self, deadline: Deadline) -> Result<usize> {
        transact!(self.ipam(), deadline, |tx| {
            let quotas = read(tx).await?;
            let mut swept = 0;
            for key in tx.snapshot_keys(&Range::prefix(keys::QUOTAS_PREFIX)).await? {
                let Some(subject) = keys::parse_quota_use(&key) else { continue };
                if swept < COUNTERS_PER_COMMIT && quotas.limit(subject.kind, &subject.name).is_none() {
                    tx.get(&key).await?;
                    tx.delete(&key)?;
                    swept += 1;
                }
            }
            Ok(swept)
        })
    }

    /// Returns all quotas, sorted by kind and name, each with the number of addresses that the subject has in all
    /// blocks. The rows of [`Quotas::ANY_OTHER`] have a limit, but no number of addresses.
    ///
    /// # Errors
    /// `Timeout` after the deadline; any store error.
    pub async fn quotas(&self, deadline: Deadline) -> Result<Vec<QuotaRow>> {
        let quotas = transact!(reading self.ipam(), deadline, |tx| read(tx).await)?;
        let others = quotas.all().filter(|(subject, _)| subject.name == Quotas::ANY_OTHER);
        let others = others.map(|(subject, limit)| (subject.clone(), QuotaRow::new(subject, limit)));
        let uses = self.ipam().census(deadline).await?.quotas;
        let uses = uses.into_iter().map(|one| (one.subject.clone(), QuotaRow::from(&one)));
        Ok(BTreeMap::from_iter(others.chain(uses)).into_values().collect())
    }
}

async fn read(tx: &mut Transaction) -> Result<Quotas> {
    let key = keys::quotas();
    Ok(match tx.get(&key).await? {
        Some(value) => Quotas::decode(&key, value.as_bytes())?,
        None => Quotas::default(),
    })
}
