//! Dividing a pool into pools of equal size. Blocks, and addresses in them, stay where they are: a block of the pool is a
//! block of the part that it lies in.
//!
//! Up to 60 parts come in the commit in which the pool goes: nobody ever sees both, or neither. More do not fit in
//! one commit. Then the pool is disabled and notes what is going on; the parts come, some in each commit, and can be used at
//! once; the pool goes last. So no address is ever in two pools that give addresses out, and a division that was broken off
//! goes on where it was when it is asked for again.

use ipam_core::assign::{bridge, define};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Pool};
use ipam_core::transact;
use ipam_core::{Error, Resource, Result};
use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};

use crate::Operator;
use crate::documents::{DocumentError, DocumentKind};

/// How many parts are made in one commit.
const AT_ONCE: usize = 60;

/// The most parts.
const MOST_PARTS: u32 = 1024;

/// The longest name of a resource.
const LONGEST_NAME: usize = 253;

/// The number of parts of a pool, and whether they will be disabled.
const DIVIDED: &str = "margay.io/split";

/// Which pool is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// The one of this name.
    Name(&'a str),
    /// The one of exactly this network.
    Cidr(IpNet),
}

/// The outcome of a division.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The pool that was.
    pub pool: String,
    /// The pools that are, ascending.
    pub parts: Vec<(String, IpNet)>,
}

impl Operator {
    /// Divides a pool into a number of parts, a power of two. Assignments may go on meanwhile. Networks that name the pool
    /// have to name the parts from then on.
    ///
    /// Guards: the pool and the parts in each commit.
    ///
    /// # Errors
    /// `Invalid`, with Calico's texts, for a number that cannot be, a pool that is not there or too small, and one that belongs
    /// to a bridged network or was defined by a network's own configuration; `Document` if there is a pool with the name of a
    /// part.
    pub async fn split_pool(&self, which: Which<'_>, number: u32, deadline: Deadline) -> Result<Split> {
        if number < 2 || !number.is_power_of_two() {
            let reason = format!("number to split CIDR into is not a valid power of 2: {number}");
            return Err(Error::Invalid(reason));
        }
        if number > MOST_PARTS {
            return Err(Error::Invalid(format!("a pool is split into {MOST_PARTS} parts at most, not {number}")));
        }
        let pools = self.ipam().inventory(deadline).await?.pools;
        let pool = pools.iter().find(|pool| match which {
            Which::Name(name) => pool.name() == name,
            Which::Cidr(cidr) => pool.cidr() == cidr,
        });
        let pool = pool.ok_or_else(|| not_there(which))?;
        let parts = parts_of(pool, number)?;
        let split = Split { pool: pool.name().to_owned(), parts };
        if split.parts.len() <= AT_ONCE {
            transact!(self.ipam(), deadline, |tx| self.split_at_once(tx, &split).await)?;
        } else {
            self.split_in_steps(&split, deadline).await?;
        }
        Ok(split)
    }

    async fn split_at_once(&self, tx: &mut Transaction, split: &Split) -> Result<()> {
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

    async fn split_in_steps(&self, split: &Split, deadline: Deadline) -> Result<()> {
        let (key, note) = (pool_key(&split.pool), split.parts.len().to_string());
        transact!(self.ipam(), deadline, |tx| {
            let mut pool = self.divisible(tx, &split.pool).await?;
            match pool.resource().annotation(DIVIDED) {
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
            pool.resource_mut().set_annotation(DIVIDED, &format!("{note} {state}"));
            pool.disable();
            Ok(tx.put(&key, pool.encode()?)?)
        })?;
        for some in split.parts.chunks(AT_ONCE) {
            transact!(self.ipam(), deadline, |tx| self.make_parts(tx, split, some).await)?;
        }
        transact!(self.ipam(), deadline, |tx| {
            self.divisible(tx, &split.pool).await?;
            Ok(tx.delete(&key)?)
        })
    }

    /// Makes those of the parts that are not there yet.
    async fn make_parts(&self, tx: &mut Transaction, split: &Split, some: &[(String, IpNet)]) -> Result<()> {
        tx.prefetch(some.iter().map(|(name, _)| pool_key(name)).collect(), Vec::new()).await?;
        let mut pool = self.divisible(tx, &split.pool).await?;
        let begun = pool.resource().annotation(DIVIDED).unwrap_or_default().to_owned();
        let Some((_, state)) = begun.split_once(' ') else {
            return Err(DocumentError::Conflict(DocumentKind::Pool, split.pool.clone()).into());
        };
        pool.resource_mut().remove_annotation(DIVIDED);
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

    /// The pool, guarded, if it is one that can be divided: no network hangs on its being one.
    async fn divisible(&self, tx: &mut Transaction, name: &str) -> Result<Pool> {
        let key = pool_key(name);
        let stored = tx.get(&key).await?.ok_or_else(|| not_there(Which::Name(name)))?;
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

/// The reservations that networks make for a pool which is theirs.
fn reservations_of(pool: &str) -> [Key; 2] {
    [bridge::reservation_name(pool), define::reservation_name(pool)]
        .map(|name| keys::resource(ResourceKind::IpReservation, &name))
}

fn refuse_other(is_there: bool, name: &str) -> Result<(), DocumentError> {
    if is_there { Err(DocumentError::Exists(DocumentKind::Pool, name.to_owned())) } else { Ok(()) }
}

fn not_there(which: Which<'_>) -> Error {
    match which {
        Which::Name(name) => Resource::Pool.not_found(name),
        Which::Cidr(cidr) => Resource::PoolOfCidr.not_found(cidr),
    }
}

/// The names and networks of the parts.
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
        let room = LONGEST_NAME - format!("split--{at}").len();
        let cut = pool.name().get(..room).unwrap_or(pool.name());
        format!("split-{}-{at}", cut.trim_end_matches(['-', '.']))
    };
    Ok(networks.enumerate().map(|(at, cidr)| (name(at), cidr)).collect())
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;
    use ipam_core::model::NewPool;

    fn parts(name: &str, cidr: &str, number: u32) -> Result<Vec<(String, IpNet)>> {
        let new = NewPool::new(name, cidr.parse().unwrap());
        parts_of(&Pool::new(&new, "u", datetime!(2026-01-01 0:00 UTC)).unwrap(), number)
    }

    #[test]
    fn parts_are_equal_and_named_by_number() {
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
