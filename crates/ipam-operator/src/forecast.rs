//! Estimates when a pool will be full if the number of held addresses keeps growing at the recent rate.
//!
//! A forecast compares the current number of held addresses with the number at the oldest readable revision of the last
//! week. The age of the oldest readable revision is computed from the store's commit time, or else from a time that the
//! documents record.

use std::collections::BTreeMap;
use std::time::Duration;

use ipam_core::census::{AddressUse, Census};
use ipam_core::model::{AddressState, Block, Pool, keys};
use ipam_core::net::Count;
use ipam_core::samples::{Samples, oldest_revision};
use ipam_core::usage::{SnapshotReader, reread};
use ipnet::IpNet;
use kv::{Content, Deadline, Range, Revision, Store, StoreExt};
use serde::Serialize;
use time::OffsetDateTime;

use crate::Operator;
use crate::history::time_after;

/// Maximum period of the store's history that a forecast uses.
const MAX_HISTORY: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Minimum period of the store's history that a forecast needs.
pub const MIN_HISTORY: Duration = Duration::from_secs(10 * 60);

/// The forecasts of all pools.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Forecast {
    /// Length of the past period whose growth the forecast extrapolates, in seconds.
    pub history_seconds: u64,
    /// The forecasts of the pools, in the order in which the census lists the pools.
    pub pools: Vec<PoolForecast>,
}

/// The forecast of one pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolForecast {
    /// The pool's name.
    pub name: String,
    /// The pool's CIDR.
    pub cidr: IpNet,
    /// Number of the pool's addresses that can be assigned now or after their cooldown.
    pub free: Count,
    /// Whether and when the pool will be full.
    #[serde(flatten)]
    pub ahead: FillForecast,
}

impl PoolForecast {
    /// Adds a metric sample with the number of days until the pool is full. Adds no sample if the pool does not fill up
    /// or has no forecast.
    pub fn sample(&self, samples: &mut Samples) {
        if let Some(days) = self.ahead.days() {
            samples.of_days_until_full(&self.name, self.cidr, days);
        }
    }
}

/// Whether and how fast a pool fills.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum FillForecast {
    /// The pool has no free address.
    Full,
    /// The number of held addresses grows, and the pool will be full if the growth continues.
    Filling {
        /// Number of days until the pool is full.
        days: f64,
        /// The daily increase of the number of held addresses.
        per_day: f64,
    },
    /// The number of held addresses of the pool has not grown in the observed period.
    Steady,
    /// The store's history is shorter than [`MIN_HISTORY`].
    Short,
    /// The length of the store's history is unknown, because neither the store nor its documents record times.
    Unknown,
}

impl FillForecast {
    /// Number of days until the pool is full: 0 for a full pool, `None` for a pool that does not fill or has no
    /// forecast.
    pub fn days(&self) -> Option<f64> {
        match self {
            Self::Full => Some(0.0),
            Self::Filling { days, .. } => Some(*days),
            Self::Steady | Self::Short | Self::Unknown => None,
        }
    }
}

/// A past revision of the store that can still be read, and how long ago this revision was current.
#[derive(Clone, Copy, Debug)]
struct PastState {
    revision: Revision,
    age: Duration,
}

impl Operator {
    /// Forecasts when each pool of the census will be full. The forecast reads all blocks at one past revision, and
    /// opens a few short watches to find the times of past revisions.
    ///
    /// # Errors
    /// `Timeout` after the deadline; `Unsupported` if the store cannot be watched; any store error.
    pub async fn forecast(&self, census: &Census, deadline: Deadline) -> ipam_core::Result<Forecast> {
        let pools: Vec<&Pool> = census.pools.iter().map(|pool| &pool.pool).collect();
        let (then, held) = reread(|| self.held_then(&pools, census.revision, deadline)).await?;
        let age = then.map(|then| then.age);
        let mut forecast = Forecast { history_seconds: age.unwrap_or_default().as_secs(), pools: Vec::new() };
        for pool in &census.pools {
            let count = |wanted| pool.blocks.iter().map(|block| block.count(wanted)).sum::<usize>();
            let now = count(AddressUse::Used) + count(AddressUse::Borrowed);
            let free = pool.usage.available.plus(count(AddressUse::InCooldown).into());
            let before = held.get(pool.pool.name()).copied().unwrap_or_default();
            forecast.pools.push(PoolForecast {
                name: pool.pool.name().to_owned(),
                cidr: pool.pool.cidr(),
                free,
                ahead: forecast_fill(small(now), small(before), free.to_f64(), age),
            });
        }
        Ok(forecast)
    }

    /// Returns the oldest readable state of the last week, and the number of held addresses of each pool in that state.
    async fn held_then(
        &self,
        pools: &[&Pool],
        newest: Revision,
        deadline: Deadline,
    ) -> kv::Result<(Option<PastState>, BTreeMap<String, usize>)> {
        let mut held = BTreeMap::new();
        let then = past_state(&**self.ipam().store(), newest).await?;
        if let Some(then) = then.filter(|then| then.age >= MIN_HISTORY) {
            let mut reading = SnapshotReader::new(deadline);
            reading.at = then.revision;
            let at = self.ipam().now() - then.age;
            // Damaged blocks are logged and not counted in the forecast; an inspection reports damaged blocks as
            // findings.
            self.ipam()
                .for_each(Range::Prefix(keys::blocks_prefix(None)), &mut reading, |block: Block| {
                    if let Some(pool) = pools.iter().find(|pool| pool.cidr().contains(&block.cidr())) {
                        *held.entry(pool.name().to_owned()).or_default() += held_in(&block, at);
                    }
                })
                .await?;
        }
        Ok((then, held))
    }
}

/// Converts a number of addresses to `f64` without loss: blocks that fit in memory have fewer than 2^32 addresses in
/// all.
fn small(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

/// Forecasts when a pool will be full. The pool has `now` held and `free` free addresses, and had `before` held
/// addresses at the time `age` ago.
fn forecast_fill(now: f64, before: f64, free: f64, age: Option<Duration>) -> FillForecast {
    if free <= 0.0 {
        return FillForecast::Full;
    }
    let Some(age) = age else { return FillForecast::Unknown };
    if age < MIN_HISTORY {
        return FillForecast::Short;
    }
    let per_day = (now - before) / (age.as_secs_f64() / 86_400.0);
    if per_day > 0.0 { FillForecast::Filling { days: free / per_day, per_day } } else { FillForecast::Steady }
}

/// Counts the addresses of a block that were held at time `at`, or waited for their workload at this time.
fn held_in(block: &Block, at: OffsetDateTime) -> usize {
    let held = block.allocated().filter(|(ip, _)| matches!(block.lookup(*ip), AddressState::Assigned(_)));
    held.count() - block.overdue(at).count()
}

/// Finds the oldest state of the last week that can be read; `None` if the time of this state is unknown.
async fn past_state(store: &dyn Store, newest: Revision) -> kv::Result<Option<PastState>> {
    let blocks = Range::Prefix(keys::blocks_prefix(None));
    let everything = Range::Prefix(keys::ipam_prefix());
    let oldest = oldest_revision(store, newest).await?;
    let now = OffsetDateTime::now_utc();
    let age_of = |time: OffsetDateTime| Duration::try_from(now - time).unwrap_or_default();
    let Some(first) = time_after(store, &everything, oldest).await? else { return Ok(None) };
    if age_of(first) <= MAX_HISTORY {
        return Ok(Some(PastState { revision: oldest, age: age_of(first) }));
    }
    // Because the newest version of an existing block records a time, a watch from any earlier revision delivers at
    // least one change with a known time.
    let listing = store.list_at(blocks.clone(), Revision::UNSET, Content::KeysOnly).await?;
    let last = listing.kvs.iter().map(|kv| kv.mod_revision.get()).max().unwrap_or_default();
    // The binary search keeps two revisions, `old` and `young`, and narrows the range between them. The first change at
    // or after the revision `old` is older than a week. The first change at or after the revision `young`, if there is
    // one, was made within the last week.
    let (mut old, mut young) = (oldest.get(), last.max(oldest.get()) + 1);
    while old + 1 < young {
        let middle = old + (young - old) / 2;
        match time_after(store, &blocks, Revision::new(middle)).await? {
            Some(time) if age_of(time) > MAX_HISTORY => old = middle,
            _ => young = middle,
        }
    }
    Ok(Some(PastState { revision: Revision::new(old), age: MAX_HISTORY }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forecast_follows_past_use_of_pool() {
        let day = Some(Duration::from_secs(86_400));
        assert_eq!(forecast_fill(120.0, 100.0, 60.0, day), FillForecast::Filling { days: 3.0, per_day: 20.0 });
        assert_eq!(
            forecast_fill(120.0, 100.0, 60.0, Some(MAX_HISTORY)),
            FillForecast::Filling { days: 21.0, per_day: 20.0 / 7.0 }
        );
        assert_eq!(forecast_fill(100.0, 100.0, 60.0, day), FillForecast::Steady);
        assert_eq!(forecast_fill(90.0, 100.0, 60.0, day), FillForecast::Steady);
        assert_eq!(forecast_fill(90.0, 0.0, 0.0, day), FillForecast::Full);
        assert_eq!(forecast_fill(90.0, 0.0, 9.0, Some(Duration::from_secs(5))), FillForecast::Short);
        assert_eq!(forecast_fill(90.0, 0.0, 9.0, None), FillForecast::Unknown);
    }
}
