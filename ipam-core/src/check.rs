//! Finds the addresses that an attachment holds. A repeated ADD returns the addresses that the attachment holds. A
//! CHECK compares the held addresses with those that the runtime names.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Range};
use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};

use crate::assign::AssignedAddress;
use crate::assign_context::{decode_all, read_config};
use crate::attachment::{Attachment, AttributeNames, BOOT, NETNS, Ownership, TIMESTAMP};
use crate::block_lookup::group_by_block;
use crate::boxed_future;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Attribute, Document, Handle, Pool, ReleaseRequest};
use crate::pools;
use crate::sticky::waits_until;
use crate::timestamps::parse_go_string;
use crate::write_set::WriteSet;

/// Who holds an address that an attachment uses, according to the container runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// The attachment holds the address.
    Own,
    /// The attachment may hold the address: the allocation has the attachment's handle or no handle, and none of
    /// Margay's attributes.
    Unmarked,
    /// Another attachment holds the address. The value is the handle of that attachment.
    Another(String),
    /// The address has no holder, so the next assignment may assign the address.
    Free,
    /// No pool and no block contains the address, so the store has no information about the address.
    Unknown,
}

/// The result of [`Ipam::compare`], which compares the addresses that the runtime names for an attachment with the
/// store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckResult {
    /// All addresses of the attachment, and the addresses under its handle without a recorded interface. Addresses that
    /// are recorded for a node other than the attachment's are not in this list.
    pub held: Vec<IpAddr>,
    /// Each address that the runtime named, with its [`Standing`].
    pub standings: Vec<(IpAddr, Standing)>,
}

impl Ipam {
    /// Compares the addresses that the runtime names for an attachment with the store. `old_handles` are the handles
    /// that earlier versions of Calico would have used for the attachment.
    ///
    /// # Errors
    /// Any store error. `Malformed` for damaged documents.
    #[boxed_future]
    pub async fn compare(
        &self,
        attachment: &Attachment,
        old_handles: &[String],
        addresses: &[IpAddr],
        deadline: Deadline,
    ) -> Result<CheckResult> {
        transact!(self, deadline, |tx| {
            let range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
            let mut first = self.host_keys(&attachment.node);
            first.extend([keys::handle(&attachment.handle()), keys::config()]);
            tx.prefetch(first, vec![range.clone().into()]).await?;
            let own = Attachment { node: self.known_name(tx, &attachment.node).await?, ..attachment.clone() };
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&range).await?);

            let mut work = WriteSet::new(tx, self.now(), cooldown);
            let held = held_by(&mut work, &own, None, |claim| claim != Ownership::Foreign).await?;
            // The blocks of the attachment's held addresses are read even if their pool was deleted.
            let own_blocks = held.iter().map(|held| held.block);
            let in_pools = addresses.iter().flat_map(|ip| pools.iter().filter_map(|pool| pools::block_of(pool, *ip)));
            let blocks: Vec<IpNet> = own_blocks.chain(in_pools).collect();
            work.read_ahead(&blocks).await?;
            let mut standings = Vec::new();
            for ip in addresses {
                let mut standing = None;
                for cidr in blocks.iter().filter(|cidr| cidr.contains(ip)) {
                    if standing.as_ref().is_none_or(|found| *found == Standing::Free) {
                        let block = work.block(*cidr).await?;
                        let entry = block.and_then(|block| match block.lookup(*ip) {
                            AddressState::Assigned(entry) => Some(entry),
                            _ => None,
                        });
                        standing = Some(entry.map_or(Standing::Free, |entry| judge(&own, old_handles, entry)));
                    }
                }
                if standing == Some(Standing::Free) {
                    standing = elsewhere(&mut work, &pools, &own, old_handles, *ip).await?.or(standing);
                }
                standings.push((*ip, standing.unwrap_or(Standing::Unknown)));
            }
            Ok(CheckResult { held: held.iter().map(|held| held.ip).collect(), standings })
        })
    }
}

/// Returns the state of an address in a stored block whose size differs from its pool's block size. Call `elsewhere` if
/// the address is free in the block of the pool's current block size, because a block of a former size may still hold
/// the address.
async fn elsewhere(
    work: &mut WriteSet<'_>,
    pools: &[Pool],
    own: &Attachment,
    old_handles: &[String],
    ip: IpAddr,
) -> Result<Option<Standing>> {
    let blocks = group_by_block(work.tx, pools, &[ReleaseRequest::new(ip)]).await?;
    for cidr in blocks.into_keys() {
        if let Some(block) = work.block(cidr).await? {
            let entry = block.attributes_of(ip);
            return Ok(Some(entry.map_or(Standing::Free, |entry| judge(own, old_handles, entry))));
        }
    }
    Ok(None)
}

/// Decides, from the block entry of an address, who holds the address: the attachment `own` or another one.
fn judge(own: &Attachment, old_handles: &[String], entry: &Attribute) -> Standing {
    if waits_until(entry).is_some() {
        // A sticky address that waits for its workload has no holder until the workload starts again.
        return Standing::Free;
    }
    let Some(handle) = entry.handle() else { return Standing::Unmarked };
    if entry.has_handle(&own.handle()) {
        return match own.claim(entry) {
            Ownership::Own => Standing::Own,
            Ownership::Unmarked => Standing::Unmarked,
            Ownership::Foreign => Standing::Another(handle.to_owned()),
        };
    }
    let is_old = entry.network().is_none() && old_handles.iter().any(|old| entry.has_handle(old));
    if is_old { Standing::Unmarked } else { Standing::Another(handle.to_owned()) }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldAddress {
    pub(crate) ip: IpAddr,
    pub(crate) block: IpNet,
    /// True if the address was assigned recently, and in the host's current boot. If no time of assignment is recorded,
    /// the address counts as recent. If no boot is recorded, the address counts as assigned in the current boot.
    is_current: bool,
}

/// Minimum age of an assignment whose timestamp a repeated request updates. Updating an assignment's timestamp keeps
/// garbage collection from freeing an address that is about to be used. An ADD that a runtime retries within
/// [`MIN_RENEWAL_AGE`] after the assignment writes nothing.
const MIN_RENEWAL_AGE: Duration = Duration::seconds(10);

/// Returns the addresses held under the attachment's handle for which `counts` accepts the address's [`Ownership`]. The
/// blocks are read without a guard, so another writer may change the blocks before the commit. `asked_at` is the time
/// at which the attachment's request arrived, if known.
pub(crate) async fn held_by(
    work: &mut WriteSet<'_>,
    attachment: &Attachment,
    asked_at: Option<OffsetDateTime>,
    counts: impl Fn(Ownership) -> bool,
) -> Result<Vec<HeldAddress>> {
    let handle = &attachment.handle();
    let key = keys::handle(handle);
    let Some(stored) = work.tx.snapshot_get(&key).await? else { return Ok(Vec::new()) };
    let blocks: Vec<IpNet> = Handle::decode(&key, stored.as_bytes())?.blocks().map(|(cidr, _)| cidr).collect();
    work.read_ahead(&blocks).await?;
    let mut held = Vec::new();
    for cidr in blocks {
        let Some(block) = work.block(cidr).await? else { continue };
        let own = block
            .allocated()
            .filter(|(_, entry)| entry.has_handle(handle) && counts(attachment.claim(entry)))
            .map(|(ip, entry)| HeldAddress { ip, block: cidr, is_current: is_current(attachment, asked_at, entry) });
        held.extend(own);
    }
    Ok(held)
}

/// True if an address was assigned in the host's current boot and shortly before the request. An unknown boot of the
/// host counts as the current boot, and an unknown time of the request as recent.
fn is_current(attachment: &Attachment, asked_at: Option<OffsetDateTime>, entry: &Attribute) -> bool {
    let same_boot = attachment.boot.is_none() || entry.get(BOOT) == attachment.boot.as_deref();
    let given_at = || entry.get(TIMESTAMP).and_then(parse_go_string);
    let recent = asked_at.is_none_or(|now| given_at().is_some_and(|then| (now - then).abs() < MIN_RENEWAL_AGE));
    same_boot && recent
}

/// Updates the recorded boot, time and network namespace of requested addresses that the attachment already holds. The
/// attributes of an address are updated if it was assigned in an earlier boot or for another network namespace, or if
/// its timestamp is not recent. When a runtime restarts a container after a reboot, it repeats the ADD; the updated
/// attributes show that the container's addresses are not leftovers of an earlier boot.
pub(crate) async fn renew(
    work: &mut WriteSet<'_>,
    attachment: &Attachment,
    held: &[HeldAddress],
    answer: &[AssignedAddress],
    attributes: &BTreeMap<String, String>,
    names: AttributeNames,
) -> Result<()> {
    let netns = attributes.get(NETNS).map(String::as_str);
    let noted = [(BOOT, attachment.boot.as_deref()), (TIMESTAMP, attributes.get(TIMESTAMP).map(String::as_str))];
    let noted = noted.into_iter().filter(|(_, value)| value.is_some()).chain([(NETNS, netns)]);
    for old in held.iter().filter(|held| answer.iter().any(|assigned| assigned.ip == held.ip)) {
        let block = work.block(old.block).await?;
        let recorded = block.and_then(|block| block.attributes_of(old.ip)).and_then(|entry| entry.get(NETNS));
        if !old.is_current || recorded != netns {
            let renewed = work.change(old.block, |block| {
                block.renew(old.ip, noted.clone());
                if names == AttributeNames::Own {
                    block.use_own_names_of(old.ip);
                }
            });
            renewed.await?;
        }
    }
    Ok(())
}
