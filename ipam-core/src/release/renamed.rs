//! Addresses that an attachment holds under another name of its node.
//!
//! Calico releases by handle, whatever the name of the node is. Here a handle alone is too little: a container id that
//! a person has chosen can turn up on two nodes. So an allocation of another node is released with the attachment if
//! handle, network and interface are the attachment's, and the container id is one that runtimes make, or the other
//! node is not registered any more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::blocks_of_handles;
use crate::attachment::Attachment;
use crate::error::Result;
use crate::model::Attribute;
use crate::model::keys::{self, ResourceKind};
use crate::workset::Workset;

/// The other names that were found, with the addresses under them.
#[derive(Debug, Default)]
pub(super) struct Renamed {
    handle: String,
    goes: BTreeMap<String, BTreeSet<IpAddr>>,
    stays: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl Renamed {
    /// Scans the blocks of the handles, of which the attachment's is one. That another node is not registered is
    /// guarded, and costs a read only where the container id does not decide.
    pub(super) async fn find(work: &mut Workset<'_>, own: &Attachment, handles: &[String]) -> Result<Self> {
        let named = blocks_of_handles(work, handles).await?;
        let blocks: Vec<IpNet> = named.iter().map(|(_, cidr)| *cidr).collect();
        work.read_ahead(&blocks).await?;
        let mut renamed = Self { handle: own.handle(), ..Self::default() };
        let mut found: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        for (_, cidr) in named.iter().filter(|(handle, _)| *handle == renamed.handle) {
            let Some(block) = work.block(*cidr).await? else { continue };
            for (ip, entry) in block.allocated().filter(|(_, entry)| entry.has_handle(&renamed.handle)) {
                if let Some(node) = own.other_node(entry) {
                    found.entry(node.to_owned()).or_default().insert(ip);
                }
            }
        }
        for (node, addresses) in found {
            let key = keys::resource(ResourceKind::Node, &node);
            let goes = own.has_unique_id() || work.tx.get(&key).await?.is_none();
            let names = if goes { &mut renamed.goes } else { &mut renamed.stays };
            names.insert(node, addresses);
        }
        Ok(renamed)
    }

    /// True if an allocation is released with the attachment, under another name of the node.
    pub(super) fn has(&self, own: &Attachment, entry: &Attribute) -> bool {
        !self.goes.is_empty()
            && entry.has_handle(&self.handle)
            && own.other_node(entry).is_some_and(|node| self.goes.contains_key(node))
    }

    /// Logs what was done, and returns the released addresses.
    pub(super) fn reported((released, renamed): (Vec<IpAddr>, Self)) -> Vec<IpAddr> {
        let Self { handle, goes, stays } = &renamed;
        for (node, addresses) in goes {
            tracing::warn!(handle, node, ?addresses, "released addresses that were recorded for another node name");
        }
        for (node, addresses) in stays {
            tracing::warn!(
                handle,
                node,
                ?addresses,
                "left addresses of the same container id: they are recorded for another node, which is registered"
            );
        }
        released
    }
}
