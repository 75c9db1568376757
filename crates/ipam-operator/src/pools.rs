//! Deletes a pool, and splits a pool into pools of equal size.
//!
//! A pool is deleted in three steps. First the pool is disabled, so that no more addresses are assigned from it. After
//! the pool is disabled, its blocks are deleted, and finally the pool document. Each step of a pool's deletion has its
//! own commits. After an interrupted deletion, a repeated deletion of the pool continues with the remaining steps.
//!
//! A pool can be split into several smaller pools, called parts. The split of a pool does not change its blocks and
//! addresses; afterwards, each block belongs to the part that contains it. A split into up to 60 parts is one commit
//! that creates the parts and deletes the pool, so readers see either the pool or all parts. More than 60 new parts do
//! not fit in one commit. If a pool is split into more than 60 parts, the pool is first disabled and annotated with the
//! number of parts. The parts are created in several commits while the pool is disabled, and each part can be used as
//! soon as its document exists. The disabled pool is deleted after all its parts exist, so an address is never in two
//! enabled pools. An interrupted split of a pool continues when the same split is requested again.

use std::collections::BTreeSet;
use std::time::Duration;

use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{bridge, define};
use ipam_core::assign_context::decode_all;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, IpReservation, Pool};
use ipam_core::write_set::WriteSet;
use ipam_core::{BlockInUse, Error, ErrorSubject, Nodes, Result, transact};
use ipnet::IpNet;
use kv::{Deadline, Key, Range, StoreExt, Transaction};

use crate::Operator;
use crate::documents::{DocumentError, DocumentKind};

/// Maximum number of times that the deletion of a pool lists the pool's blocks and deletes them. An assignment that
/// began before the pool was disabled can add a block after the deletion has listed the blocks.
const MAX_BLOCK_LISTINGS: usize = 3;

/// After disabling a pool for deletion, how long to wait for running assignments of other programs. Other programs,
/// such as Calico, do not check before they write whether the pool was disabled.
const ASSIGNMENT_GRACE: Duration = Duration::from_millis(500);

/// Whether a pool with addresses in use may be deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InUse {
    /// The deletion of a pool fails if addresses of the pool are in use.
    #[default]
    Refuse,
    /// The pool of a bridged network is deleted even if addresses are in use. The deletion of a pool that does not
    /// belong to a bridged network fails if addresses of the pool are in use. Containers that have an address of the
    /// deleted pool keep it, and a later DEL releases it. A block of a deleted pool exists until all addresses of the
    /// block are released.
    DeleteBridged,
}

impl Operator {
    /// Deletes a pool without addresses in use, together with the pool's empty blocks and the reservations that were
    /// made for the pool.
    ///
    /// The pool is disabled first, so that no address is assigned from the pool. After the pool is disabled, its blocks
    /// are deleted, one commit each, and finally the pool document. If the deletion fails, for example because an
    /// address is in use, the pool is enabled again. After an interrupted deletion the pool stays disabled, and the
    /// next call for this pool continues the deletion.
    ///
    /// # Errors
    /// `NotFound` if the pool does not exist; `PoolInUse` if addresses of the pool are in use; any store error.
    pub async fn delete_pool(&self, name: &str, deadline: Deadline) -> Result<()> {
        self.delete_pool_if(name, InUse::Refuse, deadline).await
    }

    /// Deletes a pool like [`Self::delete_pool`]; `in_use` selects whether a pool with addresses in use may be deleted.
    ///
    /// # Errors
    /// `NotFound` if the pool does not exist; `PoolInUse` if addresses of the pool are in use; any store error.
    pub async fn delete_pool_if(&self, name: &str, in_use: InUse, deadline: Deadline) -> Result<()> {
        let (pool, in_use) = self.deletable(name, in_use, deadline).await?;
        let was_enabled = !pool.is_disabled();
        if was_enabled {
            self.edit_pool(name, Pool::disable, deadline).await?;
            if self.ipam().nodes() == Nodes::Registered {
                tokio::time::sleep(ASSIGNMENT_GRACE).await;
            }
        }
        let done = self.empty_and_drop(&pool, in_use, deadline).await;
        if let (Err(_), true) = (&done, was_enabled)
            && let Err(error) = self.edit_pool(name, Pool::enable, deadline).await
        {
            tracing::warn!(
                pool = name,
                %error,
                "cannot delete the pool, and cannot enable the pool again; the pool stays disabled"
            );
        }
        done
    }

    /// Reads the pool and checks that the pool can be deleted. Returns the pool, and `in_use` reduced to
    /// [`InUse::Refuse`] if the pool does not belong to a bridged network.
    async fn deletable(&self, name: &str, in_use: InUse, deadline: Deadline) -> Result<(Pool, InUse)> {
        let inventory = self.ipam().inventory(deadline).await?;
        let pool = inventory.pools.into_iter().find(|pool| pool.name() == name);
        let pool = pool.ok_or_else(|| ErrorSubject::Pool.not_found(name))?;
        let gateway = gateway_of(&pool, &inventory.reservations);
        let in_use = if gateway.is_some() { in_use } else { InUse::Refuse };
        self.require_unused(&pool, gateway, in_use).await?;
        Ok((pool, in_use))
    }

    async fn edit_pool(&self, name: &str, edit: impl Fn(&mut Pool), deadline: Deadline) -> Result<()> {
        let key = keys::resource(ResourceKind::IpPool, name);
        transact!(self.ipam(), deadline, |tx| {
            let stored = tx.get(&key).await?.ok_or_else(|| ErrorSubject::Pool.not_found(name))?;
            let mut pool = Pool::decode(&key, stored.as_bytes())?;
            edit(&mut pool);
            Ok(tx.put(&key, pool.encode()?)?)
        })
    }

    async fn require_unused(&self, pool: &Pool, gateway: Option<String>, in_use: InUse) -> Result<()> {
        let places: Vec<BlockInUse> = self.blocks_of(pool).await?.iter().filter_map(place_in_use).collect();
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
        for _ in 0..MAX_BLOCK_LISTINGS {
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

    /// Deletes the blocks of a pool and the affinities to these blocks, with one commit for each block. If addresses of
    /// a block are in use, the deletion fails, or keeps the block with [`InUse::DeleteBridged`].
    async fn drop_blocks(&self, pool: &Pool, in_use: InUse, deadline: Deadline) -> Result<()> {
        for cidr in self.blocks_of(pool).await?.iter().map(Block::cidr) {
            transact!(self.ipam(), deadline, |tx| {
                let mut work = WriteSet::new(tx, self.ipam().now(), 0);
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

    /// Deletes the pool's document and the reservations that were made for the pool. Returns false and deletes nothing
    /// if another writer has added a block to the pool. Fails with a conflict if another writer has enabled or replaced
    /// the pool meanwhile. Succeeds if the pool document is already deleted.
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

fn pool_in_use(pool: &Pool, places: Vec<BlockInUse>, gateway: Option<String>) -> Error {
    let addresses = places.iter().map(|place| place.addresses).sum();
    Error::PoolInUse { pool: pool.name().to_owned(), addresses, places, gateway }
}

/// The gateway of a bridged network, as recorded in the reservation for the network's pool; `None` for any other pool.
fn gateway_of(pool: &Pool, reservations: &[IpReservation]) -> Option<String> {
    let name = bridge::reservation_name(pool.name());
    let reservation = reservations.iter().find(|reservation| reservation.name() == name)?;
    reservation.resource().annotation(bridge::GATEWAY_ANNOTATION).map(str::to_owned)
}

/// Counts the held addresses of a block without those in cooldown, and lists the nodes for which they are held. Returns
/// `None` if no address of the block is held except those that a Windows host reserves for itself.
fn place_in_use(block: &Block) -> Option<BlockInUse> {
    if block.is_empty() {
        return None;
    }
    let held: Vec<_> = block.allocated().filter(|(_, entry)| entry.released_at().is_none()).collect();
    let owner = block.owner().and_then(|owner| owner.node().map(str::to_owned));
    let node = |entry: &ipam_core::model::Attribute| entry.node().map(str::to_owned).or_else(|| owner.clone());
    let nodes: BTreeSet<String> = held.iter().filter_map(|(_, entry)| node(entry)).collect();
    let place = BlockInUse { block: block.cidr(), addresses: held.len(), nodes: nodes.into_iter().collect() };
    (place.addresses > 0).then_some(place)
}

/// Maximum number of pools that a commit of a split creates.
const PARTS_PER_COMMIT: usize = 60;

/// Maximum number of parts that a pool can be split into.
const MAX_PARTS: u32 = 1024;

/// Maximum length of a resource name, in bytes.
const MAX_NAME_BYTES: usize = 253;

/// Annotation of a pool that is being split into parts. The annotation's value is the number of parts, a space, and the
/// state (`enabled` or `disabled`) in which the parts are created.
const SPLIT_ANNOTATION: &str = "margay.io/split";

/// Selects a pool by its name or by its CIDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolChoice<'a> {
    /// The pool with this name.
    Name(&'a str),
    /// The pool that has exactly this CIDR.
    Cidr(IpNet),
}

/// The result of splitting a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitResult {
    /// The name of the pool that was split.
    pub pool: String,
    /// The names and CIDRs of the pool's parts, in ascending order.
    pub parts: Vec<(String, IpNet)>,
}

impl Operator {
    /// Splits a pool into its parts, which are `number` pools of equal size; `number` must be a power of two. Addresses
    /// can be assigned from the pool during the split. After the split, CNI network configurations that name the old
    /// pool must be changed to name the parts.
    ///
    /// # Errors
    /// `Invalid` for an impossible number of parts (with Calico's error message), and for a pool that is too small,
    /// belongs to a bridged network, or was defined by a network's own configuration. `NotFound` if the pool does not
    /// exist. `Document` if a pool with the name of a part exists.
    pub async fn split_pool(&self, which: PoolChoice<'_>, number: u32, deadline: Deadline) -> Result<SplitResult> {
        if number < 2 || !number.is_power_of_two() {
            let reason = format!("number to split CIDR into is not a valid power of 2: {number}");
            return Err(Error::Invalid(reason));
        }
        if number > MAX_PARTS {
            return Err(Error::Invalid(format!("a pool is split into {MAX_PARTS} parts at most, not {number}")));
        }
        let pools = self.ipam().inventory(deadline).await?.pools;
        let pool = pools.iter().find(|pool| match which {
            PoolChoice::Name(name) => pool.name() == name,
            PoolChoice::Cidr(cidr) => pool.cidr() == cidr,
        });
        let pool = pool.ok_or_else(|| not_there(which))?;
        let parts = parts_of(pool, number)?;
        let split = SplitResult { pool: pool.name().to_owned(), parts };
        if split.parts.len() <= PARTS_PER_COMMIT {
            transact!(self.ipam(), deadline, |tx| self.split_at_once(tx, &split).await)?;
        } else {
            self.split_in_steps(&split, deadline).await?;
        }
        Ok(split)
    }

    async fn split_at_once(&self, tx: &mut Transaction, split: &SplitResult) -> Result<()> {
        let key = pool_key(&split.pool);
        let mut needed: Vec<Key> = split.parts.iter().map(|(name, _)| pool_key(name)).collect();
        needed.extend(reservations_of(&split.pool).into_iter().chain([key.clone()]));
        tx.prefetch(needed, Vec::new()).await?;
        let pool = self.divisible(tx, &split.pool).await?;
        for (name, cidr) in &split.parts {
            self.make_part(tx, &pool, name, *cidr).await?;
        }
        tx.delete(&key)?;
        Ok(())
    }

    async fn split_in_steps(&self, split: &SplitResult, deadline: Deadline) -> Result<()> {
        let (key, note) = (pool_key(&split.pool), split.parts.len().to_string());
        transact!(self.ipam(), deadline, |tx| {
            let mut pool = self.divisible(tx, &split.pool).await?;
            match pool.resource().annotation(SPLIT_ANNOTATION) {
                Some(begun) if begun.split(' ').next() == Some(note.as_str()) => return Ok(()),
                Some(begun) => {
                    let begun = begun.split(' ').next().unwrap_or_default();
                    return Err(Error::Invalid(format!(
                        "pool {} is being split into {begun} parts: finish that first, with the same number",
                        split.pool
                    )));
                }
                None => {}
            }
            for (name, _) in &split.parts {
                refuse_other(tx.snapshot_get(&pool_key(name)).await?.is_some(), name)?;
            }
            let state = if pool.is_disabled() { "disabled" } else { "enabled" };
            pool.resource_mut().set_annotation(SPLIT_ANNOTATION, &format!("{note} {state}"));
            pool.disable();
            Ok(tx.put(&key, pool.encode()?)?)
        })?;
        for some in split.parts.chunks(PARTS_PER_COMMIT) {
            transact!(self.ipam(), deadline, |tx| self.make_parts(tx, split, some).await)?;
        }
        transact!(self.ipam(), deadline, |tx| {
            self.divisible(tx, &split.pool).await?;
            Ok(tx.delete(&key)?)
        })
    }

    /// Creates the parts in `some` that do not exist yet; `some` is a subset of the parts of a split pool.
    async fn make_parts(&self, tx: &mut Transaction, split: &SplitResult, some: &[(String, IpNet)]) -> Result<()> {
        tx.prefetch(some.iter().map(|(name, _)| pool_key(name)).collect(), Vec::new()).await?;
        let mut pool = self.divisible(tx, &split.pool).await?;
        let begun = pool.resource().annotation(SPLIT_ANNOTATION).unwrap_or_default().to_owned();
        let Some((_, state)) = begun.split_once(' ') else {
            return Err(DocumentError::Conflict(DocumentKind::Pool, split.pool.clone()).into());
        };
        pool.resource_mut().remove_annotation(SPLIT_ANNOTATION);
        if state == "enabled" {
            pool.enable();
        }
        for (name, cidr) in some {
            let key = pool_key(name);
            match tx.get(&key).await? {
                Some(value) => refuse_other(Pool::decode(&key, value.as_bytes())?.cidr() != *cidr, name)?,
                None => self.make_part(tx, &pool, name, *cidr).await?,
            }
        }
        Ok(())
    }

    async fn make_part(&self, tx: &mut Transaction, pool: &Pool, name: &str, cidr: IpNet) -> Result<()> {
        let key = pool_key(name);
        refuse_other(tx.get(&key).await?.is_some(), name)?;
        let part = pool.part(name, cidr, &self.ipam().uid(), self.ipam().now())?;
        Ok(tx.put(&key, part.encode()?)?)
    }

    /// Reads a pool that is to be split, and guards its key. Fails if the pool belongs to a bridged network, or was
    /// defined by a network's own configuration.
    async fn divisible(&self, tx: &mut Transaction, name: &str) -> Result<Pool> {
        let key = pool_key(name);
        let stored = tx.get(&key).await?.ok_or_else(|| not_there(PoolChoice::Name(name)))?;
        let [bridged, defined] = reservations_of(name);
        if tx.get(&bridged).await?.is_some() {
            return Err(Error::Invalid(format!(
                "pool {name} belongs to a bridged network, which is one subnet: it cannot be split"
            )));
        }
        if tx.get(&defined).await?.is_some() {
            return Err(Error::Invalid(format!(
                "pool {name} was defined by a network's own configuration: it cannot be split"
            )));
        }
        Ok(Pool::decode(&key, stored.as_bytes())?)
    }
}

fn pool_key(name: &str) -> Key {
    keys::resource(ResourceKind::IpPool, name)
}

/// The keys under which a pool's reservation can be stored: the key for a bridged network, and the key for a network
/// that defines its own pool.
fn reservations_of(pool: &str) -> [Key; 2] {
    [bridge::reservation_name(pool), define::reservation_name(pool)]
        .map(|name| keys::resource(ResourceKind::IpReservation, &name))
}

fn refuse_other(is_there: bool, name: &str) -> Result<(), DocumentError> {
    if is_there { Err(DocumentError::Exists(DocumentKind::Pool, name.to_owned())) } else { Ok(()) }
}

fn not_there(which: PoolChoice<'_>) -> Error {
    match which {
        PoolChoice::Name(name) => ErrorSubject::Pool.not_found(name),
        PoolChoice::Cidr(cidr) => ErrorSubject::PoolOfCidr.not_found(cidr),
    }
}

/// Computes the names and CIDRs of the parts into which a pool is split.
fn parts_of(pool: &Pool, number: u32) -> Result<Vec<(String, IpNet)>> {
    let too_small =
        || Error::Invalid(format!("the CIDR {} is not large enough to be split into {number} parts", pool.cidr()));
    let bits = u8::try_from(number.trailing_zeros()).map_err(|_| too_small())?;
    let prefix = pool.cidr().prefix_len().saturating_add(bits);
    if prefix > pool.block_size() {
        return Err(Error::Invalid(format!(
            "{}: a part would be smaller than a block, /{}",
            too_small(),
            pool.block_size()
        )));
    }
    let networks = pool.cidr().subnets(prefix).map_err(|_| too_small())?;
    let name = |at: usize| {
        let room = MAX_NAME_BYTES - format!("split--{at}").len();
        let cut = pool.name().get(..room).unwrap_or(pool.name());
        format!("split-{}-{at}", cut.trim_end_matches(['-', '.']))
    };
    Ok(networks.enumerate().map(|(at, cidr)| (name(at), cidr)).collect())
}

#[cfg(test)]
mod tests {
    use ipam_core::model::NewPool;
    use time::macros::datetime;

    use super::*;

    fn parts(name: &str, cidr: &str, number: u32) -> Result<Vec<(String, IpNet)>> {
        let new = NewPool::new(name, cidr.parse().unwrap());
        parts_of(&Pool::new(&new, "u", datetime!(2026-01-01 0:00 UTC)).unwrap(), number)
    }

    #[test]
    fn split_parts_are_equal_and_numbered() {
        let said = |parts: Vec<(String, IpNet)>| parts.iter().map(|(n, c)| format!("{n} {c}")).collect::<Vec<_>>();
        assert_eq!(said(parts("a", "10.0.0.0/16", 2).unwrap()), ["split-a-0 10.0.0.0/17", "split-a-1 10.0.128.0/17"]);
        assert_eq!(parts("a", "10.0.0.0/16", 1024).unwrap()[1023].1.to_string(), "10.0.255.192/26");
        assert_eq!(said(parts("a", "fd00::/64", 4).unwrap())[3], "split-a-3 fd00::c000:0:0:0/66");
        let long = "n".repeat(250);
        let names: Vec<usize> = parts(&long, "10.0.0.0/16", 2).unwrap().iter().map(|(name, _)| name.len()).collect();
        assert_eq!(names, [253, 253]);
        let error = parts("a", "10.0.0.0/24", 8).unwrap_err().to_string();
        assert!(
            error.starts_with("the CIDR 10.0.0.0/24 is not large enough to be split into 8 parts: a part"),
            "{error}"
        );
    }
}
