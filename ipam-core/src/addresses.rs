//! Reading who has which addresses. Nothing is changed; all of an answer is from one revision.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Range, Transaction};

use crate::boxed;
use crate::covering::blocks_of;
use crate::error::{Error, Resource, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Attribute, Document, Handle, Pool, ReleaseRequest};
use crate::surroundings::{decode_all, read_config};
use crate::usage::Holding;
use crate::workset::Workset;

impl Ipam {
    /// The addresses that are held under a handle, ascending, on whatever node. The blocks say what is held: a handle that
    /// counts too much, or names a block that is gone, does no harm. Resting addresses are nobody's.
    ///
    /// # Errors
    /// `NotFound` if there is no such handle; those of the store; damaged documents.
    #[boxed]
    pub async fn addresses_of_handle(&self, handle: &str, deadline: Deadline) -> Result<Vec<IpAddr>> {
        transact!(reading self, deadline, |tx| {
            let key = keys::handle(handle);
            tx.prefetch(vec![key.clone(), keys::config()], Vec::new()).await?;
            let stored = tx.snapshot_get(&key).await?.ok_or_else(|| Resource::Handle.not_found(handle))?;
            let blocks: Vec<IpNet> = Handle::decode(&key, stored.as_bytes())?.blocks().map(|(cidr, _)| cidr).collect();
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = Workset::new(tx, self.now(), cooldown);
            work.read_ahead(&blocks).await?;
            let mut held = Vec::new();
            for cidr in blocks {
                held.extend(work.block(cidr).await?.map(|block| block.ips_by_handle(handle)).unwrap_or_default());
            }
            held.sort_unstable();
            Ok(held)
        })
    }

    /// The holder of an address: handle, attributes of the active and of the alternate owner. As
    /// [`holding`](Self::holding), but an address that nobody has is an error, as in Calico. Also addresses of disabled
    /// pools and of blocks that have outlived their pool are looked at.
    ///
    /// # Errors
    /// With Calico's texts: `Unassigned` if nobody has it, `CoolingDown` if it was released and is in cooldown. Those
    /// of the store; a damaged block.
    #[boxed]
    pub async fn attributes_of(&self, ip: IpAddr, deadline: Deadline) -> Result<Attribute> {
        match self.holding(ip, deadline).await? {
            Holding::Held(attribute) => Ok(attribute),
            Holding::InCooldown(_) => Err(Error::CoolingDown(ip)),
            Holding::Free => Err(Error::Unassigned(ip)),
        }
    }
}

/// The block that an address is of: see [`blocks_of`]. Pools are
/// read without a guard: a pool that comes or goes does not move an address to another block.
pub(crate) async fn block_around(tx: &mut Transaction, ip: IpAddr) -> Result<IpNet> {
    let range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
    tx.prefetch(vec![keys::config()], vec![range.clone().into()]).await?;
    let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&range).await?);
    let blocks = blocks_of(tx, &pools, &[ReleaseRequest::new(ip)]).await?;
    Ok(blocks.into_keys().next().unwrap_or_else(|| ip.into()))
}
