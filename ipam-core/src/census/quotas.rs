//! How far quotas are used.

use std::collections::BTreeMap;

use kv::{Content, Range, Revision};

use crate::ipam::Ipam;
use crate::model::{Block, Document, QuotaCount, Quotas, Subject, keys};
use crate::usage::Reading;
use crate::workset::each_of;

/// The use of a quota by one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaUse {
    /// The namespace, network or node.
    pub subject: Subject,
    /// How many addresses it may have.
    pub limit: u64,
    /// How many it has.
    pub used: u64,
}

impl QuotaUse {
    /// The used part in percent, rounded down; 100 for a limit of 0.
    pub fn percent(&self) -> u64 {
        self.used.saturating_mul(100).checked_div(self.limit).unwrap_or(100)
    }
}

/// Counts, block by block, what the subjects with a limit have.
pub(super) struct QuotaTally {
    quotas: Quotas,
    counted: BTreeMap<Subject, u64>,
}

impl QuotaTally {
    pub(super) fn add(&mut self, block: &Block) {
        each_of(&self.quotas, block, |kind, name, _| *self.counted.entry(Subject::new(kind, name)).or_default() += 1);
    }

    /// The subjects with a limit of their own, and all that the limit for any other holds for and that have addresses.
    pub(super) fn finish(mut self) -> Vec<QuotaUse> {
        for (subject, _) in self.quotas.all().filter(|(subject, _)| subject.name != Quotas::ANY_OTHER) {
            self.counted.entry(subject).or_default();
        }
        let used = |(subject, used): (Subject, u64)| {
            let limit = self.quotas.limit(subject.kind, &subject.name)?;
            Some(QuotaUse { subject, limit, used })
        };
        self.counted.into_iter().filter_map(used).collect()
    }
}

impl Ipam {
    /// The quotas, and what to count their use with.
    pub(super) async fn read_quotas(&self, reading: &mut Reading) -> kv::Result<QuotaTally> {
        let (quotas, counted) = self.read_counters(reading, Range::Key(keys::quotas())).await?;
        Ok(QuotaTally { quotas, counted })
    }

    /// The use of the quotas by their counters, which may be too high, but not too low unless others assign, too. A
    /// subject that has got no address since the quotas were changed is missing.
    pub(super) async fn counted_quotas(&self, reading: &mut Reading) -> kv::Result<Vec<QuotaUse>> {
        let (quotas, counted) = self.read_counters(reading, Range::prefix(keys::QUOTAS_PREFIX)).await?;
        let used = |(subject, used): (Subject, u64)| {
            let limit = quotas.limit(subject.kind, &subject.name)?;
            Some(QuotaUse { subject, limit, used })
        };
        Ok(counted.into_iter().filter_map(used).collect())
    }

    async fn read_counters(&self, reading: &mut Reading, range: Range) -> kv::Result<(Quotas, BTreeMap<Subject, u64>)> {
        let (mut quotas, mut at, mut counters) = (Quotas::default(), Revision::UNSET, Vec::new());
        self.each(range, Content::Full, reading, |kv| {
            if let Some(subject) = keys::parse_quota_use(&kv.key) {
                counters.push((subject, kv.value.clone()));
            } else if kv.key == keys::quotas() {
                at = kv.mod_revision;
                quotas = Quotas::decode(&kv.key, kv.value.as_bytes()).unwrap_or_else(|error| {
                    tracing::warn!(%error, "passing over damaged quotas");
                    Quotas::default()
                });
            }
        })
        .await?;
        let good = |(subject, value)| Some((subject, QuotaCount::good(Some(&value), at)?));
        Ok((quotas, counters.into_iter().filter_map(good).collect()))
    }
}
