//! Decides which of a node's allocations are unused, by evidence of the machine or by container runtimes' lists.
//! Deciding about allocations needs no I/O.

use std::collections::{BTreeMap, BTreeSet};

use time::{Duration, OffsetDateTime};

use super::{Allocation, Evidence, Holdings};
use crate::model::handle_id;

/// Minimum age of an allocation that is freed because a runtime's list does not contain it. An allocation that was made
/// after the runtime's list may be in use although it is not in the list.
pub const MIN_STALE_AGE: Duration = Duration::seconds(60);

/// A node's allocations, grouped by whether they are in use. Each judged allocation is in exactly one field of
/// `JudgedAllocations`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JudgedAllocations {
    /// Allocations of an earlier boot of this machine whose address is on no interface, and which are therefore
    /// certainly unused.
    pub earlier: Vec<Allocation>,
    /// Allocations of this boot or of an unknown boot whose network namespace is gone and whose address is on no
    /// interface. Callers free an allocation in `gone` only if a second scan has the same result.
    pub gone: Vec<Allocation>,
    /// Allocations whose address is on no interface, but whose network namespace may still exist. An address on no
    /// interface may still be in use: virtual machines, for example, use addresses without an interface of the host.
    pub idle: Vec<Allocation>,
    /// Allocations in use: the network namespace exists, an interface has the address, or another address of the
    /// attachment is in use.
    pub live: Vec<Allocation>,
    /// Allocations that were made outside of the container in which the scan ran.
    pub outside: Vec<Allocation>,
    /// Allocations that may belong to another machine with the same node name.
    pub elsewhere: Vec<Allocation>,
}

/// Judges each attachment as a whole: if one address of an attachment is in use, none of its addresses counts as
/// unused.
///
/// The argument `began` is the boot time of this machine, or `None` if no other machine uses the store. If `began` is
/// given, an allocation from another boot counts as another machine's, unless its recorded time of assignment is before
/// `began`.
pub fn judge(holdings: &Holdings, evidence: &Evidence, began: Option<OffsetDateTime>) -> JudgedAllocations {
    let mut attachments: BTreeMap<(&str, &str), Vec<&Allocation>> = BTreeMap::new();
    for allocation in &holdings.allocations {
        attachments.entry(allocation.attachment()).or_default().push(allocation);
    }
    let mut judged = JudgedAllocations::default();
    for allocations in attachments.into_values() {
        let list = match verdict(&allocations, evidence, began) {
            Verdict::Live => &mut judged.live,
            Verdict::Outside => &mut judged.outside,
            Verdict::Elsewhere => &mut judged.elsewhere,
            Verdict::Earlier => &mut judged.earlier,
            Verdict::Gone => &mut judged.gone,
            Verdict::Idle => &mut judged.idle,
        };
        list.extend(allocations.into_iter().cloned());
    }
    judged
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Live,
    Outside,
    Elsewhere,
    Earlier,
    Gone,
    Idle,
}

/// Judges all allocations of one attachment. If any allocation of the attachment was renewed in this boot, the whole
/// attachment counts as assigned in this boot.
pub(super) fn verdict(allocations: &[&Allocation], evidence: &Evidence, began: Option<OffsetDateTime>) -> Verdict {
    let is_earlier = |one: &Allocation| one.boot.as_ref().is_some_and(|boot| *boot != evidence.boot);
    let is_before = |one: &Allocation| began.is_none_or(|began| one.assigned_at().is_some_and(|at| at < began));
    let is_of_this_boot = |one: &Allocation| one.boot.as_ref() == Some(&evidence.boot);
    // The recorded name of a network namespace is meaningless after a reboot.
    let presence = |one: &Allocation| if is_earlier(one) { Presence::Unknown } else { evidence.presence(one) };
    let is_live = |one: &Allocation| evidence.is_on_an_interface(one.unit) || presence(one) == Presence::There;
    let any = |is_so: &dyn Fn(&Allocation) -> bool| allocations.iter().any(|one| is_so(one));
    let all = |is_so: &dyn Fn(&Allocation) -> bool| allocations.iter().all(|one| is_so(one));
    if any(&is_live) {
        Verdict::Live
    } else if any(&|one| evidence.is_outside(one)) {
        Verdict::Outside
    } else if !all(&|one| is_of_this_boot(one) || is_before(one)) {
        Verdict::Elsewhere
    } else if all(&is_earlier) {
        Verdict::Earlier
    } else if all(&|one| is_earlier(one) || presence(one) == Presence::Gone) {
        Verdict::Gone
    } else {
        Verdict::Idle
    }
}

/// Whether the network namespace of an allocation still exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    There,
    Gone,
    /// The allocation's network namespace is not recorded, or the scan cannot tell whether it exists.
    Unknown,
}

impl Evidence {
    fn presence(&self, one: &Allocation) -> Presence {
        let Some((name, container)) = one.netns.as_deref().and_then(parse_netns) else { return Presence::Unknown };
        match &self.namespaces {
            None => Presence::Unknown,
            Some(there) if there.contains(name) => Presence::There,
            // A scan can tell that a network namespace is gone only if it sees all processes of the recorded process id
            // namespace.
            Some(_) if self.within.is_none() || self.within.as_deref() == container => Presence::Gone,
            Some(_) => Presence::Unknown,
        }
    }

    /// True if the scan ran in a container, but the allocation was made outside of containers, according to its
    /// attributes. A scan in a container does not see network namespaces outside of the container. Even the boot id
    /// that the scan sees may not be the machine's, because some containers have a separate boot id.
    fn is_outside(&self, one: &Allocation) -> bool {
        let container = one.netns.as_deref().and_then(parse_netns).and_then(|(_, container)| container);
        self.within.is_some() && container.is_none()
    }
}

/// Splits the value of the attribute [`NETNS`](crate::attachment::NETNS) into the name of the network namespace and the
/// process id namespace that may follow after a slash. Returns `None` if the attribute's value is not `DEVICE:INODE` or
/// `DEVICE:INODE/INODE`.
fn parse_netns(recorded: &str) -> Option<(&str, Option<&str>)> {
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    let (name, container) = match recorded.split_once('/') {
        Some((name, container)) => (name, Some(container)),
        None => (recorded, None),
    };
    let is_name = name.split_once(':').is_some_and(|(device, inode)| is_number(device) && is_number(inode));
    (is_name && container.is_none_or(is_number)).then_some((name, container))
}

/// The result of comparing a network's allocations with a container runtime's list of attachments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaleAllocations {
    /// The allocations that are not in the runtime's list and are old enough to be freed.
    pub gone: Vec<Allocation>,
    /// The number of allocations that are in the runtime's list.
    pub valid: usize,
    /// The number of allocations that are not in the runtime's list and are younger than [`MIN_STALE_AGE`].
    pub young: usize,
    /// The number of allocations that are not in the runtime's list and whose timestamp is missing, unreadable or in
    /// the future.
    pub undated: usize,
}

/// Compares a node's holdings in a network with a runtime's list of container ids and interfaces.
pub fn find_stale(
    holdings: &Holdings,
    network: &str,
    valid: &BTreeSet<(String, String)>,
    now: OffsetDateTime,
) -> StaleAllocations {
    let valid: BTreeSet<(String, &str)> =
        valid.iter().map(|(container, interface)| (handle_id(network, container), interface.as_str())).collect();
    let mut stale = StaleAllocations::default();
    for allocation in holdings.allocations.iter().filter(|one| one.network == network) {
        if valid.contains(&(allocation.handle.clone(), allocation.interface.as_str())) {
            stale.valid += 1;
            continue;
        }
        match allocation.assigned_at().map(|at| now - at) {
            Some(age) if age >= MIN_STALE_AGE => stale.gone.push(allocation.clone()),
            Some(age) if !age.is_negative() => stale.young += 1,
            _ => stale.undated += 1,
        }
    }
    stale
}

/// Minimum number of characters of a shortened container id. Container runtimes print container ids shortened to 12
/// characters.
const MIN_ID_CHARS: usize = 12;

/// An entry of a container runtime's list of attachments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedAttachment {
    /// The container's id, or at least its first 12 characters.
    pub container: String,
    /// The interface's name, or `None` for all interfaces of the container.
    pub interface: Option<String>,
    /// The name of the attachment's network, or `None` for all networks.
    pub network: Option<String>,
}

/// A container runtime's list of the attachments in use.
#[derive(Clone, Debug)]
pub struct RuntimeList {
    /// The only network that the list covers, or `None` for all networks.
    network: Option<String>,
    /// The time at which the runtime's list was made.
    made: OffsetDateTime,
    entries: BTreeMap<String, Vec<ListedAttachment>>,
}

impl RuntimeList {
    /// Creates a [`RuntimeList`] from the attachments that a runtime listed at the given time.
    pub fn new(made: OffsetDateTime, listed: impl IntoIterator<Item = ListedAttachment>) -> Self {
        let mut entries: BTreeMap<String, Vec<ListedAttachment>> = BTreeMap::new();
        for one in listed {
            entries.entry(one.container.clone()).or_default().push(one);
        }
        Self { network: None, made, entries }
    }

    /// Restricts the runtime's list to the given network. A runtime list that covers only one network gives no evidence
    /// about allocations of other networks.
    #[must_use]
    pub fn only_for(mut self, network: impl Into<String>) -> Self {
        self.network = Some(network.into());
        self
    }

    /// True if the runtime's list has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn speaks_of(&self, one: &Allocation) -> bool {
        self.network.as_ref().is_none_or(|network| *network == one.network)
    }

    /// True if the runtime's list contains the attachment to which an allocation belongs.
    fn has(&self, one: &Allocation) -> bool {
        let ids =
            (MIN_ID_CHARS.min(one.container.len())..=one.container.len()).filter_map(|end| one.container.get(..end));
        let is_it = |listed: &ListedAttachment| {
            listed.interface.as_ref().is_none_or(|name| *name == one.interface)
                && listed.network.as_ref().is_none_or(|name| *name == one.network)
        };
        ids.filter_map(|id| self.entries.get(id)).flatten().any(is_it)
    }
}

/// The result of comparing allocations with the lists of several container runtimes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnlistedAllocations {
    /// The allocations that are in no runtime's list and are old enough to be freed.
    pub gone: Vec<Allocation>,
    /// The number of allocations that are in at least one runtime's list.
    pub listed: usize,
    /// The number of allocations that are in no runtime's list and are too young to be freed. An allocation is too
    /// young if it was not yet [`MIN_STALE_AGE`] old when the oldest of the runtimes' lists was made.
    pub young: usize,
    /// The number of allocations that are in no runtime's list and whose timestamp is missing or unreadable.
    pub undated: usize,
    /// The number of allocations in networks that no runtime's list covers.
    pub unspoken: usize,
}

/// Compares allocations with the lists of container runtimes. An allocation counts as in use if the list of any
/// container runtime contains its attachment.
pub fn find_unlisted(allocations: impl IntoIterator<Item = Allocation>, lists: &[RuntimeList]) -> UnlistedAllocations {
    let mut found = UnlistedAllocations::default();
    for one in allocations {
        let made = lists.iter().filter(|list| list.speaks_of(&one)).map(|list| list.made).min();
        let Some(made) = made else {
            found.unspoken += 1;
            continue;
        };
        if lists.iter().any(|list| list.has(&one)) {
            found.listed += 1;
            continue;
        }
        match one.assigned_at() {
            Some(at) if made - at >= MIN_STALE_AGE => found.gone.push(one),
            Some(_) => found.young += 1,
            None => found.undated += 1,
        }
    }
    found
}
