//! Requested addresses, all or none.
//!
//! Guards: the blocks that change, and the affinity of a block that is new. As in Calico, node selectors and the limit
//! of blocks are not checked, and a reserved address is assigned on a routed network if it is requested; on a bridged
//! network it is a gateway or outside the configured range, and is refused.

use std::net::IpAddr;

use ipnet::IpNet;
use time::OffsetDateTime;

use super::request::AssignRequest;
use super::search::refuse_among_prefixes;
use super::secondary;
use crate::error::{BridgeError, Error, OverlapError, Result};
use crate::model::{Attribute, Block, Owner, Pool};
use crate::pools::{self, PoolError};
use crate::surroundings::Surroundings;
use crate::workset::Workset;

/// The settings that the addresses of one request share.
#[derive(Debug)]
pub(super) struct Specific<'a> {
    pub(super) request: &'a AssignRequest,
    pub(super) around: &'a Surroundings,
    pub(super) holder: &'a Attribute,
    pub(super) handle: &'a str,
    pub(super) owner: Owner,
    /// Whether the network is not Calico's, in a store that Calico reads.
    pub(super) is_secondary: bool,
    pub(super) now: OffsetDateTime,
}

impl Specific<'_> {
    /// Assigns an address of a pool, and returns its block.
    pub(super) async fn assign(&self, work: &mut Workset<'_>, ip: IpAddr, pool: &Pool) -> Result<IpNet> {
        let cidr = pools::block_of(pool, ip).ok_or(PoolError::AddressOutside)?;
        if work.block(cidr).await?.is_none() {
            refuse_among_prefixes(work, pool).await?;
            let reserved = self.request.host_reserved.as_ref();
            let block = Block::of_length(cidr, pool.length(), Some(&self.owner), self.now, reserved);
            work.create(block?).await?;
            work.confirm_affinity(&self.owner, cidr).await?;
        } else if let Some(other) = work.overlap_of(cidr).await? {
            return Err(OverlapError::Block { block: cidr, other }.into());
        }
        if self.is_secondary {
            let network = &self.request.attachment.network;
            let block = work.block(cidr).await?;
            if let Some(Owner::Host(node)) = block.and_then(Block::owner)
                && !secondary::make_secondary(work, cidr, &node, network, self.now).await?
            {
                return Err(BridgeError::CalicosBlock { ip, block: cidr, node }.into());
            }
        }
        if self.around.config.strict_affinity() {
            work.block(cidr).await?.map_or(Ok(()), |block| block.require_owner(&self.owner))?;
        }
        let assigned = work.change(cidr, |block| block.assign_specific(ip, self.holder)).await?;
        assigned.unwrap_or(Ok(())).map_err(|error| Error::AlreadyAssigned(error.0))?;
        work.touch_handle(self.handle, cidr);
        Ok(cidr)
    }
}
