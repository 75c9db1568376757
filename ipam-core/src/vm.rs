//! Virtual machines of KubeVirt on Calico's networks, which keep their addresses while their pods change.
//!
//! A virtual machine's addresses are held under a handle of its own, `<network>.vmi.<namespace>.<name>`. The pod that
//! runs the machine is the active owner of each address. The pod to which it migrates is the alternate owner. A stopped
//! machine's addresses have no owner. So owners change, while handle and addresses are released only with the machine.

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

/// The part of a virtual machine's handle after the network's name.
pub const VM_INFIX: &str = ".vmi.";
/// The key of Calico's document with the setting. The allocator's settings have a field of the same name, which no
/// plugin reads.
const SWITCH_KEY: &str = "/calico/resources/v3/projectcalico.org/ipamconfigurations/default";

/// The pod that runs a virtual machine, or to which the machine migrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPod {
    /// The handle of the virtual machine.
    pub handle: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's role for the virtual machine.
    pub role: PodRole,
    /// Whether the virtual machine outlives this pod.
    pub fate: VmFate,
    /// The attributes of an owner that describe the virtual machine.
    pub attributes: BTreeMap<String, String>,
}

/// The role of a pod for its virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRole {
    /// The pod runs the virtual machine.
    Source,
    /// The virtual machine migrates to the pod, or has done so.
    Target,
}

/// Whether a virtual machine outlives its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmFate {
    /// The machine may run again and needs its addresses.
    Stays,
    /// The machine is being deleted.
    Ends,
}

/// The outcome of an assignment to a virtual machine's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmAnswer {
    /// The machine already had these addresses, or another family was added to them.
    Kept(Vec<AssignedAddress>),
    /// The machine got these addresses now.
    First(Vec<AssignedAddress>),
    /// Addresses of virtual machines are not kept. Treat the pod like any other.
    Off,
}

impl VmPod {
    /// True if these are the attributes of this pod.
    pub(crate) fn is_named_by(&self, attributes: &BTreeMap<String, String>) -> bool {
        attributes.get("namespace") == Some(&self.namespace) && attributes.get("pod") == Some(&self.name)
    }
}

/// True if a virtual machine holds the address. The machine may be stopped, so no node can show that the address is
/// unused.
pub fn is_vms(entry: &Attribute) -> bool {
    let Some(handle) = entry.handle() else { return false };
    match entry.get(NETWORK) {
        // An attachment's handle begins with its network's name, which may contain the infix.
        Some(network) => handle.strip_prefix(network).is_some_and(|rest| rest.starts_with(VM_INFIX)),
        None => handle.contains(VM_INFIX),
    }
}

/// The key of the setting that keeps addresses of virtual machines.
pub(crate) fn switch_key() -> Key {
    SWITCH_KEY.into()
}

/// True if addresses of virtual machines are not kept. As in Calico, this takes exactly the word `Disabled` in a
/// readable document.
pub(crate) async fn is_off(tx: &mut Transaction) -> Result<bool> {
    let stored = tx.snapshot_get(&switch_key()).await?;
    let document = stored.and_then(|value| serde_json::from_slice::<Value>(value.as_bytes()).ok());
    let switch = document.as_ref().and_then(|document| document.pointer("/spec/kubeVirtVMAddressPersistence"));
    Ok(switch.and_then(Value::as_str) == Some("Disabled"))
}

/// The addresses of a virtual machine according to the blocks, and the blocks that its handle miscounts.
#[derive(Debug, Default)]
pub(crate) struct VmHoldings {
    /// The addresses with their blocks, IPv4 first.
    pub(crate) addresses: Vec<(IpAddr, IpNet)>,
    /// Blocks whose count in the handle differs from the held addresses, because another writer was interrupted or is
    /// still at work.
    miscounted: Vec<IpNet>,
}

impl VmHoldings {
    /// Reads the addresses of a handle. A missing handle holds none.
    ///
    /// # Errors
    /// `Malformed` for a damaged handle or block. The machine must not get another address because one cannot be read.
    /// Any store error.
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

    /// Corrects the handle. Each miscounted block is also written, so that another writer that is about to change it
    /// fails and retries.
    pub(crate) async fn mend(&self, work: &mut WriteSet<'_>, handle: &str) -> Result<()> {
        for cidr in &self.miscounted {
            work.change(*cidr, |_| ()).await?;
            work.touch_handle(handle, *cidr);
        }
        Ok(())
    }
}

impl Ipam {
    /// Changes the attributes of the active owner, of the alternate owner or of both, for an address that is held under
    /// a handle. Each is changed only if it is the owner that the update expects. All changes are made in one commit,
    /// or none. If the owners are already as requested, nothing is written, so the call can be repeated.
    ///
    /// New attributes replace all existing ones, including Margay's (`margay.io/...`) and `node`, so pass on those to
    /// keep. Handle, sequence number and other addresses are not changed. Calico, in contrast, changes the owners of
    /// all addresses that were assigned in the same call.
    ///
    /// Guards: the block.
    ///
    /// # Errors
    /// With Calico's texts: `Unassigned` if the address has no holder; `Owner` if it is not held under the handle (as
    /// in cooldown), or its owner is not the expected one. Any store error.
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
        assert!(
            !entry("a.vmi.b.0123456789abcdef", Some("a.vmi.b")),
            "the network's own name looks like a virtual machine's"
        );
        assert!(!is_vms(&Attribute::default()));
    }
}
