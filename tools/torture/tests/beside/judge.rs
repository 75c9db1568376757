//! Checks every revision by the rules for its author (Calico's client or Margay). The judge decodes the documents
//! without Margay's model.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kv::{Event, EventKind, Kv};

use crate::documents::{Affinity, BLOCKS, Block, HANDLES, HOSTS, Handle, VIRTUALS, affinity_of, cidr_of};
use crate::turns::Side;

/// All IPAM documents that are stored at one revision.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) blocks: BTreeMap<String, Block>,
    pub(crate) handles: BTreeMap<String, Handle>,
    /// The affinities by owner and block. The keys of `affinities` contain the owner in the form used in block
    /// documents (`host:NAME`).
    pub(crate) affinities: BTreeMap<(String, String), Affinity>,
}

/// The documents that one revision changed.
#[derive(Debug, Default)]
struct Touched {
    blocks: BTreeSet<String>,
    handles: BTreeSet<String>,
    affinities: BTreeSet<(String, String)>,
}

impl Stored {
    pub(crate) fn read(kvs: &[Kv]) -> Self {
        let mut stored = Self::default();
        for kv in kvs {
            stored.apply(&kv.key.to_string(), Some(kv.value.as_bytes()), &mut Touched::default());
        }
        stored
    }

    fn apply(&mut self, key: &str, value: Option<&[u8]>, touched: &mut Touched) {
        fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
            match value {
                Some(value) => drop(map.insert(key, value)),
                None => drop(map.remove(&key)),
            }
        }
        if key.starts_with(BLOCKS) {
            touched.blocks.insert(cidr_of(key));
            set(&mut self.blocks, cidr_of(key), value.map(|value| serde_json::from_slice(value).unwrap()));
        } else if let Some(id) = key.strip_prefix(HANDLES) {
            touched.handles.insert(id.to_owned());
            set(&mut self.handles, id.to_owned(), value.map(|value| serde_json::from_slice(value).unwrap()));
        } else if let Some((kind, rest)) = [("host", HOSTS), ("virtual", VIRTUALS)]
            .iter()
            .find_map(|(kind, prefix)| Some((kind, key.strip_prefix(prefix)?)))
        {
            let pair = (format!("{kind}:{}", rest.split('/').next().unwrap()), cidr_of(key));
            touched.affinities.insert(pair.clone());
            set(&mut self.affinities, pair, value.map(affinity_of));
        }
    }

    pub(crate) fn holders(&self) -> BTreeMap<IpAddr, String> {
        self.blocks.values().flat_map(Block::holders).collect()
    }

    /// Returns how many addresses of a block a handle holds, according to the block's document.
    fn held(&self, handle: &str, cidr: &str) -> i64 {
        let holders = self.blocks.get(cidr).map(Block::holders).unwrap_or_default();
        i64::try_from(holders.values().filter(|holder| *holder == handle).count()).unwrap()
    }

    fn counted(&self, handle: &str, cidr: &str) -> i64 {
        self.handles.get(handle).and_then(|handle| handle.block.get(cidr)).copied().unwrap_or_default()
    }

    fn owns(&self, owner: &str, cidr: &str) -> bool {
        self.blocks.get(cidr).is_some_and(|block| block.affinity.as_deref() == Some(owner))
    }

    fn has_confirmed(&self, owner: &str, cidr: &str) -> bool {
        self.affinities.get(&(owner.to_owned(), cidr.to_owned())).is_some_and(Affinity::is_confirmed)
    }

    /// Returns the assigned addresses whose handle document does not count their block. Releasing a handle does not
    /// release addresses that the handle's document does not count.
    pub(crate) fn lost(&self) -> Vec<(IpAddr, String)> {
        let blocks =
            self.blocks.iter().flat_map(|(cidr, block)| block.holders().into_iter().map(move |held| (cidr, held)));
        blocks.filter(|(cidr, (_, handle))| self.counted(handle, cidr) < 1).map(|(_, held)| held).collect()
    }
}

/// Follows the revisions of a store and checks each of them.
#[derive(Debug)]
pub(crate) struct Judge {
    pub(crate) now: Stored,
    /// The number of revisions that each side (Calico or Margay) has written.
    pub(crate) seen: BTreeMap<Side, usize>,
}

impl Judge {
    pub(crate) fn new(start: &[Kv]) -> Self {
        Self { now: Stored::read(start), seen: BTreeMap::new() }
    }

    /// Applies the changes of the next revision and checks the new state of the documents.
    ///
    /// # Errors
    /// An error that names the violated rule and the keys that the revision changed.
    pub(crate) fn advance(&mut self, side: Side, events: &[Event]) -> Result<(), String> {
        let before = self.now.clone();
        let mut touched = Touched::default();
        for event in events {
            let value = (event.kind == EventKind::Put).then(|| event.kv.value.as_bytes());
            self.now.apply(&event.kv.key.to_string(), value, &mut touched);
        }
        *self.seen.entry(side).or_default() += 1;
        let moved = not_moved(&before, &self.now);
        let done = if side == Side::Ours { moved.and_then(|()| self.ours(&before, &touched)) } else { moved };
        done.map_err(|what| {
            let keys: Vec<String> = events.iter().map(|event| format!("{:?} {}", event.kind, event.kv.key)).collect();
            format!("a revision of {side:?}: {what}\n  {}", keys.join("\n  "))
        })
    }

    /// Checks the rules for a revision that Margay wrote.
    fn ours(&self, before: &Stored, touched: &Touched) -> Result<(), String> {
        let now = &self.now;
        let mut pairs = BTreeSet::new();
        for cidr in &touched.blocks {
            let (old, new) = (before.blocks.get(cidr), now.blocks.get(cidr));
            for block in old.into_iter().chain(new) {
                pairs.extend(block.holders().into_values().map(|handle| (handle, cidr.clone())));
            }
            let Some(new) = new else { continue };
            if let Some(flaw) = new.flaw(cidr) {
                return Err(format!("{cidr}: {flaw}: {new:?}"));
            }
            if new.is_empty() && new.affinity.is_none() {
                return Err(format!("{cidr} is empty and has no owner"));
            }
            if let Some(old) = old
                && new.sequence_number != old.sequence_number + 1
            {
                return Err(format!("{cidr} went from {} to {}", old.sequence_number, new.sequence_number));
            }
        }
        for handle in &touched.handles {
            for stored in [before, now] {
                let named = stored.handles.get(handle).into_iter().flat_map(|handle| handle.block.keys());
                pairs.extend(named.map(|cidr| (handle.clone(), cidr.clone())));
            }
        }
        for (handle, cidr) in pairs {
            let (held, counted) = (now.held(&handle, &cidr), now.counted(&handle, &cidr));
            let was_right = before.held(&handle, &cidr) == before.counted(&handle, &cidr);
            let was_enough = before.held(&handle, &cidr) <= before.counted(&handle, &cidr);
            let gave = held > before.held(&handle, &cidr);
            if (was_right && held != counted) || ((was_enough || gave) && held > counted) {
                return Err(format!(
                    "{cidr} holds {held} of {handle}, which counts {counted}; before it was {} and {}",
                    before.held(&handle, &cidr),
                    before.counted(&handle, &cidr)
                ));
            }
        }
        self.owners(before, touched)
    }

    /// Checks that the owners in blocks agree with the affinity documents, if they agreed before this revision or if
    /// this revision changed one of them.
    fn owners(&self, before: &Stored, touched: &Touched) -> Result<(), String> {
        let owner = |stored: &Stored, cidr: &String| -> Option<String> { stored.blocks.get(cidr)?.affinity.clone() };
        let mut pairs = touched.affinities.clone();
        for cidr in &touched.blocks {
            let both = [before, &self.now].into_iter().filter_map(|stored| owner(stored, cidr));
            pairs.extend(both.map(|host| (host, cidr.clone())));
        }
        for (host, cidr) in pairs {
            let agree = |stored: &Stored| stored.owns(&host, &cidr) == stored.has_confirmed(&host, &cidr);
            let changed = before.owns(&host, &cidr) != self.now.owns(&host, &cidr)
                || touched.affinities.contains(&(host.clone(), cidr.clone()));
            if (agree(before) || changed) && !agree(&self.now) {
                return Err(format!(
                    "{host} owns {cidr}: {}, confirmed: {}",
                    self.now.owns(&host, &cidr),
                    self.now.has_confirmed(&host, &cidr)
                ));
            }
        }
        Ok(())
    }
}

/// Checks that no address moves from one holder to another within one revision.
fn not_moved(before: &Stored, now: &Stored) -> Result<(), String> {
    let held = before.holders();
    for (ip, holder) in now.holders() {
        if let Some(other) = held.get(&ip).filter(|other| **other != holder) {
            return Err(format!("{ip} went from {other} to {holder}"));
        }
    }
    Ok(())
}
