//! Selects the events that concern an address, a container or a node, and determines the time of each event.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use ipam_core::hints::{possible_blocks, possible_blocks_of_prefixes};
use ipam_core::model::{Attribute, Owner, keys, same_handle};
use ipnet::IpNet;
use kv::{Batch, Key, Prev, Range, Revision, Store, WatchRequest};
use time::OffsetDateTime;
use tokio::time::timeout;

use crate::events::{BlockEvent, BlockEventKind, Holder, of_batch};

/// How long [`time_after`] waits for the next change on its watch.
const FIRST_CHANGE_TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum number of revisions without a known time that [`time_after`] reads before it gives up.
const MAX_REVISIONS_WITHOUT_TIME: usize = 50;

/// The address, handle, container or node whose history is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryOf {
    /// The history of an address, and of the prefix that contains the address.
    Address(IpAddr),
    /// The history of the handle, container or node with this name.
    Name(String),
    /// The history of the node with this name.
    Node(String),
}

impl From<&str> for HistoryOf {
    fn from(text: &str) -> Self {
        let prefix = || text.parse::<IpNet>().map(|net| net.addr());
        text.parse().or_else(|_| prefix()).map_or_else(|_| Self::Name(text.to_owned()), Self::Address)
    }
}

impl HistoryOf {
    /// The key ranges whose changes can concern this address, handle, container or node. The returned key ranges can
    /// also contain unrelated keys. If the first returned key range has no matching event, the caller tries the next
    /// key range. Finding an address needs two key ranges: it can lie in a block of single addresses or inside an
    /// assigned prefix.
    pub fn ranges(&self) -> Vec<Range> {
        let Self::Address(ip) = self else { return vec![Range::Prefix(keys::ipam_prefix())] };
        let around = |blocks: Vec<IpNet>| {
            let blocks: Vec<Key> = blocks.into_iter().map(keys::block).collect();
            let (first, last) = (blocks.iter().min()?.clone(), blocks.iter().max()?);
            Some(Range::FromTo(first, last.successor()))
        };
        [possible_blocks(*ip), possible_blocks_of_prefixes(*ip)].into_iter().filter_map(around).collect()
    }

    /// True if an event concerns the address, handle, container or node whose history is reported.
    pub fn concerns(&self, block_event: &BlockEvent) -> bool {
        if let Self::Address(ip) = self {
            let is_damage = block_event.what == BlockEventKind::Damaged && block_event.block.contains(ip);
            return is_damage || block_event.unit().is_some_and(|unit| unit.contains(ip));
        }
        let (has_it, owns_it) = (|entry: &Attribute| self.has(entry), |owner: &Owner| self.owns(owner));
        match &block_event.what {
            BlockEventKind::Moved { from, to, .. } => has_it(from) || has_it(to),
            BlockEventKind::Claimed { owner, former, .. } => owns_it(owner) || former.as_ref().is_some_and(owns_it),
            what => what.holder().is_some_and(has_it) || what.owner().is_some_and(owns_it),
        }
    }
}

impl HistoryOf {
    /// True if the report covers the history of the handle, container or node that a block's entry names.
    fn has(&self, entry: &Attribute) -> bool {
        let holder = Holder::of(entry);
        match self {
            Self::Address(_) => false,
            Self::Node(name) => holder.node == Some(name),
            Self::Name(name) => {
                holder.handle.is_some_and(|handle| same_handle(handle, name))
                    || [holder.container, holder.node].contains(&Some(name))
            }
        }
    }

    /// True if the report covers the history of the given block owner.
    fn owns(&self, owner: &Owner) -> bool {
        match self {
            Self::Address(_) => false,
            Self::Node(name) => owner.node() == Some(name),
            Self::Name(name) => owner.node() == Some(name) || owner.to_string() == *name,
        }
    }
}

/// The time of an event: the store's commit time, or else the time that the document records.
pub fn time_of(committed: Option<SystemTime>, what: &BlockEventKind) -> Option<OffsetDateTime> {
    committed.map(OffsetDateTime::from).or_else(|| what.recorded_at())
}

/// Finds the first known commit time at or after a revision, among the changes in a key range. Returns `None` if the
/// range has no change at or after the revision, or only changes without a known time.
///
/// # Errors
/// Any error that [`Store::watch`] returns.
pub async fn time_after(store: &dyn Store, range: &Range, revision: Revision) -> kv::Result<Option<OffsetDateTime>> {
    let mut changes = store.watch(WatchRequest::new(range.clone(), revision).with_prev(Prev::Return)).await?;
    for _ in 0..MAX_REVISIONS_WITHOUT_TIME {
        let Ok(Some(batch)) = timeout(FIRST_CHANGE_TIMEOUT, changes.next()).await else { return Ok(None) };
        if let Some(time) = time_of_batch(&batch?) {
            return Ok(Some(time));
        }
    }
    Ok(None)
}

/// The time of a commit: the store's commit time, or else a time that the written documents record.
fn time_of_batch(batch: &Batch) -> Option<OffsetDateTime> {
    let committed: Option<SystemTime> = batch.time;
    match committed {
        Some(time) => Some(time.into()),
        None => of_batch(batch).block_events.iter().find_map(|block_event| time_of(None, &block_event.what)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn history_range_of_address_has_block_of_any_size() {
        for (ip, sizes) in [("10.65.7.9", 20..=32), ("fd80:24e2::7:9", 116..=128)] {
            let ranges = HistoryOf::from(ip).ranges();
            let range = &ranges[0];
            for bits in sizes {
                let block = IpNet::new(ip.parse().unwrap(), bits).unwrap().trunc();
                assert!(range.contains(keys::block(block).as_bytes()), "{block} in {range}");
            }
            assert!(!range.contains(keys::handle("a").as_bytes()));
        }
    }

    #[test]
    fn history_name_is_handle_container_or_node() {
        let entry = |network: Option<&str>| {
            let mut attributes = BTreeMap::from([("node".to_owned(), "node1".to_owned())]);
            attributes.extend(network.map(|network| (ipam_core::attachment::NETWORK.to_owned(), network.to_owned())));
            Attribute::new(Some("net.a.c1\r\neth0"), attributes)
        };
        let address = "10.0.0.1".parse().unwrap();
        let block = "10.0.0.0/30".parse().unwrap();
        let assigned = |network| BlockEvent::of(block, BlockEventKind::Assigned { address, holder: entry(network) });
        for (name, network, expected) in [
            ("net.a.c1", None, true),
            ("node1", None, true),
            ("c1", Some("net.a"), true),
            ("c1", None, false),
            ("a.c1", Some("net.a"), false),
            ("net", Some("net.a"), false),
            ("10.0.0.1", None, true),
            ("10.0.0.2", None, false),
        ] {
            assert_eq!(HistoryOf::from(name).concerns(&assigned(network)), expected, "{name}");
        }
        let claimed =
            BlockEventKind::Claimed { owner: Owner::host("node1"), former: Some(Owner::load_balancer()), at: None };
        let claimed = BlockEvent::of(block, claimed);
        assert!(HistoryOf::Node("node1".into()).concerns(&claimed) && !HistoryOf::Node("c1".into()).concerns(&claimed));
        assert!(
            HistoryOf::from("node1").concerns(&claimed) && HistoryOf::from("virtual:load-balancer").concerns(&claimed)
        );
        assert!(
            !HistoryOf::from("load-balancer").concerns(&claimed) && !HistoryOf::from("10.0.0.1").concerns(&claimed)
        );
    }
}
