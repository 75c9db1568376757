//! The verdict of a runtime's lists on a node's holdings. No I/O.

use std::collections::BTreeMap;

use time::OffsetDateTime;

use super::Allocation;
use super::decide::YOUNG;

/// The shortest beginning of a container's id that stands for it: what runtimes print where they shorten ids.
const SHORT_ID: usize = 12;

/// An attachment, as far as a list tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
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
    entries: BTreeMap<String, Vec<Listed>>,
}

impl RuntimeList {
    /// A list that was made then.
    pub fn new(made: OffsetDateTime, listed: impl IntoIterator<Item = Listed>) -> Self {
        let mut entries: BTreeMap<String, Vec<Listed>> = BTreeMap::new();
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
        let ids = (SHORT_ID.min(one.container.len())..=one.container.len()).filter_map(|end| one.container.get(..end));
        let is_it = |listed: &Listed| {
            listed.interface.as_ref().is_none_or(|name| *name == one.interface)
                && listed.network.as_ref().is_none_or(|name| *name == one.network)
        };
        ids.filter_map(|id| self.entries.get(id)).flatten().any(is_it)
    }
}

/// The verdict of lists on allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unlisted {
    /// In none of them, and old enough.
    pub gone: Vec<Allocation>,
    /// How many are in a list.
    pub listed: usize,
    /// How many are in none, and were given after a list was made or less than [`YOUNG`] before.
    pub young: usize,
    /// How many are in none and of no age: the time is missing, or cannot be read.
    pub undated: usize,
    /// How many are in a network of which no list speaks.
    pub unspoken: usize,
}

/// Compares allocations with lists. All lists together say what there is.
pub fn unlisted(allocations: impl IntoIterator<Item = Allocation>, lists: &[RuntimeList]) -> Unlisted {
    let mut found = Unlisted::default();
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
            Some(at) if made - at >= YOUNG => found.gone.push(one),
            Some(_) => found.young += 1,
            None => found.undated += 1,
        }
    }
    found
}
