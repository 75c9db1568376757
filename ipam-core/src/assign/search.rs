//! Where blocks of a pool can be, and where they are.

use std::collections::BTreeSet;

use ipnet::IpNet;
use kv::{Key, Range};
use time::OffsetDateTime;

use crate::error::{Error, Result};
use crate::model::{PREFIX_LENGTH_ANNOTATION, Pool, keys};
use crate::net::overlap;
use crate::pools;
use crate::reservations::Reservations;
use crate::timestamps::unix_nanos;
use crate::workset::Workset;

/// The number of blocks that are queried in one round trip.
const PROBES: usize = 64;
/// The number of chunks that are taken from all over a pool: if 99 % of the pool is claimed, one of these places is
/// free with a probability of 92 %.
const SCATTERED: u64 = 4;
/// Smaller pools, of less than 2^9 blocks, are scanned in order.
const FEWEST_BITS_SCATTERED: u8 = 9;
/// In a pool with more than 2^12 blocks, stored ones are found by listing their keys rather than by querying each.
const MOST_BITS_ASKED_FOR: u8 = 12;

/// All blocks that a pool can have, in the order in which a host walks through them. Hosts start at different blocks; in
/// pools whose blocks are single addresses, of which a host needs many, each walk starts elsewhere.
pub(super) fn walk(pool: &Pool, host: &str, now: OffsetDateTime) -> pools::Blocks {
    let shared = pool.block_size() < pool.family().bits();
    pools::blocks_from(pool, if shared { pools::start_of(host) } else { unix_nanos(now) })
}

/// The places where a host searches for a block that is not stored yet, as many at a time as one round trip queries:
/// first from its start point on. Blocks that were claimed like that form long stretches, the longer the fuller the
/// pool is; so if the host has met one, it then tries places all over the pool. The others come in order.
pub(super) struct Places<'a> {
    pool: &'a Pool,
    walk: pools::Blocks,
    start: u64,
    chunk: u64,
}

impl<'a> Places<'a> {
    pub(super) fn new(pool: &'a Pool, host: &str, now: OffsetDateTime) -> Self {
        Self { pool, walk: walk(pool, host, now), start: pools::start_of(host), chunk: 0 }
    }

    /// The next blocks that have addresses to assign; `None` at the end.
    pub(super) fn next_chunk(&mut self, reservations: &Reservations) -> Option<Vec<IpNet>> {
        let chunk = self.chunk;
        self.chunk += 1;
        let found: Vec<IpNet> = match chunk {
            1..=SCATTERED if self.is_large() => self.scattered(chunk, reservations),
            _ => std::iter::from_fn(|| self.walk.next_unreserved(reservations)).take(PROBES).collect(),
        };
        (!found.is_empty()).then_some(found)
    }

    /// True if trying places all over the pool is no more work than scanning all of it.
    fn is_large(&self) -> bool {
        self.pool.block_size().saturating_sub(self.pool.cidr().prefix_len()) >= FEWEST_BITS_SCATTERED
    }

    /// Blocks all over the pool, others for each host and chunk.
    fn scattered(&self, chunk: u64, reservations: &Reservations) -> Vec<IpNet> {
        let first = chunk * PROBES as u64;
        let places = (first..first + PROBES as u64).map(|number| scatter(self.start.wrapping_add(number)));
        let blocks = places.filter_map(|place| pools::blocks_from(self.pool, place).next_unreserved(reservations));
        blocks.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Spreads numbers that are next to each other: multiplies by 2^64 over the golden ratio, and takes the upper half,
/// which depends on all bits of the number.
fn scatter(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// The blocks of a pool that may be stored, in the order of a host's walk. In a pool with very many blocks these are
/// those that are stored, by the text of their keys. Not guarded.
pub(super) async fn existing(work: &mut Workset<'_>, pool: &Pool, walk: pools::Blocks) -> Result<Vec<IpNet>> {
    if pool.block_size().saturating_sub(pool.cidr().prefix_len()) <= MOST_BITS_ASKED_FOR {
        return Ok(walk.collect());
    }
    let range = Range::Prefix(keys::blocks_prefix(Some(pool.family())));
    let stored: Vec<Key> = work.tx.snapshot_keys(&range).await?;
    let blocks = stored.iter().filter_map(keys::parse_block);
    Ok(blocks.filter(|cidr| pool.cidr().contains(cidr)).collect())
}

/// Refuses a new block of addresses in a pool that has blocks of prefixes: the annotation of the pool got lost. A program
/// that drops the annotation may have changed the pool's mode, too, so the mode says nothing.
///
/// # Errors
/// `Invalid`, with the block of prefixes; those of the store.
pub async fn refuse_among_prefixes(work: &mut Workset<'_>, pool: &Pool) -> Result<()> {
    if pool.prefix_length().is_some() {
        return Ok(());
    }
    let stored = Range::Prefix(keys::blocks_of_prefixes_prefix(pool.family()));
    let stored = work.tx.snapshot_keys(&stored).await?;
    if let Some(other) = stored.iter().filter_map(keys::parse_block).find(|other| overlap(*other, pool.cidr())) {
        return Err(Error::Invalid(format!(
            "pool {name} has addresses now, and prefixes of it are stored in block {other}; write its annotation \
             {PREFIX_LENGTH_ANNOTATION} again, as it was, with: margay apply",
            name = pool.name()
        )));
    }
    Ok(())
}
