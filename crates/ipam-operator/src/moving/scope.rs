//! Which keys are moved.

use ipam_core::filling::mark_key;
use ipam_core::model::keys::{self, ResourceKind};
use kv::{Key, Range};

/// All keys of ours begin so.
const OURS: &str = "/margay/";

/// The role of a moved key in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The books: blocks, handles, affinities, settings, pools, reservations. A target has none of its own.
    Books,
    /// A description of the cluster around: nodes and the like. A target may have its own, which then stays as it is.
    Around,
}

/// The key of the name of an embedded store's one node.
pub(super) fn pinned_node_key() -> Key {
    keys::PINNED_NODE.into()
}

/// Where the keys are that are moved, ascending. The mark's is in there, too, and is not moved.
pub fn ranges() -> Vec<Range> {
    all().into_iter().map(|(range, _)| range).collect()
}

/// Where a store has to be empty to become a target.
pub fn must_be_empty() -> Vec<Range> {
    all().into_iter().filter(|(_, part)| *part == Part::Books).map(|(range, _)| range).collect()
}

/// The role of a key; `None` for one that is not moved.
pub fn part_of(key: &Key) -> Option<Part> {
    if *key == mark_key() {
        return None;
    }
    all().into_iter().find(|(range, _)| range.contains(key.as_bytes())).map(|(_, part)| part)
}

/// The part of the ranges that begins at `from` and ends before `to`, or nowhere.
pub fn ranges_between(from: &Key, to: Option<&Key>) -> Vec<Range> {
    let mut between = Vec::new();
    for range in ranges() {
        let (first, end) = range.bounds();
        let first = first.max(from.clone());
        let end = match (end, to) {
            (Some(end), Some(to)) => end.min(to.clone()),
            (Some(end), None) => end,
            (None, Some(to)) => to.clone(),
            (None, None) => continue,
        };
        if first < end {
            between.push(Range::FromTo(first, end));
        }
    }
    between
}

fn all() -> [(Range, Part); 7] {
    let resource = |kind| Range::Prefix(keys::resources_prefix(kind));
    let other = |plural| Range::Prefix(keys::other_resources_prefix(plural));
    [
        (Range::Prefix(keys::ipam_prefix()), Part::Books),
        (other("clusterinformations"), Part::Around),
        (other("ipamconfigurations"), Part::Around),
        (resource(ResourceKind::IpPool), Part::Books),
        (resource(ResourceKind::IpReservation), Part::Books),
        (resource(ResourceKind::Node), Part::Around),
        (Range::prefix(OURS), Part::Books),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranges_ascend_and_have_the_keys_of_every_kind() {
        let bounds: Vec<_> = ranges().iter().map(Range::bounds).collect();
        for pair in bounds.windows(2) {
            assert!(pair[0].1.as_ref().unwrap() <= &pair[1].0, "{pair:?}");
        }
        let cidr = "10.0.0.0/26".parse().unwrap();
        for key in [keys::block(cidr), keys::handle("n.c"), keys::config(), keys::legacy_host("a"), pinned_node_key()] {
            assert_eq!(part_of(&key), Some(Part::Books), "{key}");
        }
        assert_eq!(part_of(&keys::resource(ResourceKind::IpPool, "p")), Some(Part::Books));
        assert_eq!(part_of(&keys::resource(ResourceKind::Node, "n")), Some(Part::Around));
        assert_eq!(part_of(&mark_key()), None);
        assert_eq!(part_of(&"/calico/resources/v3/projectcalico.org/profiles/a".into()), None);
    }

    #[test]
    fn parts_of_the_ranges_fit_together() {
        let all = ranges_between(&Key::default(), None);
        assert_eq!(all.len(), ranges().len());
        let at = keys::handle("m");
        let (low, high) = (ranges_between(&Key::default(), Some(&at)), ranges_between(&at, None));
        assert_eq!(low.len() + high.len(), all.len() + 1, "one range is cut in two");
        assert!(low.iter().all(|range| !range.contains(at.as_bytes())));
        assert!(high[0].contains(at.as_bytes()));
    }
}
