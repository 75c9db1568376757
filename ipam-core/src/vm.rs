//! Manages the addresses of KubeVirt's virtual machines on Calico's networks. A virtual machine keeps its addresses
//! when its pod is replaced by another pod.
//!
//! A virtual machine's addresses are held under the machine's own handle, `<network>.vmi.<namespace>.<name>`. The pod
//! that runs the machine is the active owner of each of the machine's addresses. During a migration, the pod to which
//! the machine migrates is the alternate owner. The addresses of a stopped machine have no owner. A machine's addresses
//! are released only when the machine is deleted.

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
/// The key of the Calico document with the setting by which virtual machines keep their addresses. Calico's IPAM
/// settings document has a field of the same name, but no CNI plugin reads the field there.
const SWITCH_KEY: &str = "/calico/resources/v3/projectcalico.org/ipamconfigurations/default";

/// A pod that runs a virtual machine, or to which the machine migrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPod {
    /// The handle of the virtual machine.
    pub handle: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// Whether the pod runs the virtual machine or is the target of a migration.
    pub role: PodRole,
    /// Whether the virtual machine may run again after this pod has ended.
    pub fate: VmFate,
    /// The attributes that describe the virtual machine. An assignment adds the virtual machine's attributes to the
    /// owner attributes of each assigned address.
    pub attributes: BTreeMap<String, String>,
}

/// Whether a pod runs its virtual machine or is the target of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRole {
    /// The pod runs the virtual machine.
    Source,
    /// The virtual machine migrates to the pod, or has already migrated to it.
    Target,
}

/// Whether a virtual machine may run again after its pod has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmFate {
    /// The virtual machine may run again, and then needs its addresses.
    Stays,
    /// The virtual machine is being deleted, and needs its addresses no longer.
    Ends,
}

/// The outcome of an assignment to a virtual machine's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmAnswer {
    /// The virtual machine keeps the addresses that it already had; if it had addresses of only one family, an address
    /// of the other family may have been added.
    Kept(Vec<AssignedAddress>),
    /// The virtual machine had no address before; the listed addresses were newly assigned.
    First(Vec<AssignedAddress>),
    /// The setting by which virtual machines keep their addresses is off, so the pod must be treated like any other
    /// pod.
    Off,
}

impl VmPod {
    /// True if the attributes of an address's owner name this pod.
    pub(crate) fn is_named_by(&self, attributes: &BTreeMap<String, String>) -> bool {
        attributes.get("namespace") == Some(&self.namespace) && attributes.get("pod") == Some(&self.name)
    }
}

/// True if a virtual machine holds the address. A virtual machine's address never counts as unused, because the machine
/// may only be stopped.
pub fn is_vms(entry: &Attribute) -> bool {
    let Some(handle) = entry.handle() else { return false };
    match entry.network() {
        // A container's handle begins with the network's name, and this name may contain [`VM_INFIX`].
        Some(network) => handle.strip_prefix(network).is_some_and(|rest| rest.starts_with(VM_INFIX)),
        None => handle.contains(VM_INFIX),
    }
}

/// Returns the key of the document with the setting by which virtual machines keep their addresses.
pub(crate) fn switch_key() -> Key {
    SWITCH_KEY.into()
}

/// True if the setting by which virtual machines keep their addresses is off. As in Calico, the setting is off only if
/// a valid document has the exact value `Disabled`.
pub(crate) async fn is_off(tx: &mut Transaction) -> Result<bool> {
    let stored = tx.snapshot_get(&switch_key()).await?;
    let document = stored.and_then(|value| serde_json::from_slice::<Value>(value.as_bytes()).ok());
    let switch = document.as_ref().and_then(|document| document.pointer("/spec/kubeVirtVMAddressPersistence"));
    Ok(switch.and_then(Value::as_str) == Some("Disabled"))
}

/// The addresses that a virtual machine holds according to the blocks, and the blocks for which its handle has a wrong
/// count.
#[derive(Debug, Default)]
pub(crate) struct VmHoldings {
    /// The addresses of the virtual machine, each with its block, IPv4 first.
    pub(crate) addresses: Vec<(IpAddr, IpNet)>,
    /// Blocks for which the handle's count differs from the number of held addresses, because another writer was
    /// interrupted or has not finished.
    miscounted: Vec<IpNet>,
}

impl VmHoldings {
    /// Reads the addresses that a handle holds. If the handle does not exist, the result is empty.
    ///
    /// # Errors
    /// `Malformed` for a damaged handle or block, so that a machine whose address cannot be read does not get a second
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

    /// Corrects wrong counts of addresses per block in the virtual machine's handle. A block for which the handle's
    /// count is wrong is rewritten unchanged, so that a concurrent writer of the block fails and retries.
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
    /// a handle. `update` names the expected owners; if the address has a different owner, nothing is changed. The
    /// active and the alternate owner are changed in one commit. If the attributes are already as requested, nothing is
    /// written, so the call can be repeated.
    ///
    /// The new attributes replace all existing attributes of the owner, including `node` and Margay's attributes
    /// (`margay.io/...`), so the caller must pass the attributes to keep. A change of owners keeps the address's handle
    /// and sequence number, and leaves other addresses of the block unchanged. Calico changes the owners of all
    /// addresses that were assigned together with the given address, whereas Margay changes the owners of one address.
    ///
    /// The commit of an owner change guards the block that contains the address.
    ///
    /// # Errors
    /// `Unassigned` if the address has no holder. `Owner` if the address is not held under the handle (for example,
    /// because it is in cooldown), or if its owner is not the expected owner. `Unassigned` and `Owner` have Calico's
    /// error messages. Any store error.
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
