//! Which allocations nobody uses any more. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use time::{Duration, OffsetDateTime};

use super::{Allocation, Evidence, Holdings};
use crate::model::handle_id;

/// What is younger than this is never freed because a runtime's list does not have it: the list may be older.
pub const YOUNG: Duration = Duration::seconds(60);

/// What the evidence says of what a node holds. Every allocation is in exactly one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Given in an earlier boot of this machine, and no interface holds it. Nobody can be using it.
    pub earlier: Vec<Allocation>,
    /// Given in this boot, or nobody knows in which, and no interface holds it. It may be about to be used.
    pub idle: Vec<Allocation>,
    /// An interface holds it, or another address of the same attachment.
    pub live: Vec<Allocation>,
    /// It may be another machine's under the same name.
    pub elsewhere: Vec<Allocation>,
}

/// Judges attachments as wholes: while an interface holds one address of an attachment, all of them stay.
///
/// `began` is when this boot began, where other machines use the store too. There an allocation with another boot that
/// was given since then, or nobody knows when, counts as another machine's.
pub fn judge(holdings: &Holdings, evidence: &Evidence, began: Option<OffsetDateTime>) -> Judged {
    let mut attachments: BTreeMap<(&str, &str), Vec<&Allocation>> = BTreeMap::new();
    for allocation in &holdings.allocations {
        attachments.entry(allocation.attachment()).or_default().push(allocation);
    }
    let mut judged = Judged::default();
    for allocations in attachments.into_values() {
        let list = match verdict(&allocations, evidence, began) {
            Verdict::Live => &mut judged.live,
            Verdict::Elsewhere => &mut judged.elsewhere,
            Verdict::Earlier => &mut judged.earlier,
            Verdict::Idle => &mut judged.idle,
        };
        list.extend(allocations.into_iter().cloned());
    }
    judged
}

/// What the evidence says of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Live,
    Elsewhere,
    Earlier,
    Idle,
}

/// Judges all that one attachment has. An attachment of which a part was renewed in this boot is of this boot.
pub(super) fn verdict(allocations: &[&Allocation], evidence: &Evidence, began: Option<OffsetDateTime>) -> Verdict {
    let is_earlier = |one: &&Allocation| one.boot.as_ref().is_some_and(|boot| *boot != evidence.boot);
    let is_before = |one: &Allocation| began.is_none_or(|began| one.assigned_at().is_some_and(|at| at < began));
    let is_of_this_boot = |one: &&Allocation| one.boot.as_ref() == Some(&evidence.boot);
    if allocations.iter().any(|one| evidence.live.contains(&one.address)) {
        Verdict::Live
    } else if !allocations.iter().all(|one| is_of_this_boot(one) || is_before(one)) {
        Verdict::Elsewhere
    } else if allocations.iter().all(is_earlier) {
        Verdict::Earlier
    } else {
        Verdict::Idle
    }
}

/// What a runtime's list of what there is says of a network's allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stale {
    /// Not in the list, and old enough.
    pub gone: Vec<Allocation>,
    /// How many are in the list.
    pub valid: usize,
    /// How many are not in the list and younger than [`YOUNG`].
    pub young: usize,
    /// How many are not in the list and of no age: the time is missing, cannot be read, or lies ahead.
    pub undated: usize,
}

/// Compares what a node holds in a network with a runtime's list of container ids and interfaces.
pub fn stale(holdings: &Holdings, network: &str, valid: &BTreeSet<(String, String)>, now: OffsetDateTime) -> Stale {
    let valid: BTreeSet<(String, &str)> =
        valid.iter().map(|(container, interface)| (handle_id(network, container), interface.as_str())).collect();
    let mut stale = Stale::default();
    for allocation in holdings.allocations.iter().filter(|one| one.network == network) {
        if valid.contains(&(allocation.handle.clone(), allocation.interface.as_str())) {
            stale.valid += 1;
            continue;
        }
        match allocation.assigned_at().map(|at| now - at) {
            Some(age) if age >= YOUNG => stale.gone.push(allocation.clone()),
            Some(age) if !age.is_negative() => stale.young += 1,
            _ => stale.undated += 1,
        }
    }
    stale
}
