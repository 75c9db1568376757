//! The addresses that callers were answered with, and the calls that have no answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::random::Random;

/// The addresses of one container.
type Addresses = BTreeSet<IpAddr>;

/// How many containers there are at the most.
const MOST_HELD: usize = 60;
/// Each container has an address of each family.
const EACH: usize = 2;

/// Acknowledged calls, and calls on their way.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    held: BTreeMap<String, Addresses>,
    /// The containers of calls without an answer, and what each had before: `None` for an ADD.
    pending: BTreeMap<String, Option<Addresses>>,
    next: u64,
    acknowledged: u64,
}

impl Ledger {
    /// Begins a call: an ADD for a new container, or the DEL of one.
    pub fn begin(&mut self, random: &mut Random) -> (&'static str, String) {
        let names: Vec<_> = self.held.keys().cloned().collect();
        if names.is_empty() || (names.len() < MOST_HELD && random.once_in(2)) {
            return ("ADD", self.begin_add());
        }
        let container = random.pick(&names).clone();
        // From the moment its DEL begins, a container may lose its addresses.
        let before = self.held.remove(&container);
        self.pending.insert(container.clone(), before);
        ("DEL", container)
    }

    /// Begins an ADD for a new container.
    pub fn begin_add(&mut self) -> String {
        self.next += 1;
        let container = format!("c{}", self.next);
        self.pending.insert(container.clone(), None);
        container
    }

    /// Records an answer, and returns how many there were in this round. `reported` is empty for a DEL.
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

    /// How many calls were acknowledged in this round.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// True if one of these addresses was acknowledged and not released.
    pub fn has_any(&self, addresses: &[IpAddr]) -> bool {
        self.held.values().any(|held| addresses.iter().any(|ip| held.contains(ip)))
    }

    /// Compares with what is recorded after the cut, and ends the round: a call without an answer has happened or not,
    /// as it is recorded. Returns how many of them have happened, and how many have not.
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
