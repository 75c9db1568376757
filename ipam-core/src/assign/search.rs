//! Where blocks of a pool can be, and where they are.

use ipnet::IpNet;
use kv::{Key, Range};
use time::OffsetDateTime;

use crate::error::Result;
use crate::model::{Pool, keys};
use crate::pools;
use crate::reservations::Reservations;
use crate::timestamps::unix_nanos;
use crate::workset::Workset;

/// How many blocks are asked for in one round trip.
const PROBES: usize = 64;
/// In a pool with more than 2^12 blocks, stored ones are found by listing their keys rather than by asking for each.
const MOST_BITS_ASKED_FOR: u8 = 12;

/// All blocks that a pool can have, in the order in which a host walks through them. Hosts start at different blocks; in
/// pools whose blocks are single addresses, of which a host needs many, each walk starts elsewhere.
pub(super) fn walk(pool: &Pool, host: &str, now: OffsetDateTime) -> pools::Blocks {
    let shared = pool.block_size() < pool.family().bits();
    pools::blocks_from(pool, if shared { pools::start_of(host) } else { unix_nanos(now) })
}

/// The next blocks of a walk that have addresses to give, as many as one round trip asks for; `None` at the end.
pub(super) fn next_chunk(walk: &mut pools::Blocks, reservations: &Reservations) -> Option<Vec<IpNet>> {
    let chunk: Vec<IpNet> = std::iter::from_fn(|| walk.next_unreserved(reservations)).take(PROBES).collect();
    (!chunk.is_empty()).then_some(chunk)
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
