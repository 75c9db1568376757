//! Manages the addresses of KubeVirt's virtual machines on Calico's networks. A virtual machine keeps its addresses
//! while its pods change.
//!
//! A virtual machine's addresses are held under a separate handle, `<network>.vmi.<namespace>.<name>`. The pod that
//! runs the machine is the active owner of each address. The pod to which the machine migrates is the alternate owner.
//! A stopped machine's addresses have no owner. Owners change while the machine exists; the addresses are released only
//! with the machine.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};
use serde_json::Value;

use crate::assign::AssignedAddress;
use crate::assign_context::read_config;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{AddressState, Attribute, Document, Handle, OwnerUpdate, keys};
use crate::usage::block_around;
use crate::write_set::WriteSet;

/// The part of a virtual machine's handle that follows the network's name.
pub const VM_INFIX: &str = ".vmi.";
/// The key of Calico's document with the setting that keeps virtual machines' addresses. The allocator's settings have
/// a field of the same name, but no plugin reads that field.
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
    /// The role of the pod for the virtual machine.
    pub role: PodRole,
    /// Whether the virtual machine outlives this pod.
    pub fate: VmFate,
    /// The attributes that describe the virtual machine in the owner's attributes of an address.
    pub attributes: BTreeMap<String, String>,
}

/// The role of a pod for its virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRole {
    /// The pod runs the virtual machine.
    Source,
    /// The virtual machine migrates to the pod, or has already migrated.
    Target,
}

/// Whether a virtual machine outlives its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmFate {
    /// The virtual machine may run again and needs its addresses.
    Stays,
    /// The virtual machine is being deleted.
    Ends,
}

/// The outcome of an assignment to a virtual machine's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmAnswer {
    /// The virtual machine already had these addresses, or addresses of another family were added to them.
    Kept(Vec<AssignedAddress>),
    /// The virtual machine had no address before and was assigned these addresses.
    First(Vec<AssignedAddress>),
    /// Keeping virtual machines' addresses is turned off. The pod must be treated like any other pod.
    Off,
}

impl VmPod {
    /// True if the attributes of an owner name this pod.
    pub(crate) fn is_named_by(&self, attributes: &BTreeMap<String, String>) -> bool {
        attributes.get("namespace") == Some(&self.namespace) && attributes.get("pod") == Some(&self.name)
    }
}

/// True if a virtual machine holds the address. The machine may be stopped, so no node can show that the address is
/// unused.
pub fn is_vms(entry: &Attribute) -> bool {
    let Some(handle) = entry.handle() else { return false };
    match entry.network() {
        // An attachment's handle begins with its network's name, which may contain the infix.
        Some(network) => handle.strip_prefix(network).is_some_and(|rest| rest.starts_with(VM_INFIX)),
        None => handle.contains(VM_INFIX),
    }
}

/// Returns the key of the setting that keeps addresses of virtual machines.
pub(crate) fn switch_key() -> Key {
    SWITCH_KEY.into()
}

/// True if keeping virtual machines' addresses is turned off. As in Calico, only the exact word `Disabled` in a
/// readable document turns it off.
pub(crate) async fn is_off(tx: &mut Transaction) -> Result<bool> {
    let stored = tx.snapshot_get(&switch_key()).await?;
    let document = stored.and_then(|value| serde_json::from_slice::<Value>(value.as_bytes()).ok());
    let switch = document.as_ref().and_then(|document| document.pointer("/spec/kubeVirtVMAddressPersistence"));
    Ok(switch.and_then(Value::as_str) == Some("Disabled"))
}

/// The addresses of a virtual machine according to the blocks, and the blocks that its handle miscounts.
#[derive(Debug, Default)]
pub(crate) struct VmHoldings {
    /// The addresses of the virtual machine with their blocks, IPv4 first.
    pub(crate) addresses: Vec<(IpAddr, IpNet)>,
    /// Blocks whose count in the handle differs from the number of held addresses, because another writer was
    /// interrupted or is still at work.
    miscounted: Vec<IpNet>,
}

impl VmHoldings {
    /// Reads the addresses of a handle. A missing handle holds no addresses.
    ///
    /// # Errors
    /// `Malformed` for a damaged handle or block, so that a machine with an unreadable address does not get another
    /// address. Any store error.
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

    /// Corrects the counts of the handle. Each miscounted block is also written, so that a concurrent writer of the
    /// block fails and retries.
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
    /// a handle. The attributes of an owner are changed only if the owner is the one that the update expects. All
    /// changes are made in one commit, or none. If the owners are already as requested, nothing is written, so the call
    /// can be repeated.
    ///
    /// New attributes replace all existing attributes, including `node` and Margay's attributes (`margay.io/...`), so
    /// pass on the attributes to keep. Handle, sequence number and other addresses are not changed. Calico, in
    /// contrast, changes the owners of all addresses that were assigned in the same call.
    ///
    /// The commit guards the block.
    ///
    /// # Errors
    /// Returns these errors with Calico's texts: `Unassigned` if the address has no holder; `Owner` if the address is
    /// not held under the handle (for example, in cooldown), or if its owner is not the expected one. Any store error.
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
    use crate::attachment::NETWORK;

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
