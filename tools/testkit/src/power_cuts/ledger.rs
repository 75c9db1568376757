//! Records the addresses that ADDs have returned to callers, and the calls that were not answered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::random::Random;

type Addresses = BTreeSet<IpAddr>;

/// Maximum number of containers that have addresses at the same time.
const MOST_HELD: usize = 60;
/// Number of addresses of each container: one IPv4 and one IPv6 address.
const EACH: usize = 2;

/// The results of all answered calls, and the calls that were not answered.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    held: BTreeMap<String, Addresses>,
    /// The containers whose last call was not answered. For a DEL: the addresses that the container had before; for an
    /// ADD: `None`.
    pending: BTreeMap<String, Option<Addresses>>,
    next: u64,
    acknowledged: u64,
}

impl Ledger {
    /// Begins a call: an ADD of a new container or a DEL of an existing one.
    pub fn begin(&mut self, random: &mut Random) -> (&'static str, String) {
        let names: Vec<_> = self.held.keys().cloned().collect();
        if names.is_empty() || (names.len() < MOST_HELD && random.once_in(2)) {
            return ("ADD", self.begin_add());
        }
        let container = random.pick(&names).clone();
        // After its DEL has begun, a container may lose its addresses at any time.
        let before = self.held.remove(&container);
        self.pending.insert(container.clone(), before);
        ("DEL", container)
    }

    /// Begins an ADD of a container with a new id.
    pub fn begin_add(&mut self) -> String {
        self.next += 1;
        let container = format!("c{}", self.next);
        self.pending.insert(container.clone(), None);
        container
    }

    /// Records the result of a call, and returns the number of answered calls in this round. For a DEL, the set of
    /// addresses `reported` is empty.
    pub fn end(&mut self, container: &str, reported: Addresses) -> Result<u64, String> {
        let before = self.pending.remove(container).ok_or_else(|| format!("{container} has not called"))?;
        if before.is_none() {
            if reported.len() != EACH {
                return Err(format!("{container} was told {reported:?}"));
            }
            if let Some((other, _)) = self.held.iter().find(|(_, theirs)| !theirs.is_disjoint(&reported)) {
                return Err(format!("{container} was told {reported:?}, and {other} has them"));
            }
            self.held.insert(container.to_owned(), reported);
        }
        self.acknowledged += 1;
        Ok(self.acknowledged)
    }

    /// Returns the number of calls that were answered in this round.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// True if a container in the ledger has one of the given addresses.
    pub fn has_any(&self, addresses: &[IpAddr]) -> bool {
        self.held.values().any(|held| addresses.iter().any(|ip| held.contains(ip)))
    }

    /// Compares the ledger with the store after a power cut, and ends the round. An unanswered call counts as having
    /// happened if the store shows its effect. Returns how many unanswered calls took effect and how many did not.
    pub fn settle(&mut self, mut recorded: BTreeMap<String, Addresses>) -> Result<(u64, u64), String> {
        let (mut happened, mut nothing) = (0, 0);
        for (container, before) in std::mem::take(&mut self.pending) {
            let has = recorded.remove(&container).unwrap_or_default();
            let is_whole = before.as_ref().map_or(has.len() == EACH, |before| has == *before);
            if !has.is_empty() && !is_whole {
                return Err(format!(
                    "the call of {container} has no answer, and a part of it is there: {has:?} of {before:?}"
                ));
            }
            *if has.is_empty() == before.is_some() { &mut happened } else { &mut nothing } += 1;
            if !has.is_empty() {
                self.held.insert(container.clone(), has.clone());
                recorded.insert(container, has);
            }
        }
        self.acknowledged = 0;
        if recorded == self.held {
            return Ok((happened, nothing));
        }
        let missing: Vec<_> = self.held.iter().filter(|(name, has)| recorded.get(*name) != Some(has)).collect();
        let back: Vec<_> = recorded.iter().filter(|(name, has)| self.held.get(*name) != Some(has)).collect();
        Err(format!("acknowledged and not recorded: {missing:?}\nrecorded and not acknowledged: {back:?}"))
    }
}
