//! Reading for people: the use of pools, and the holder of an address. Nothing is changed, nothing is locked: all of an
//! answer is from one revision.

use std::net::IpAddr;

use kv::{Content, Deadline, ErrorKind, Kv, Pages, Range, Revision};

use crate::addresses::block_around;
use crate::boxed;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Attribute, Block, Document, IpReservation, Pool};
use crate::reservations::Reservations;
use crate::surroundings::{decode_all, read_config};
use crate::utilization::{Tally, Utilization};
use crate::workset::Workset;

/// Reads once more if the store gave up the history of the revision that was being read, at most twice.
///
/// # Errors
/// Those of `read`.
pub async fn reread<T, F: Future<Output = kv::Result<T>>>(mut read: impl FnMut() -> F) -> kv::Result<T> {
    let mut left = 2;
    loop {
        match read().await {
            Err(error) if left > 0 && matches!(error.kind(), ErrorKind::Compacted { .. }) => left -= 1,
            done => return done,
        }
    }
}

/// A reading in several requests: all at one revision, which the first request sets, and within a deadline.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// The revision; unset before the first answer.
    pub at: Revision,
    deadline: Deadline,
}

impl Reading {
    /// A reading that must end by this deadline.
    pub fn new(deadline: Deadline) -> Self {
        Self { at: Revision::UNSET, deadline }
    }

    /// # Errors
    /// `Timeout` once the deadline is over.
    pub fn in_time(&self) -> kv::Result<()> {
        in_time(self.deadline)
    }
}

/// An error once the time for reading is over.
pub fn in_time(deadline: Deadline) -> kv::Result<()> {
    match deadline.work_is_over() {
        true => Err(kv::Error::new(ErrorKind::Timeout, kv::Operation::Range, "store")),
        false => Ok(()),
    }
}

/// The state of an address in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Nobody has it.
    Free,
    /// It was released, and is in cooldown.
    InCooldown(Attribute),
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
    /// Those of the store; `Timeout` after the deadline.
    #[boxed]
    pub async fn utilization(&self, deadline: Deadline) -> Result<Utilization> {
        Ok(reread(|| self.read_utilization(deadline)).await?)
    }

    /// All well-formed blocks, as of one revision.
    #[boxed]
    pub async fn all_blocks(&self, deadline: Deadline) -> Result<Vec<Block>> {
        let read =
            || async { self.read_all(Range::Prefix(keys::blocks_prefix(None)), &mut Reading::new(deadline)).await };
        Ok(reread(read).await?)
    }

    async fn read_utilization(&self, deadline: Deadline) -> kv::Result<Utilization> {
        let mut reading = Reading::new(deadline);
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let pools: Vec<Pool> = self.read_all(pools, &mut reading).await?;
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        let reservations: Vec<IpReservation> = self.read_all(reservations, &mut reading).await?;
        let (reservations, _) = Reservations::from_documents(&reservations);
        let mut tally = Tally::new(&pools, &reservations);
        let blocks = Range::Prefix(keys::blocks_prefix(None));
        let now = self.now();
        self.for_each(blocks, &mut reading, |mut block: Block| {
            block.free_overdue(now);
            tally.add(&block);
        })
        .await?;
        Ok(tally.finish())
    }

    /// All well-formed documents of a range.
    pub async fn read_all<D: Document + Send>(&self, range: Range, reading: &mut Reading) -> kv::Result<Vec<D>> {
        let mut all = Vec::new();
        self.for_each(range, reading, |document| all.push(document)).await?;
        Ok(all)
    }

    /// Shows each well-formed document of a range. One page at a time is in memory.
    pub async fn for_each<D: Document>(
        &self,
        range: Range,
        reading: &mut Reading,
        mut see: impl FnMut(D) + Send,
    ) -> kv::Result<()> {
        self.each(range, Content::Full, reading, |kv| match D::decode(&kv.key, kv.value.as_bytes()) {
            Ok(document) => see(document),
            Err(error) => tracing::warn!(%error, "passing over a damaged document"),
        })
        .await
    }

    /// Shows each key of a range, with its value if `content` is full. One page at a time is in memory.
    ///
    /// # Errors
    /// Those of the store; `Timeout` after the reading's deadline.
    pub async fn each(
        &self,
        range: Range,
        content: Content,
        reading: &mut Reading,
        mut see: impl FnMut(&Kv) + Send,
    ) -> kv::Result<()> {
        let mut pages = Pages::new(range, reading.at).with_content(content);
        while let Some(page) = pages.next(&**self.store()).await? {
            page.iter().for_each(&mut see);
            reading.in_time()?;
        }
        reading.at = pages.revision();
        Ok(())
    }

    /// All pools and reservations.
    ///
    /// # Errors
    /// Those of the store.
    #[boxed]
    pub async fn inventory(&self, deadline: Deadline) -> Result<Inventory> {
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        transact!(reading self, deadline, |tx| {
            tx.prefetch(Vec::new(), vec![pools.clone().into(), reservations.clone().into()]).await?;
            Ok(Inventory {
                pools: decode_all(&tx.snapshot_list(&pools).await?),
                reservations: decode_all(&tx.snapshot_list(&reservations).await?),
            })
        })
    }

    /// The holder of an address, in a pool or, where a block has outlived its pool, outside of all pools.
    ///
    /// # Errors
    /// Those of the store; a damaged block.
    #[boxed]
    pub async fn holding(&self, ip: IpAddr, deadline: Deadline) -> Result<Holding> {
        transact!(reading self, deadline, |tx| {
            let cidr = block_around(tx, ip).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = Workset::new(tx, self.now(), cooldown);
            let Some(block) = work.block(cidr).await? else { return Ok(Holding::Free) };
            Ok(match block.lookup(ip) {
                AddressState::Assigned(entry) => Holding::Held(entry.clone()),
                AddressState::CoolingDown(_) => block
                    .allocated()
                    .find(|(held, _)| *held == block.first_of(ip))
                    .map_or(Holding::Free, |(_, entry)| Holding::InCooldown(entry.clone())),
                AddressState::Free | AddressState::Outside => Holding::Free,
            })
        })
    }
}
