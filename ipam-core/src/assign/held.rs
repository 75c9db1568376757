//! Addresses that an attachment holds when it requests some.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use time::{Duration, OffsetDateTime};

use super::Assigned;
use crate::attachment::{Attachment, BOOT, NETNS, Names, Ownership, TIMESTAMP};
use crate::error::Result;
use crate::model::{Attribute, Document, Handle, keys};
use crate::timestamps::parse_go_string;
use crate::workset::Workset;

/// An address that the attachment has already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) ip: IpAddr,
    pub(crate) block: IpNet,
    /// Whether it was assigned in this boot of the host, as far as that is known, and not long ago.
    pub(super) is_current: bool,
}

/// If an attachment requests its address again so long after it got it, the time is recorded anew, so that a collector
/// of unused addresses knows that this one is about to be used. A runtime's second try at the same call comes sooner.
const RENEWED_AFTER: Duration = Duration::seconds(10);

/// The addresses under the attachment's handle that `counts` takes for the attachment's. Not guarded: the answer is
/// true as of the revision that was read. `asked_at` is the time of the call, where that is known.
pub(crate) async fn held_by(
    work: &mut Workset<'_>,
    attachment: &Attachment,
    asked_at: Option<OffsetDateTime>,
    counts: impl Fn(Ownership) -> bool,
) -> Result<Vec<Held>> {
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
            .map(|(ip, entry)| Held { ip, block: cidr, is_current: is_current(attachment, asked_at, entry) });
        held.extend(own);
    }
    Ok(held)
}

/// True if an allocation was made in this boot of the host and not long before the request; an unknown boot of the host
/// or time of the request does not count against it.
fn is_current(attachment: &Attachment, asked_at: Option<OffsetDateTime>, entry: &Attribute) -> bool {
    let same_boot = attachment.boot.is_none() || entry.get(BOOT) == attachment.boot.as_deref();
    let given_at = || entry.get(TIMESTAMP).and_then(parse_go_string);
    let recent = asked_at.is_none_or(|now| given_at().is_some_and(|then| (now - then).abs() < RENEWED_AFTER));
    same_boot && recent
}

/// Records boot, time and network namespace on an address that was assigned in an earlier boot, long ago or for another
/// namespace, and is requested again: a runtime starts a container again after a reboot, and these distinguish
/// leftovers from addresses in use.
pub(super) async fn renew(
    work: &mut Workset<'_>,
    attachment: &Attachment,
    held: &[Held],
    answer: &[Assigned],
    attributes: &BTreeMap<String, String>,
    names: Names,
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
                if names == Names::Own {
                    block.use_own_names_of(old.ip);
                }
            });
            renewed.await?;
        }
    }
    Ok(())
}
