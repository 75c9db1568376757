//! Which allocations nobody uses any more: the verdict of the machine's evidence and of a runtime's lists on a node's holdings.
//! No I/O.

use std::collections::{BTreeMap, BTreeSet};

use time::{Duration, OffsetDateTime};

use super::{Allocation, Evidence, Holdings};
use crate::model::handle_id;

/// An allocation younger than this is never freed because a runtime's list does not have it: the list may be older.
pub const MIN_STALE_AGE: Duration = Duration::seconds(60);

/// The verdict of the evidence on a node's holdings. Every allocation is in exactly one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JudgedAllocations {
    /// Given in an earlier boot of this machine, and no interface holds it. Nobody can be using it.
    pub earlier: Vec<Allocation>,
    /// Given in this boot, or nobody knows in which; its network namespace is gone, and no interface holds it. At a second
    /// look nobody can be using it.
    pub gone: Vec<Allocation>,
    /// The same, but nobody knows whether its network namespace is gone. It may be in use without an interface.
    pub idle: Vec<Allocation>,
    /// Its network namespace is there, or an interface holds it, or so it is with another address of the same attachment.
    pub live: Vec<Allocation>,
    /// The search was made in a container, and the address was assigned outside of that.
    pub outside: Vec<Allocation>,
    /// It may be another machine's under the same name.
    pub elsewhere: Vec<Allocation>,
}

/// Judges attachments as wholes: while one address of an attachment is in use, all of them stay.
///
/// `boot_time` is when this boot began, where other machines use the store too. There an allocation with another boot that
/// was given since then, or nobody knows when, counts as another machine's.
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

/// The verdict of the evidence on an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Live,
    Outside,
    Elsewhere,
    Earlier,
    Gone,
    Idle,
}

/// Judges all that one attachment has. An attachment of which a part was renewed in this boot is of this boot.
pub(super) fn verdict(allocations: &[&Allocation], evidence: &Evidence, began: Option<OffsetDateTime>) -> Verdict {
    let is_earlier = |one: &Allocation| one.boot.as_ref().is_some_and(|boot| *boot != evidence.boot);
    let is_before = |one: &Allocation| began.is_none_or(|began| one.assigned_at().is_some_and(|at| at < began));
    let is_of_this_boot = |one: &Allocation| one.boot.as_ref() == Some(&evidence.boot);
    // The name of a namespace means nothing in another boot.
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

/// Whether the network namespace of an allocation is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    There,
    Gone,
    /// It is not recorded, or the look cannot tell.
    Unknown,
}

impl Evidence {
    fn presence(&self, one: &Allocation) -> Presence {
        let Some((name, container)) = one.netns.as_deref().and_then(parse_netns) else { return Presence::Unknown };
        match &self.namespaces {
            None => Presence::Unknown,
            Some(there) if there.contains(name) => Presence::There,
            // Only who sees all processes that were in there can tell.
            Some(_) if self.within.is_none() || self.within.as_deref() == container => Presence::Gone,
            Some(_) => Presence::Unknown,
        }
    }

    /// True if the look was made in a container, and the allocation was not given in one, as far as is recorded.
    /// Nothing of it can be seen from there, and even the boot may have another id: some containers have one of their
    /// own.
    fn is_outside(&self, one: &Allocation) -> bool {
        let container = one.netns.as_deref().and_then(parse_netns).and_then(|(_, container)| container);
        self.within.is_some() && container.is_none()
    }
}

/// The name of a namespace, and the process id namespace that follows a slash, if one does; `None` for what is no name.
fn parse_netns(recorded: &str) -> Option<(&str, Option<&str>)> {
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    let (name, container) = match recorded.split_once('/') {
        Some((name, container)) => (name, Some(container)),
        None => (recorded, None),
    };
    let is_name = name.split_once(':').is_some_and(|(device, inode)| is_number(device) && is_number(inode));
    (is_name && container.is_none_or(is_number)).then_some((name, container))
}

/// The verdict of a runtime's list on a network's allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaleAllocations {
    /// Not in the list, and old enough.
    pub gone: Vec<Allocation>,
    /// How many are in the list.
    pub valid: usize,
    /// How many are not in the list and younger than [`MIN_STALE_AGE`].
    pub young: usize,
    /// How many are not in the list and of no age: the time is missing, cannot be read, or lies ahead.
    pub undated: usize,
}

/// Compares what a node holds in a network with a runtime's list of container ids and interfaces.
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

/// The shortest beginning of a container's id that stands for it: what runtimes print where they shorten ids.
const MIN_ID_CHARS: usize = 12;

/// An attachment, as far as a list tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedAttachment {
    /// The container's id, or its first 12 characters or more.
    pub container: String,
    /// The interface; all of them if none is named.
    pub interface: Option<String>,
    /// The network; all of them if none is named.
    pub network: Option<String>,
}

/// A runtime's list of what there is.
#[derive(Clone, Debug)]
pub struct RuntimeList {
    /// The only network that it speaks of; all of them if none is named.
    network: Option<String>,
    /// When it was made.
    made: OffsetDateTime,
    entries: BTreeMap<String, Vec<ListedAttachment>>,
}

impl RuntimeList {
    /// A list that was made then.
    pub fn new(made: OffsetDateTime, listed: impl IntoIterator<Item = ListedAttachment>) -> Self {
        let mut entries: BTreeMap<String, Vec<ListedAttachment>> = BTreeMap::new();
        for one in listed {
            entries.entry(one.container.clone()).or_default().push(one);
        }
        Self { network: None, made, entries }
    }

    /// Only for this network: it says nothing of others.
    #[must_use]
    pub fn only_for(mut self, network: impl Into<String>) -> Self {
        self.network = Some(network.into());
        self
    }

    /// True if there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn speaks_of(&self, one: &Allocation) -> bool {
        self.network.as_ref().is_none_or(|network| *network == one.network)
    }

    /// True if it has the attachment of an allocation.
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

/// The verdict of lists on allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnlistedAllocations {
    /// In none of them, and old enough.
    pub gone: Vec<Allocation>,
    /// How many are in a list.
    pub listed: usize,
    /// How many are in none, and were given after a list was made or less than [`MIN_STALE_AGE`] before.
    pub young: usize,
    /// How many are in none and of no age: the time is missing, or cannot be read.
    pub undated: usize,
    /// How many are in a network of which no list speaks.
    pub unspoken: usize,
}

/// Compares allocations with lists. All lists together say what there is.
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
