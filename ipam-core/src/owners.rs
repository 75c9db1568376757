//! Changing whose an address is, without releasing it: for a workload that moves between two pods.

use std::net::IpAddr;

use kv::Deadline;

use crate::addresses::block_around;
use crate::boxed;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{AddressState, OwnerUpdate};
use crate::surroundings::read_config;
use crate::workset::Workset;

impl Ipam {
    /// Changes the attributes of the owners of an address that is held under a handle: the active one, the alternate
    /// one or both, each only if it is who the update expects. All of it is one commit or none. A state that is reached
    /// already costs no write, so it can be repeated.
    ///
    /// New attributes replace all that there are, also those of Margay (`margay.io/...`) and `node`: pass on those that
    /// must stay. Handle, sequence number and everything about other addresses stay as they are; Calico changes the
    /// owners of all addresses that were given in the same call.
    ///
    /// Guards: the block.
    ///
    /// # Errors
    /// With Calico's texts: `Unassigned` if nobody has the address; `Owner` if it is not held under the handle (resting
    /// addresses are not), or is not whose the update expects. Those of the store.
    #[boxed]
    pub async fn set_owner_attributes(
        &self,
        ip: IpAddr,
        handle: &str,
        update: &OwnerUpdate,
        deadline: Deadline,
    ) -> Result<()> {
        transact!(self, deadline, |tx| {
            let cidr = block_around(tx, ip).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = Workset::new(tx, self.now(), cooldown);
            let Some(block) = work.block(cidr).await? else { return Err(Error::Unassigned(ip)) };
            if matches!(block.lookup(ip), AddressState::Free | AddressState::Outside) {
                return Err(Error::Unassigned(ip));
            }
            let changed = work.change(cidr, |block| block.set_owners(ip, handle, update)).await?.transpose()?;
            if changed == Some(true) { work.write().await } else { Ok(()) }
        })
    }
}
