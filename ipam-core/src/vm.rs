//! Virtual machines of KubeVirt on Calico's networks: their addresses stay while their pods come and go.
//!
//! A virtual machine's addresses are held under a handle of its own, `<network>.vmi.<namespace>.<name>`. The pod in which it
//! runs is the active owner of each address, the pod that it migrates to is the alternate owner. A stopped machine's
//! addresses have no owner at all. So owners come and go, and handle and addresses go only with the machine.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};
use serde_json::Value;

use crate::assign::AssignedAddress;
use crate::assign_context::read_config;
use crate::attachment::NETWORK;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{AddressState, Attribute, Document, Handle, OwnerUpdate, keys};
use crate::usage::block_around;
use crate::write_set::WriteSet;

/// The part of a virtual machine's handle that follows the network's name.
pub const VM_INFIX: &str = ".vmi.";
/// Calico's document with the switch. The settings of the allocator have a field of the same name, which no plugin reads.
const SWITCH_KEY: &str = "/calico/resources/v3/projectcalico.org/ipamconfigurations/default";

/// The pod in which a virtual machine runs, or to which it migrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPod {
    /// The handle of the virtual machine.
    pub handle: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// Its part in the virtual machine.
    pub role: PodRole,
    /// The fate of the virtual machine after this pod.
    pub fate: VmFate,
    /// The attributes of an owner that describe the virtual machine.
    pub attributes: BTreeMap<String, String>,
}

/// The part of a pod in a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRole {
    /// It runs the virtual machine.
    Source,
    /// The virtual machine migrates to it, or has done so.
    Target,
}

/// The fate of a virtual machine after a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmFate {
    /// It may run again, and needs its addresses.
    Stays,
    /// It is being deleted.
    Ends,
}

/// The outcome of an assignment to a virtual machine's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmAnswer {
    /// The machine had these addresses already, or a further family was requested.
    Kept(Vec<AssignedAddress>),
    /// The machine has these addresses from now on.
    First(Vec<AssignedAddress>),
    /// Addresses of virtual machines are not kept: the pod is one like any other.
    Off,
}

impl VmPod {
    /// True if these are the attributes of this pod.
    pub(crate) fn is_named_by(&self, attributes: &BTreeMap<String, String>) -> bool {
        attributes.get("namespace") == Some(&self.namespace) && attributes.get("pod") == Some(&self.name)
    }
}

/// True if an address is a virtual machine's, which may be stopped: no node can show that it is not in use.
pub fn is_vms(entry: &Attribute) -> bool {
    let Some(handle) = entry.handle() else { return false };
    match entry.get(NETWORK) {
        // An attachment's handle begins with its network's name, whatever that is.
        Some(network) => handle.strip_prefix(network).is_some_and(|rest| rest.starts_with(VM_INFIX)),
        None => handle.contains(VM_INFIX),
    }
}

/// Where the switch is kept.
pub(crate) fn switch_key() -> Key {
    SWITCH_KEY.into()
}

/// True if addresses of virtual machines are not kept. As in Calico, only this very word in a document that can be read
/// means that.
pub(crate) async fn is_off(tx: &mut Transaction) -> Result<bool> {
    let stored = tx.snapshot_get(&switch_key()).await?;
    let document = stored.and_then(|value| serde_json::from_slice::<Value>(value.as_bytes()).ok());
    let switch = document.as_ref().and_then(|document| document.pointer("/spec/kubeVirtVMAddressPersistence"));
    Ok(switch.and_then(Value::as_str) == Some("Disabled"))
}

/// The addresses of a virtual machine as the blocks have them, and the blocks that its handle counts wrongly.
#[derive(Debug, Default)]
pub(crate) struct VmHoldings {
    /// The addresses with their blocks, IPv4 first.
    pub(crate) addresses: Vec<(IpAddr, IpNet)>,
    /// Blocks of which the handle counts more or less than they hold: a foreign writer broke off, or is about to go on.
    miscounted: Vec<IpNet>,
}

impl VmHoldings {
    /// Reads them. A handle that is not there holds nothing.
    ///
    /// # Errors
    /// A damaged handle or block: the machine must not get another address because one cannot be read.
    pub(crate) async fn read(work: &mut WriteSet<'_>, handle: &str) -> Result<Self> {
        let key = keys::handle(handle);
        let Some(stored) = work.tx.snapshot_get(&key).await? else { return Ok(Self::default()) };
        let named: Vec<(IpNet, i64)> = Handle::decode(&key, stored.as_bytes())?.blocks().collect();
        work.read_ahead(&named.iter().map(|(cidr, _)| *cidr).collect::<Vec<_>>()).await?;
        let mut holds = Self::default();
        for (cidr, counted) in named {
            let held = work.block(cidr).await?.map(|block| block.ips_by_handle(handle)).unwrap_or_default();
            if usize::try_from(counted) != Ok(held.len()) {
                holds.miscounted.push(cidr);
            }
            holds.addresses.extend(held.into_iter().map(|ip| (ip, cidr)));
        }
        holds.addresses.sort_unstable();
        Ok(holds)
    }

    /// Corrects the handle. Each block is written, too: a foreign writer that is about to change it must start again.
    pub(crate) async fn mend(&self, work: &mut WriteSet<'_>, handle: &str) -> Result<()> {
        for cidr in &self.miscounted {
            work.change(*cidr, |_| ()).await?;
            work.touch_handle(handle, *cidr);
        }
        Ok(())
    }
}

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
    #[boxed_future]
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
            let mut work = WriteSet::new(tx, self.now(), cooldown);
            let Some(block) = work.block(cidr).await? else { return Err(Error::Unassigned(ip)) };
            if matches!(block.lookup(ip), AddressState::Free | AddressState::Outside) {
                return Err(Error::Unassigned(ip));
            }
            let changed = work.change(cidr, |block| block.set_owners(ip, handle, update)).await?.transpose()?;
            if changed == Some(true) { work.write().await } else { Ok(()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_handle_is_told_from_attachment_handle() {
        let entry = |handle: &str, network: Option<&str>| {
            let attributes = network.map(|network| (NETWORK.to_owned(), network.to_owned()));
            is_vms(&Attribute::new(Some(handle), attributes.into_iter().collect()))
        };
        assert!(entry("net1.vmi.shop.cart", None));
        assert!(entry("net1.vmi.shop.cart", Some("net1")));
        assert!(entry("net1.vmi._Vhmos", None));
        assert!(!entry("net1.0123456789abcdef", None));
        assert!(!entry("a.vmi.b.0123456789abcdef", Some("a.vmi.b")), "the network has such a name");
        assert!(!is_vms(&Attribute::default()));
    }
}
