//! Deleting a pool, safely: nothing is assigned from it any more when its blocks go, and they go before it.
//!
//! Each step is a commit of its own, so that one that was broken off can be begun anew and comes to its end.

use std::collections::BTreeSet;
use std::time::Duration;

use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{bridge, define};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, IpReservation, Pool};
use ipam_core::surroundings::decode_all;
use ipam_core::workset::Workset;
use ipam_core::{Error, PlaceInUse, Resource, Result};
use ipam_core::{Nodes, transact};
use ipnet::IpNet;
use kv::{Deadline, Range, StoreExt};

use crate::Operator;
use crate::documents::{DocumentError, DocumentKind};

/// How often the blocks of a pool are looked for: one may come from an assignment that began before the pool was off.
const LOOKS: usize = 3;

/// How long assignments of others may be under way that do not look at the pool again before they write: as in Calico.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// The effect of a deletion where addresses of the pool are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InUse {
    /// It refuses.
    #[default]
    Refuse,
    /// It refuses, but for the pool of a bridged network. The holder of such an address keeps it, and can release it;
    /// its block is in no pool until then.
    DeleteBridged,
}

impl Operator {
    /// Deletes a pool of which no address is in use, with its empty blocks and the reservations that were made for it.
    ///
    /// It is disabled first, so that nothing is assigned from it meanwhile; then its blocks go, one commit each; then the
    /// pool itself. If an address turns out to be in use after all, the pool is enabled again. A deletion that was broken
    /// off leaves the pool disabled; the next one goes on from there.
    ///
    /// # Errors
    /// `NotFound`; `PoolInUse`.
    pub async fn delete_pool(&self, name: &str, deadline: Deadline) -> Result<()> {
        self.delete_pool_if(name, InUse::Refuse, deadline).await
    }

    /// Like [`Self::delete_pool`], and says what becomes of a pool in use.
    ///
    /// # Errors
    /// `NotFound`; `PoolInUse`.
    pub async fn delete_pool_if(&self, name: &str, in_use: InUse, deadline: Deadline) -> Result<()> {
        let (pool, in_use) = self.deletable(name, in_use, deadline).await?;
        let was_enabled = !pool.is_disabled();
        if was_enabled {
            self.edit_pool(name, Pool::disable, deadline).await?;
            if self.ipam().nodes() == Nodes::Registered {
                tokio::time::sleep(UNDER_WAY).await;
            }
        }
        let done = self.empty_and_drop(&pool, in_use, deadline).await;
        if let (Err(_), true) = (&done, was_enabled)
            && let Err(error) = self.edit_pool(name, Pool::enable, deadline).await
        {
            tracing::warn!(pool = name, %error, "the pool stays disabled");
        }
        done
    }

    /// The pool, if it can be deleted, and what is to become of addresses that come to be in use only now.
    async fn deletable(&self, name: &str, in_use: InUse, deadline: Deadline) -> Result<(Pool, InUse)> {
        let inventory = self.ipam().inventory(deadline).await?;
        let pool = inventory.pools.into_iter().find(|pool| pool.name() == name);
        let pool = pool.ok_or_else(|| Resource::Pool.not_found(name))?;
        let gateway = gateway_of(&pool, &inventory.reservations);
        let in_use = if gateway.is_some() { in_use } else { InUse::Refuse };
        self.require_unused(&pool, gateway, in_use).await?;
        Ok((pool, in_use))
    }

    pub(crate) async fn edit_pool(&self, name: &str, edit: impl Fn(&mut Pool), deadline: Deadline) -> Result<()> {
        let key = keys::resource(ResourceKind::IpPool, name);
        transact!(self.ipam(), deadline, |tx| {
            let stored = tx.get(&key).await?.ok_or_else(|| Resource::Pool.not_found(name))?;
            let mut pool = Pool::decode(&key, stored.as_bytes())?;
            edit(&mut pool);
            Ok(tx.put(&key, pool.encode()?)?)
        })
    }

    async fn require_unused(&self, pool: &Pool, gateway: Option<String>, in_use: InUse) -> Result<()> {
        let places: Vec<PlaceInUse> = self.blocks_of(pool).await?.iter().filter_map(place_in_use).collect();
        if places.is_empty() || in_use == InUse::DeleteBridged {
            return Ok(());
        }
        Err(pool_in_use(pool, places, gateway))
    }

    async fn blocks_of(&self, pool: &Pool) -> Result<Vec<Block>> {
        let listing = self.ipam().store().list(Range::Prefix(keys::blocks_prefix(Some(pool.family())))).await?;
        let is_of = |cidr: IpNet| pool.cidr().contains(&cidr);
        let kvs = listing.kvs.into_iter().filter(|kv| keys::parse_block(&kv.key).is_some_and(is_of));
        let pairs: Vec<_> = kvs.map(|kv| (kv.key, kv.value)).collect();
        Ok(decode_all(&pairs))
    }

    async fn empty_and_drop(&self, pool: &Pool, in_use: InUse, deadline: Deadline) -> Result<()> {
        for _ in 0..LOOKS {
            self.drop_blocks(pool, in_use, deadline).await?;
            let which = match in_use {
                InUse::Refuse => ReleaseIf::Empty,
                InUse::DeleteBridged => ReleaseIf::Any,
            };
            self.ipam().release_pool_affinities(pool.cidr(), which, deadline).await?;
            if self.drop_pool(pool, in_use, deadline).await? {
                return Ok(());
            }
        }
        Err(Error::Invalid(format!("blocks of pool {} are claimed faster than they can be taken away", pool.name())))
    }

    /// Deletes the blocks of a pool and their affinities, one commit each. Those in use stay, where that is wanted.
    async fn drop_blocks(&self, pool: &Pool, in_use: InUse, deadline: Deadline) -> Result<()> {
        for cidr in self.blocks_of(pool).await?.iter().map(Block::cidr) {
            transact!(self.ipam(), deadline, |tx| {
                let mut work = Workset::new(tx, self.ipam().now(), 0);
                let Some(block) = work.block(cidr).await? else { return Ok(()) };
                let owner = block.owner();
                if let Some(place) = place_in_use(block) {
                    return match in_use {
                        InUse::Refuse => Err(pool_in_use(pool, vec![place], None)),
                        InUse::DeleteBridged => Ok(()),
                    };
                }
                if let Some(owner) = owner {
                    work.drop_affinity(&owner, cidr).await?;
                }
                work.change(cidr, Block::clear_owner).await?;
                work.write().await
            })?;
        }
        Ok(())
    }

    /// Deletes the pool and what was made for it; false if a block has come in the meantime. Somebody else may have deleted it
    /// already, but not enabled it again, or made another one in its place.
    async fn drop_pool(&self, pool: &Pool, in_use: InUse, deadline: Deadline) -> Result<bool> {
        let key = keys::resource(ResourceKind::IpPool, pool.name());
        let made_for_it = [bridge::reservation_name(pool.name()), define::reservation_name(pool.name())]
            .map(|reservation| keys::resource(ResourceKind::IpReservation, &reservation));
        let blocks = Range::Prefix(keys::blocks_prefix(Some(pool.family())));
        transact!(self.ipam(), deadline, |tx| {
            if let Some(value) = tx.get(&key).await? {
                let now = Pool::decode(&key, value.as_bytes())?;
                if !now.is_disabled() || now.cidr() != pool.cidr() {
                    return Err(DocumentError::Conflict(DocumentKind::Pool, pool.name().to_owned()).into());
                }
            }
            for key in made_for_it.iter().chain([&key]) {
                tx.get(key).await?;
                tx.delete(key)?;
            }
            let blocks = tx.snapshot_keys(&blocks).await?;
            let mut inside = blocks.iter().filter_map(keys::parse_block).filter(|cidr| pool.cidr().contains(cidr));
            if in_use == InUse::Refuse && inside.next().is_some() {
                tx.forget_writes();
                return Ok(false);
            }
            Ok(true)
        })
    }
}

fn pool_in_use(pool: &Pool, places: Vec<PlaceInUse>, gateway: Option<String>) -> Error {
    let addresses = places.iter().map(|place| place.addresses).sum();
    Error::PoolInUse { pool: pool.name().to_owned(), addresses, places, gateway }
}

/// The gateway of a pool, if it is that of a bridged network.
pub(crate) fn gateway_of(pool: &Pool, reservations: &[IpReservation]) -> Option<String> {
    let name = bridge::reservation_name(pool.name());
    let reservation = reservations.iter().find(|reservation| reservation.name() == name)?;
    reservation.resource().annotation(bridge::GATEWAY_ANNOTATION).map(str::to_owned)
}

/// The addresses of a block that containers have, if any; those that rest or that a host keeps for itself do not count.
fn place_in_use(block: &Block) -> Option<PlaceInUse> {
    if block.is_empty() {
        return None;
    }
    let held: Vec<_> = block.allocated().filter(|(_, entry)| entry.released_at().is_none()).collect();
    let owner = block.owner().and_then(|owner| owner.node().map(str::to_owned));
    let node = |entry: &ipam_core::model::Attribute| entry.node().map(str::to_owned).or_else(|| owner.clone());
    let nodes: BTreeSet<String> = held.iter().filter_map(|(_, entry)| node(entry)).collect();
    let place = PlaceInUse { block: block.cidr(), addresses: held.len(), nodes: nodes.into_iter().collect() };
    (place.addresses > 0).then_some(place)
}
