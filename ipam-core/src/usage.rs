//! Reading for people: how full everything is, and who has an address. Nothing is changed, nothing is locked: all of an
//! answer is from one revision.

use std::net::IpAddr;

use kv::{Content, Deadline, ErrorKind, Key, Range, Revision, StoreExt};

use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Attribute, Block, Document, IpReservation, Pool};
use crate::pools;
use crate::reservations::Reservations;
use crate::surroundings::decode_all;
use crate::utilization::{Utilization, utilization};

/// How often a reading is begun anew because the store gave up the history it was reading.
const READINGS: usize = 3;

/// What is stored about an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Nobody has it.
    Free,
    /// It was given back, and rests.
    Resting(Attribute),
    /// Somebody has it.
    Held(Attribute),
}

/// Pools and reservations, as they are stored.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// All pools, by name.
    pub pools: Vec<Pool>,
    /// All reservations, by name.
    pub reservations: Vec<IpReservation>,
}

impl Ipam {
    /// How full the pools are, exact for any size, as of one revision.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn utilization(&self) -> Result<Utilization> {
        let mut readings = 0;
        loop {
            match self.read_utilization().await {
                Err(error) if again(&error, &mut readings) => {}
                read => return Ok(read?),
            }
        }
    }

    /// All well-formed blocks, as of one revision.
    pub(crate) async fn all_blocks(&self) -> Result<Vec<Block>> {
        let mut readings = 0;
        loop {
            match self.read_all(Range::Prefix(keys::blocks_prefix(None)), Revision::UNSET).await {
                Err(error) if again(&error, &mut readings) => {}
                read => return Ok(read?.0),
            }
        }
    }

    async fn read_utilization(&self) -> kv::Result<Utilization> {
        let blocks = self.read_all::<Block>(Range::Prefix(keys::blocks_prefix(None)), Revision::UNSET).await?;
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let pools = self.read_all::<Pool>(pools, blocks.1).await?.0;
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        let reservations = self.read_all::<IpReservation>(reservations, blocks.1).await?.0;
        let (reservations, _) = Reservations::from_documents(&reservations);
        Ok(utilization(&pools, &blocks.0, &reservations))
    }

    /// All well-formed documents of a range, and the revision that was read.
    async fn read_all<D: Document>(&self, range: Range, at: Revision) -> kv::Result<(Vec<D>, Revision)> {
        let listing = self.store().list_at(range, at, Content::Full).await?;
        let at = if at.is_set() { at } else { listing.revision };
        let pairs: Vec<_> = listing.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
        Ok((decode_all(&pairs), at))
    }

    /// All pools and reservations.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn inventory(&self, deadline: Deadline) -> Result<Inventory> {
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        transact!(self, deadline, |tx| {
            tx.prefetch(Vec::new(), vec![pools.clone(), reservations.clone()]).await?;
            Ok(Inventory {
                pools: decode_all(&tx.snapshot_list(&pools).await?),
                reservations: decode_all(&tx.snapshot_list(&reservations).await?),
            })
        })
    }

    /// Who has an address, in a pool or, where a block has outlived its pool, outside of all pools.
    ///
    /// # Errors
    /// Those of the store; a damaged block.
    pub async fn holding(&self, ip: IpAddr, deadline: Deadline) -> Result<Holding> {
        let inventory = self.inventory(deadline).await?;
        for cidr in inventory.pools.iter().filter_map(|pool| pools::block_of(pool, ip)) {
            let key = keys::block(cidr);
            if let Some(holding) = self.holding_in(&key, ip).await? {
                return Ok(holding);
            }
        }
        if inventory.pools.iter().any(|pool| pool.cidr().contains(&ip)) {
            return Ok(Holding::Free);
        }
        let blocks = Range::Prefix(keys::blocks_prefix(None));
        let listed = self.store().list_at(blocks, Revision::UNSET, Content::KeysOnly).await?;
        let has_it = |key: &Key| keys::parse_block(key).is_some_and(|cidr| cidr.contains(&ip));
        match listed.kvs.into_iter().map(|kv| kv.key).find(has_it) {
            Some(key) => Ok(self.holding_in(&key, ip).await?.unwrap_or(Holding::Free)),
            None => Ok(Holding::Free),
        }
    }

    /// Who has an address in a block; nothing if there is no such block.
    async fn holding_in(&self, key: &Key, ip: IpAddr) -> Result<Option<Holding>> {
        let Some(stored) = self.store().get(key.clone()).await? else { return Ok(None) };
        let mut block = Block::decode(key, stored.value.as_bytes())?;
        let config = self.store().get(keys::config()).await?;
        let config = config.map(|kv| crate::model::IpamConfig::decode(&kv.key, kv.value.as_bytes())).transpose()?;
        let _ = block.apply_cooldown(self.now(), config.unwrap_or_default().cooldown_seconds());
        Ok(Some(match block.lookup(ip) {
            AddressState::Assigned(entry) => Holding::Held(entry.clone()),
            AddressState::CoolingDown(_) => block
                .allocated()
                .find(|(held, _)| *held == ip)
                .map_or(Holding::Free, |(_, entry)| Holding::Resting(entry.clone())),
            AddressState::Free | AddressState::Outside => Holding::Free,
        }))
    }
}

/// True if a reading is to be begun anew: the store has given up the history that was being read.
fn again(error: &kv::Error, readings: &mut usize) -> bool {
    *readings += 1;
    matches!(error.kind(), ErrorKind::Compacted { .. }) && *readings < READINGS
}
