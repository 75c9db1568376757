//! Defines read-only queries: the use of pools, the holder of an address, the addresses of a handle, and the borrowed
//! addresses. The queries take no locks, and each query's answer is consistent at one revision.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Content, Deadline, ErrorKind, Kv, Pages, Range, Revision, Transaction};
use serde::Serialize;

use crate::assign_context::{decode_all, read_config};
use crate::block_lookup::group_by_block;
use crate::boxed_future;
use crate::error::{Error, ErrorSubject, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Attribute, Block, Document, Handle, IpReservation, Owner, Pool, ReleaseRequest};
use crate::reservations::Reservations;
use crate::utilization::{Utilization, UtilizationCounter};
use crate::write_set::WriteSet;

/// Runs the `read` closure, and repeats it at most twice if the store compacts the revision at which the closure reads.
///
/// # Errors
/// Any error of the `read` closure.
pub async fn reread<T, F: Future<Output = kv::Result<T>>>(mut read: impl FnMut() -> F) -> kv::Result<T> {
    let mut left = 2;
    loop {
        match read().await {
            Err(error) if left > 0 && matches!(error.kind(), ErrorKind::Compacted { .. }) => left -= 1,
            done => return done,
        }
    }
}

/// Reads keys in several requests, all at the revision of the first request, and within a deadline.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotReader {
    /// The store revision at which all requests read; unset before the first request.
    pub at: Revision,
    deadline: Deadline,
}

impl SnapshotReader {
    /// Creates a reader whose reads fail after `deadline`.
    pub fn new(deadline: Deadline) -> Self {
        Self { at: Revision::UNSET, deadline }
    }

    /// Checks that the reader's deadline has not passed.
    ///
    /// # Errors
    /// `Timeout` if the reader's deadline has passed.
    pub fn in_time(&self) -> kv::Result<()> {
        in_time(self.deadline)
    }
}

/// Checks that the deadline of a read has not passed.
///
/// # Errors
/// `Timeout` if `deadline` has passed.
pub fn in_time(deadline: Deadline) -> kv::Result<()> {
    match deadline.work_is_over() {
        true => Err(kv::Error::new(ErrorKind::Timeout, kv::Operation::Range, "store")),
        false => Ok(()),
    }
}

/// Whether an address is held, in cooldown or free; with the address's block entry unless it is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// The address has no holder and is not in cooldown.
    Free,
    /// The address was released and is in cooldown; the block entry may describe the former holder.
    InCooldown(Attribute),
    /// The address is held; the block entry describes the holder.
    Held(Attribute),
}

/// The pools and reservations of a store.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// All pools, ordered by name.
    pub pools: Vec<Pool>,
    /// All reservations, ordered by name.
    pub reservations: Vec<IpReservation>,
}

impl Ipam {
    /// Counts the used, reserved and available addresses of all pools at one revision. Counts are exact even for IPv6
    /// pools with up to 2^128 addresses.
    ///
    /// # Errors
    /// Any store error; `Timeout` if `deadline` has passed.
    #[boxed_future]
    pub async fn utilization(&self, deadline: Deadline) -> Result<Utilization> {
        Ok(reread(|| self.read_utilization(deadline)).await?)
    }

    /// Reads all blocks at one revision. Damaged blocks are logged and skipped.
    #[boxed_future]
    pub async fn all_blocks(&self, deadline: Deadline) -> Result<Vec<Block>> {
        let read = || async {
            self.read_all(Range::Prefix(keys::blocks_prefix(None)), &mut SnapshotReader::new(deadline)).await
        };
        Ok(reread(read).await?)
    }

    async fn read_utilization(&self, deadline: Deadline) -> kv::Result<Utilization> {
        let mut reading = SnapshotReader::new(deadline);
        let pools = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
        let pools: Vec<Pool> = self.read_all(pools, &mut reading).await?;
        let reservations = Range::Prefix(keys::resources_prefix(ResourceKind::IpReservation));
        let reservations: Vec<IpReservation> = self.read_all(reservations, &mut reading).await?;
        let (reservations, _) = Reservations::from_documents(&reservations);
        let mut tally = UtilizationCounter::new(&pools, &reservations);
        let blocks = Range::Prefix(keys::blocks_prefix(None));
        let now = self.now();
        self.for_each(blocks, &mut reading, |mut block: Block| {
            block.free_overdue(now);
            tally.add(&block);
        })
        .await?;
        Ok(tally.finish())
    }

    /// Reads all documents in a key range. Damaged documents are logged and skipped.
    pub async fn read_all<D: Document + Send>(&self, range: Range, reading: &mut SnapshotReader) -> kv::Result<Vec<D>> {
        let mut all = Vec::new();
        self.for_each(range, reading, |document| all.push(document)).await?;
        Ok(all)
    }

    /// Calls `see` with each document in a key range, with only one page of documents in memory at a time. Damaged
    /// documents are logged and skipped.
    pub async fn for_each<D: Document>(
        &self,
        range: Range,
        reading: &mut SnapshotReader,
        mut see: impl FnMut(D) + Send,
    ) -> kv::Result<()> {
        self.each(range, Content::Full, reading, |kv| match D::decode(&kv.key, kv.value.as_bytes()) {
            Ok(document) => see(document),
            Err(error) => tracing::warn!(
                %error,
                "skipping a stored pool, reservation, node, block or IPAM configuration that cannot be decoded"
            ),
        })
        .await
    }

    /// Calls `see` with each key in a range, and with the key's value if `content` is [`Content::Full`]. Only one page
    /// of keys is in memory at a time.
    ///
    /// # Errors
    /// Any store error; `Timeout` after the reader's deadline.
    pub async fn each(
        &self,
        range: Range,
        content: Content,
        reading: &mut SnapshotReader,
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

    /// Reads all pools and reservations.
    ///
    /// # Errors
    /// Any store error.
    #[boxed_future]
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

    /// Returns whether an address is held, in cooldown or free, even if the address lies in a block whose pool was
    /// deleted.
    ///
    /// # Errors
    /// Any store error. `Malformed` for a damaged block.
    #[boxed_future]
    pub async fn holding(&self, ip: IpAddr, deadline: Deadline) -> Result<Holding> {
        transact!(reading self, deadline, |tx| {
            let cidr = block_around(tx, ip).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.now(), cooldown);
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

impl Ipam {
    /// Returns the addresses that a handle holds on any node, in ascending order. The addresses are read from the
    /// blocks, so the result is correct even if the handle has wrong counts. Addresses in cooldown are not in the
    /// result.
    ///
    /// # Errors
    /// `NotFound` if the handle does not exist. Any store error. `Malformed` if the handle or a block is damaged.
    #[boxed_future]
    pub async fn addresses_of_handle(&self, handle: &str, deadline: Deadline) -> Result<Vec<IpAddr>> {
        transact!(reading self, deadline, |tx| {
            let key = keys::handle(handle);
            tx.prefetch(vec![key.clone(), keys::config()], Vec::new()).await?;
            let stored = tx.snapshot_get(&key).await?.ok_or_else(|| ErrorSubject::Handle.not_found(handle))?;
            let blocks: Vec<IpNet> = Handle::decode(&key, stored.as_bytes())?.blocks().map(|(cidr, _)| cidr).collect();
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.now(), cooldown);
            work.read_ahead(&blocks).await?;
            let mut held = Vec::new();
            for cidr in blocks {
                held.extend(work.block(cidr).await?.map(|block| block.ips_by_handle(handle)).unwrap_or_default());
            }
            held.sort_unstable();
            Ok(held)
        })
    }

    /// Returns the handle of an address, and the attributes of its active and its alternate owner. As in Calico, and in
    /// contrast to [`holding`](Self::holding), the function fails for an address without a holder. Addresses of
    /// disabled pools, and addresses in blocks whose pool was deleted, are found as well.
    ///
    /// # Errors
    /// `Unassigned`, with Calico's error message, if the address has no holder. `CoolingDown` if the address was
    /// released and is in cooldown. Any store error. `Malformed` for a damaged block.
    #[boxed_future]
    pub async fn attributes_of(&self, ip: IpAddr, deadline: Deadline) -> Result<Attribute> {
        match self.holding(ip, deadline).await? {
            Holding::Held(attribute) => Ok(attribute),
            Holding::InCooldown(_) => Err(Error::CoolingDown(ip)),
            Holding::Free => Err(Error::Unassigned(ip)),
        }
    }
}

/// Returns the block that contains an address; see [`group_by_block`]. The pools are read without a guard, because an
/// address stays in its block when a pool is created or deleted.
pub(crate) async fn block_around(tx: &mut Transaction, ip: IpAddr) -> Result<IpNet> {
    let range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
    tx.prefetch(vec![keys::config()], vec![range.clone().into()]).await?;
    let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&range).await?);
    let blocks = group_by_block(tx, &pools, &[ReleaseRequest::new(ip)]).await?;
    Ok(blocks.into_keys().next().unwrap_or_else(|| ip.into()))
}

/// The borrowed addresses of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BorrowedAddresses {
    /// The borrowed addresses, ordered by block.
    pub addresses: Vec<BorrowedAddress>,
    /// The number of held addresses without a recorded node, which may also be borrowed addresses.
    pub without_node: usize,
}

/// An address that is held by a node other than the owner of the address's block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BorrowedAddress {
    /// The borrowed address.
    pub ip: IpAddr,
    /// The node that holds the borrowed address.
    pub node: String,
    /// The block that contains the borrowed address.
    #[serde(serialize_with = "as_text")]
    pub block: IpNet,
    /// The owner of the block; empty if the block has no owner.
    pub block_owner: String,
    /// The kind of the address's holder, which is `pod` or a kind of tunnel; empty if no kind is recorded.
    pub kind: String,
    /// The pod's namespace and name, or the handle if no pod is recorded.
    pub allocated_to: String,
}

impl Ipam {
    /// Finds all borrowed addresses of the store at one revision, except addresses in cooldown.
    ///
    /// # Errors
    /// Any store error; `Timeout` if `deadline` has passed.
    #[boxed_future]
    pub async fn borrowed(&self, deadline: Deadline) -> Result<BorrowedAddresses> {
        Ok(borrowed(&self.all_blocks(deadline).await?))
    }
}

fn borrowed(blocks: &[Block]) -> BorrowedAddresses {
    let mut found = BorrowedAddresses::default();
    for block in blocks {
        let block_owner = match block.owner() {
            Some(owner) if owner.node().is_some() => owner.node().unwrap_or_default().to_owned(),
            Some(Owner::Host(name) | Owner::Virtual(name) | Owner::Other(name)) => name,
            None => String::new(),
        };
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            match entry.node() {
                None => found.without_node += 1,
                Some(node) if node == block_owner => {}
                Some(node) => {
                    let (kind, allocated_to) = holder(entry);
                    found.addresses.push(BorrowedAddress {
                        ip,
                        node: node.to_owned(),
                        block: block.cidr(),
                        block_owner: block_owner.clone(),
                        kind,
                        allocated_to,
                    });
                }
            }
        }
    }
    found
}

fn holder(entry: &Attribute) -> (String, String) {
    match entry.pod() {
        Some(name) => ("pod".to_owned(), format!("{}/{name}", entry.namespace().unwrap_or_default())),
        None => (entry.get("type").unwrap_or_default().to_owned(), entry.handle().unwrap_or_default().to_owned()),
    }
}

fn as_text<S: serde::Serializer>(net: &IpNet, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(net)
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn usage_counts_addresses_of_other_node_as_borrowed() {
        let now = datetime!(2026-01-01 0:00 UTC);
        let mut block = Block::new("10.0.0.0/28".parse().unwrap(), Some(&Owner::host("a")), now, None).unwrap();
        let mut give = |last: u8, attributes: &[(&str, &str)]| {
            let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let ip = IpAddr::from([10, 0, 0, last]);
            block.assign_specific(ip, &Attribute::new(Some(&format!("h{last}")), attributes)).unwrap();
        };
        give(1, &[("node", "a"), ("pod", "own")]);
        give(2, &[("node", "b"), ("pod", "web"), ("namespace", "default")]);
        give(4, &[("node", "c"), ("type", "ipipTunnelAddress")]);
        give(5, &[]);
        let mut orphan = Block::new("10.0.0.16/28".parse().unwrap(), None, now, None).unwrap();
        let node = [("node".to_owned(), "a".to_owned())].into();
        orphan.assign_specific("10.0.0.17".parse().unwrap(), &Attribute::new(Some("h"), node)).unwrap();
        let found = borrowed(&[block, orphan]);
        let rows: Vec<String> = found
            .addresses
            .iter()
            .map(|a| format!("{} {} {} '{}' '{}' {}", a.ip, a.node, a.block, a.block_owner, a.kind, a.allocated_to))
            .collect();
        assert_eq!(
            rows,
            [
                "10.0.0.2 b 10.0.0.0/28 'a' 'pod' default/web",
                "10.0.0.4 c 10.0.0.0/28 'a' 'ipipTunnelAddress' h4",
                "10.0.0.17 a 10.0.0.16/28 '' '' h",
            ]
        );
        assert_eq!(found.without_node, 1);
    }
}
