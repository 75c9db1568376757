//! Pools and reservations: making them, and taking them away safely.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Range, StoreExt};

use crate::assign::{Gateway, bridge, define};
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Block, Document, IpReservation, NewPool, Pool, check_name, check_new_pool};
use crate::surroundings::decode_all;
use crate::workset::Workset;

impl Ipam {
    /// Makes a pool; with a gateway, one that is ready for a bridged network.
    ///
    /// Guards: no pool came or changed meanwhile.
    ///
    /// # Errors
    /// `Exists`; `Invalid`, with Calico's text, for a pool that must not be; a gateway that is not a host's address of it.
    pub async fn create_pool(&self, new: &NewPool, gateway: Option<IpAddr>, deadline: Deadline) -> Result<Pool> {
        let key = keys::resource(ResourceKind::IpPool, &new.name);
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        transact!(self, deadline, |tx| {
            tx.prefetch(vec![key.clone()], vec![pools.clone()]).await?;
            if tx.get(&key).await?.is_some() {
                return Err(Error::Exists(format!("pool {}", new.name)));
            }
            let others: Vec<Pool> = decode_all(&tx.list_none_newer(&pools).await?);
            let blocks = tx.snapshot_keys(&Range::Prefix(keys::blocks_prefix(None))).await?;
            let blocks: Vec<IpNet> = blocks.iter().filter_map(keys::parse_block).collect();
            check_new_pool(new, &others, &blocks).map_err(|error| Error::Invalid(error.to_string()))?;
            let pool = Pool::new(new, &self.uid(), self.now())?;
            tx.put(&key, pool.encode()?)?;
            if let Some(gateway) = gateway {
                let mut work = Workset::new(tx, self.now(), 0);
                bridge::prepare(self, &mut work, &pool, Gateway::At(gateway)).await?;
                work.write().await?;
            }
            Ok(pool)
        })
    }

    /// Deletes a pool of which no address is in use, with its empty blocks and the reservations that were made for it.
    ///
    /// It is disabled first, so that nothing is assigned from it meanwhile; then its blocks go, one commit each; then the
    /// pool itself. If an address turns out to be in use after all, the pool is enabled again.
    ///
    /// # Errors
    /// `NotFound`; `PoolInUse`.
    pub async fn delete_pool(&self, name: &str, deadline: Deadline) -> Result<()> {
        let pool = self.pool(name, deadline).await?;
        self.require_unused(&pool).await?;
        let was_enabled = !pool.is_disabled();
        if was_enabled {
            self.edit_pool(name, Pool::disable, deadline).await?;
        }
        let emptied = self.drop_blocks(&pool, deadline).await;
        if let (Err(_), true) = (&emptied, was_enabled) {
            self.edit_pool(name, Pool::enable, deadline).await?;
        }
        emptied?;
        let key = keys::resource(ResourceKind::IpPool, name);
        let made_for_it = [bridge::reservation_name(name), define::reservation_name(name)]
            .map(|reservation| keys::resource(ResourceKind::IpReservation, &reservation));
        transact!(self, deadline, |tx| {
            for key in made_for_it.iter().chain([&key]) {
                tx.get(key).await?;
                tx.delete(key)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    async fn pool(&self, name: &str, deadline: Deadline) -> Result<Pool> {
        let pools = self.inventory(deadline).await?.pools;
        pools.into_iter().find(|pool| pool.name() == name).ok_or_else(|| Error::NotFound(format!("pool {name}")))
    }

    async fn edit_pool(&self, name: &str, edit: impl Fn(&mut Pool), deadline: Deadline) -> Result<()> {
        let key = keys::resource(ResourceKind::IpPool, name);
        transact!(self, deadline, |tx| {
            let stored = tx.get(&key).await?.ok_or_else(|| Error::NotFound(format!("pool {name}")))?;
            let mut pool = Pool::decode(&key, stored.as_bytes())?;
            edit(&mut pool);
            Ok(tx.put(&key, pool.encode()?)?)
        })?;
        Ok(())
    }

    async fn blocks_of(&self, pool: &Pool) -> Result<Vec<Block>> {
        let listing = self.store().list(Range::Prefix(keys::blocks_prefix(Some(pool.family())))).await?;
        let pairs: Vec<_> = listing.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
        Ok(decode_all::<Block>(&pairs).into_iter().filter(|block| pool.cidr().contains(&block.cidr())).collect())
    }

    async fn require_unused(&self, pool: &Pool) -> Result<()> {
        let addresses = self.blocks_of(pool).await?.iter().map(held_count).sum();
        if addresses > 0 { Err(Error::PoolInUse { pool: pool.name().to_owned(), addresses }) } else { Ok(()) }
    }

    /// Deletes the blocks of a pool and their affinities, one commit each.
    async fn drop_blocks(&self, pool: &Pool, deadline: Deadline) -> Result<()> {
        for cidr in self.blocks_of(pool).await?.iter().map(Block::cidr) {
            transact!(self, deadline, |tx| {
                let mut work = Workset::new(tx, self.now(), 0);
                let Some(block) = work.block(cidr).await? else { return Ok(()) };
                let (addresses, owner) = (held_count(block), block.owner());
                if addresses > 0 {
                    return Err(Error::PoolInUse { pool: pool.name().to_owned(), addresses });
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

    /// Makes a reservation.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for a name that cannot be one.
    pub async fn create_reservation(&self, name: &str, networks: &[IpNet], deadline: Deadline) -> Result<()> {
        check_name(name).map_err(|reason| Error::Invalid(format!("reservation {name}: {reason}")))?;
        let key = keys::resource(ResourceKind::IpReservation, name);
        transact!(self, deadline, |tx| {
            if tx.get(&key).await?.is_some() {
                return Err(Error::Exists(format!("reservation {name}")));
            }
            Ok(tx.put(&key, IpReservation::new(name, networks, &self.uid(), self.now()).encode()?)?)
        })?;
        Ok(())
    }

    /// Deletes a reservation.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn delete_reservation(&self, name: &str, deadline: Deadline) -> Result<()> {
        let key = keys::resource(ResourceKind::IpReservation, name);
        transact!(self, deadline, |tx| {
            if tx.get(&key).await?.is_none() {
                return Err(Error::NotFound(format!("reservation {name}")));
            }
            Ok(tx.delete(&key)?)
        })?;
        Ok(())
    }
}

/// How many addresses of a block containers have; those that rest or that a host keeps for itself do not count.
fn held_count(block: &Block) -> usize {
    if block.is_empty() {
        return 0;
    }
    let held = block.allocated().filter(|(_, entry)| entry.released_at().is_none());
    held.count()
}
