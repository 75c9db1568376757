//! Making a handle say what the blocks hold.

use std::collections::BTreeSet;

use ipam_core::Result;
use ipam_core::model::{Block, Document, Handle, keys};
use ipam_core::surroundings::read_config;
use ipam_core::workset::Workset;
use ipnet::IpNet;
use kv::Transaction;

use super::mend::{Mended, is_newer};
use crate::Operator;

impl Operator {
    /// Writes a handle anew from the blocks: those that it names, and those that were found to hold something under it.
    ///
    /// All those blocks are guarded. Where a count is too high, its block is written, too: Calico counts in the handle
    /// before it writes the block, and a writer between the two steps must start again, and counts again.
    pub(super) async fn mend_handle(
        &self,
        tx: &mut Transaction,
        id: &str,
        found: &[IpNet],
        at: kv::Revision,
    ) -> Result<Mended> {
        let key = keys::handle(id);
        let mut needed = vec![key.clone(), keys::config()];
        needed.extend(found.iter().map(|cidr| keys::block(*cidr)));
        tx.prefetch(needed, Vec::new()).await?;
        let stored = tx.get(&key).await?;
        if is_newer(tx, &key, at) {
            return Ok(Mended::Changed);
        }
        let read = stored.as_ref().map(|value| Handle::decode(&key, value.as_bytes()));
        let was_unreadable = matches!(read, Some(Err(_)));
        let mut handle = read.and_then(Result::ok).unwrap_or_else(Handle::new);
        let named = handle.blocks().map(|(cidr, _)| cidr);
        let blocks: BTreeSet<IpNet> = named.chain(found.iter().copied()).collect();
        let rest = read_config(tx).await?.cooldown_seconds();
        let mut work = Workset::new(tx, self.ipam().now(), rest);
        work.read_ahead(&blocks.iter().copied().collect::<Vec<_>>()).await?;

        let (mut counts, mut differs) = (Vec::new(), was_unreadable || handle.odd_entries() > 0);
        for cidr in blocks {
            work.tx.get(&keys::block(cidr)).await?;
            let of = |block: &Block| i64::try_from(block.ips_by_handle(id).len()).unwrap_or(i64::MAX);
            let holds = work.block(cidr).await?.map(of);
            let counted = handle.count(cidr);
            let is_named = handle.blocks().any(|(named, _)| named == cidr);
            differs |= counted != holds.unwrap_or_default() || (is_named && counted <= 0);
            if holds.is_some_and(|holds| counted > holds) {
                work.change(cidr, |_| ()).await?;
            }
            counts.push((cidr, holds.unwrap_or_default()));
        }
        let is_stored_for_nothing = stored.is_some() && counts.iter().all(|(_, count)| *count == 0);
        if !differs && !is_stored_for_nothing {
            return Ok(Mended::Changed);
        }
        handle.set_all(counts);
        if !handle.is_empty() {
            work.tx.put(&key, handle.encode()?)?;
        } else if stored.is_some() {
            work.tx.delete(&key)?;
        } else {
            return Ok(Mended::Changed);
        }
        work.write().await?;
        Ok(Mended::Done)
    }
}
