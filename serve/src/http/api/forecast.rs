//! The day on which a pool will be full, if it goes on filling as it did.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use ipam_core::census::{AddressUse, Census};
use ipam_core::model::{AddressState, Block, Pool, keys};
use ipam_core::samples::oldest_revision;
use kv::{Content, ErrorKind, Range, Revision, Store, StoreExt};
use serde::Serialize;
use time::OffsetDateTime;

use super::super::Shown;
use super::super::answer::{Answer, Failure};
use super::scan::each_block;
use super::{made, past};

/// The longest look back.
const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// A history that is shorter says nothing.
const SHORTEST: Duration = Duration::from_secs(10 * 60);
/// The time for which a forecast is used again: it changes slowly, and takes two readings of all blocks.
const LASTS: Duration = Duration::from_secs(30);
/// The most attempts, as the store may give up history while it is read.
const ATTEMPTS: usize = 3;

#[derive(Debug, Default, PartialEq, Serialize)]
struct Reported {
    /// The length of the history, in seconds.
    history_seconds: u64,
    pools: Vec<ReportedPool>,
}

#[derive(Debug, PartialEq, Serialize)]
struct ReportedPool {
    name: String,
    #[serde(flatten)]
    ahead: Ahead,
}

/// The future of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Ahead {
    /// It has no address left.
    Full,
    /// It will be full in so many days.
    Filling { days: f64, per_day: f64 },
    /// It has as many free addresses as before, or more.
    Steady,
    /// There is too little history.
    Short,
    /// The store keeps no times.
    Unknown,
}

/// A state of the past.
#[derive(Clone, Copy, Debug)]
struct Then {
    revision: Revision,
    age: Duration,
}

pub(super) async fn answer(shown: &Shown) -> Result<Answer, Failure> {
    let reported = shown.asked.forecast.get("", LASTS, async {
        let census = shown.asked.census(&shown.ipam).await?;
        shown.asked.alone(forecast(&*shown.store, &census)).await
    });
    Ok(made(&reported.await?))
}

async fn forecast(store: &dyn Store, census: &Census) -> Result<String, Failure> {
    let pools: Vec<&Pool> = census.pools.iter().map(|pool| &pool.pool).collect();
    let mut attempt = 0;
    let (then, held) = loop {
        attempt += 1;
        match held_then(store, &pools, census.revision).await {
            Ok(found) => break found,
            Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) && attempt < ATTEMPTS => {}
            Err(error) => return Err(error.into()),
        }
    };
    let age = then.map(|then| then.age);
    let mut reported = Reported { history_seconds: age.unwrap_or_default().as_secs(), pools: Vec::new() };
    for pool in &census.pools {
        let count = |wanted| pool.blocks.iter().map(|block| block.count(wanted)).sum::<usize>();
        let now = count(AddressUse::Used) + count(AddressUse::Borrowed);
        // Resting addresses are free in a while.
        let free = pool.usage.available.to_f64() + small(count(AddressUse::InCooldown));
        let before = held.get(pool.pool.name()).copied().unwrap_or_default();
        reported.pools.push(ReportedPool {
            name: pool.pool.name().to_owned(),
            ahead: ahead(small(now), small(before), free, age),
        });
    }
    serde_json::to_string(&reported).map_err(Failure::store)
}

/// A number of addresses that blocks in memory have.
fn small(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

/// The future of a pool with `now` held and `free` other addresses, in which `before` were held so long ago.
fn ahead(now: f64, before: f64, free: f64, age: Option<Duration>) -> Ahead {
    if free <= 0.0 {
        return Ahead::Full;
    }
    let Some(age) = age else { return Ahead::Unknown };
    if age < SHORTEST {
        return Ahead::Short;
    }
    let per_day = (now - before) / (age.as_secs_f64() / 86_400.0);
    if per_day > 0.0 { Ahead::Filling { days: free / per_day, per_day } } else { Ahead::Steady }
}

/// The oldest state of the last week that can be read, and the number of held addresses of each pool in it.
async fn held_then(
    store: &dyn Store,
    pools: &[&Pool],
    newest: Revision,
) -> kv::Result<(Option<Then>, BTreeMap<String, usize>)> {
    let mut held = BTreeMap::new();
    let then = then(store, newest).await?;
    if let Some(then) = then.filter(|then| then.age >= SHORTEST) {
        each_block(store, then.revision, |block| {
            if let Some(pool) = pools.iter().find(|pool| pool.cidr().contains(&block.cidr())) {
                *held.entry(pool.name().to_owned()).or_default() += held_in(&block);
            }
            ControlFlow::Continue(())
        })
        .await?;
    }
    Ok((then, held))
}

fn held_in(block: &Block) -> usize {
    block.allocated().filter(|(ip, _)| matches!(block.lookup(*ip), AddressState::Assigned(_))).count()
}

/// The oldest state of the last week that can be read. `None` if its time is not known.
async fn then(store: &dyn Store, newest: Revision) -> kv::Result<Option<Then>> {
    let blocks = Range::Prefix(keys::blocks_prefix(None));
    let everything = Range::Prefix(keys::ipam_prefix());
    let oldest = oldest_revision(store, newest).await?;
    let now = OffsetDateTime::now_utc();
    let age_of = |time: OffsetDateTime| Duration::try_from(now - time).unwrap_or_default();
    let Some(first) = past::time_after(store, &everything, oldest).await? else { return Ok(None) };
    if age_of(first) <= WEEK {
        return Ok(Some(Then { revision: oldest, age: age_of(first) }));
    }
    // The last change of a block that is there has a time, so that each look before it finds one.
    let listing = store.list_at(blocks.clone(), Revision::UNSET, Content::KeysOnly).await?;
    let last = listing.kvs.iter().map(|kv| kv.mod_revision.get()).max().unwrap_or_default();
    // The change at `old` is older than a week; the one at `young` is not, or is not there.
    let (mut old, mut young) = (oldest.get(), last.max(oldest.get()) + 1);
    while old + 1 < young {
        let middle = old + (young - old) / 2;
        match past::time_after(store, &blocks, Revision::new(middle)).await? {
            Some(time) if age_of(time) > WEEK => old = middle,
            _ => young = middle,
        }
    }
    Ok(Some(Then { revision: Revision::new(old), age: WEEK }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_fills_as_it_did() {
        let day = Some(Duration::from_secs(86_400));
        assert_eq!(ahead(120.0, 100.0, 60.0, day), Ahead::Filling { days: 3.0, per_day: 20.0 });
        assert_eq!(ahead(120.0, 100.0, 60.0, Some(WEEK)), Ahead::Filling { days: 21.0, per_day: 20.0 / 7.0 });
        assert_eq!(ahead(100.0, 100.0, 60.0, day), Ahead::Steady);
        assert_eq!(ahead(90.0, 100.0, 60.0, day), Ahead::Steady);
        assert_eq!(ahead(90.0, 0.0, 0.0, day), Ahead::Full);
        assert_eq!(ahead(90.0, 0.0, 9.0, Some(Duration::from_secs(5))), Ahead::Short);
        assert_eq!(ahead(90.0, 0.0, 9.0, None), Ahead::Unknown);
    }
}
