//! Derives events from two versions of a block or affinity, for example that an address was assigned or released, or
//! that a block changed owners.
//!
//! A store keeps versions of blocks, but not the operations that created these versions. An event is a difference
//! between two successive versions of a block. This module compares block versions without any I/O, both for past
//! changes ([`crate::history`]) and for live watches. An [`EventRow`] is serialized to JSON for `margay watch`, for
//! `margay ipam history` and for the daemon's page.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam_core::attachment::{BOOT, INTERFACE, NETWORK, TIMESTAMP, common_name};
use ipam_core::model::{AddressState, Affinity, AffinityState, Attribute, Block, Document, Owner, keys};
use ipam_core::sticky::{STICKY, STICKY_FOR, waits_until};
use ipam_core::timestamps::{parse_go_string, rfc3339};
use ipnet::IpNet;
use kv::{Batch, Event, EventKind, Key, Kv, Revision};
use serde::Serialize;
use time::OffsetDateTime;

/// An event of a block or of one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockEvent {
    /// The block that the event concerns.
    pub block: IpNet,
    /// Length of the assigned prefix, in a block of prefixes. The prefix length is `None` for a block of single
    /// addresses, and for an event without an address.
    pub prefix_length: Option<u8>,
    /// The kind of event, with its details.
    pub what: BlockEventKind,
}

impl BlockEvent {
    /// Creates an event of a block, or of a single address in the block.
    pub(crate) fn of(block: IpNet, what: BlockEventKind) -> Self {
        Self { block, prefix_length: None, what }
    }

    /// The address or prefix that the event concerns; `None` if the event concerns the block.
    pub fn unit(&self) -> Option<IpNet> {
        let address = self.what.address()?;
        self.prefix_length.map_or_else(|| Some(address.into()), |length| IpNet::new(address, length).ok())
    }
}

/// The kind of an event, with its details.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockEventKind {
    /// The address was assigned.
    Assigned {
        /// The address that the event concerns.
        address: IpAddr,
        /// The address's holder after the event.
        holder: Attribute,
    },
    /// The address's holder requested the address again.
    Renewed {
        /// The address that the event concerns.
        address: IpAddr,
        /// The address's holder after the event.
        holder: Attribute,
    },
    /// The address changed holders within one attachment, for example when a virtual machine migrates.
    Moved {
        /// The address that the event concerns.
        address: IpAddr,
        /// The address's holder before the event.
        from: Attribute,
        /// The address's holder after the event.
        to: Attribute,
    },
    /// The holder of the address released it, and the address can be assigned again.
    Released {
        /// The address that the event concerns.
        address: IpAddr,
        /// The address's holder before the event.
        holder: Attribute,
    },
    /// The holder of the address released it, and the address is in cooldown.
    InCooldown {
        /// The address that the event concerns.
        address: IpAddr,
        /// The former holder of the address, if known.
        holder: Option<Attribute>,
        /// When the holder released the address.
        since: OffsetDateTime,
    },
    /// The cooldown of the address has ended, and the address can be assigned again.
    CooldownOver {
        /// The address that the event concerns.
        address: IpAddr,
    },
    /// The block got an owner.
    Claimed {
        /// The block's owner after the event.
        owner: Owner,
        /// The block's owner before the event.
        former: Option<Owner>,
        /// When the owner claimed the block, if the block records this time.
        at: Option<OffsetDateTime>,
    },
    /// The block lost its owner.
    GivenUp {
        /// The block's owner before the event.
        owner: Owner,
    },
    /// An owner's affinity to the block changed while the block itself did not, for example when Calico claims a block
    /// in steps.
    Affinity {
        /// The owner whose affinity changed.
        owner: Owner,
        /// The affinity's new state; `None` if the affinity was deleted.
        state: Option<AffinityState>,
    },
    /// The stored block cannot be decoded, so the state of its addresses is unknown.
    Damaged,
}

impl BlockEventKind {
    /// The name of this kind of event in JSON, in tables and in lines of text.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Assigned { .. } => "assigned",
            Self::Renewed { .. } => "renewed",
            Self::Moved { .. } => "moved",
            Self::Released { .. } => "released",
            Self::InCooldown { .. } => "resting",
            Self::CooldownOver { .. } => "rested",
            Self::Claimed { .. } => "claimed",
            Self::GivenUp { .. } => "given_up",
            Self::Affinity { .. } => "affinity",
            Self::Damaged => "damaged",
        }
    }

    /// The name of this kind of event for an event that describes the initial state of a history or watch.
    pub fn standing_word(&self) -> &'static str {
        match self {
            Self::Assigned { .. } => "held",
            Self::Claimed { .. } => "owned",
            other => other.word(),
        }
    }

    /// The name of the affinity's new state, `gone` for a deleted affinity; `None` for an event that is not about an
    /// affinity.
    pub fn state_word(&self) -> Option<&'static str> {
        let Self::Affinity { state, .. } = self else { return None };
        Some(match state {
            Some(AffinityState::Confirmed) => "confirmed",
            Some(AffinityState::Pending) => "pending",
            Some(AffinityState::PendingDeletion) => "pending_deletion",
            Some(AffinityState::Unknown) => "unknown",
            None => "gone",
        })
    }

    /// The address that the event concerns; `None` if the event concerns the block.
    pub fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Assigned { address, .. }
            | Self::Renewed { address, .. }
            | Self::Moved { address, .. }
            | Self::Released { address, .. }
            | Self::InCooldown { address, .. }
            | Self::CooldownOver { address } => Some(*address),
            Self::Claimed { .. } | Self::GivenUp { .. } | Self::Affinity { .. } | Self::Damaged => None,
        }
    }

    /// The current holder of the address; the former holder if the address has no current holder.
    pub fn holder(&self) -> Option<&Attribute> {
        match self {
            Self::Assigned { holder, .. } | Self::Renewed { holder, .. } | Self::Released { holder, .. } => {
                Some(holder)
            }
            Self::Moved { to, .. } => Some(to),
            Self::InCooldown { holder, .. } => holder.as_ref(),
            _ => None,
        }
    }

    /// The current or former owner of the block or affinity; `None` for an event that concerns an address.
    pub fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Claimed { owner, .. } | Self::GivenUp { owner } | Self::Affinity { owner, .. } => Some(owner),
            _ => None,
        }
    }

    /// The time of the event by the node's clock, if the block records the time. On a store without commit times, the
    /// recorded time is the only known time of the event.
    pub fn recorded_at(&self) -> Option<OffsetDateTime> {
        match self {
            Self::Assigned { holder, .. } | Self::Renewed { holder, .. } => parse_go_string(holder.get(TIMESTAMP)?),
            Self::InCooldown { since, .. } => Some(*since),
            Self::Claimed { at, .. } => *at,
            _ => None,
        }
    }
}

/// The events of one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchEvents {
    /// The events of this revision. Within one block, releases are listed before assignments.
    pub block_events: Vec<BlockEvent>,
    /// Changed blocks whose events cannot be derived, because the previous version of the block is unknown.
    pub unreported: Vec<IpNet>,
}

/// Derives the events of a revision. The `batch` must come from a watch that returns previous versions. Keys other than
/// blocks and affinities are ignored.
pub fn of_batch(batch: &Batch) -> BatchEvents {
    let mut reported = BatchEvents::default();
    for event in &batch.events {
        let Some(cidr) = keys::parse_block(&event.kv.key) else { continue };
        if is_before_unknown(event) {
            reported.unreported.push(cidr);
            continue;
        }
        let before = event.prev.as_ref().map(decode::<Block>);
        let after = (event.kind == EventKind::Put).then(|| decode::<Block>(&event.kv));
        if after == Some(None) {
            reported.block_events.push(BlockEvent::of(cidr, BlockEventKind::Damaged));
        } else {
            reported.block_events.extend(of_block(cidr, before.flatten().as_ref(), after.flatten().as_ref()));
        }
    }
    let affinities: Vec<BlockEvent> = batch.events.iter().filter_map(affinity_alone(&reported)).collect();
    reported.block_events.extend(affinities);
    reported
}

/// True if the changed key had a previous version, but the store no longer has that version.
pub fn is_before_unknown(event: &Event) -> bool {
    event.prev.is_none() && (event.kind == EventKind::Delete || event.kv.version > 1)
}

fn decode<D: Document>(kv: &Kv) -> Option<D> {
    D::decode(&kv.key, kv.value.as_bytes())
        .inspect_err(|error| {
            tracing::warn!(
                %error,
                "cannot decode the block or affinity in a change event; reporting only the changed key"
            );
        })
        .ok()
}

/// Derives the event of a changed affinity. Skips the affinity's change if `reported` already has an event of the block
/// that implies this change.
fn affinity_alone(reported: &BatchEvents) -> impl Fn(&Event) -> Option<BlockEvent> + '_ {
    |event| {
        let (owner, block) = keys::parse_affinity(&event.kv.key)?;
        let state = |kv: &Kv| decode::<Affinity>(kv).map_or(AffinityState::Unknown, |one| one.state());
        let before = event.prev.as_ref().map(state);
        let after = (event.kind == EventKind::Put).then(|| state(&event.kv));
        let goes_with = |one: &BlockEvent| {
            one.block == block
                && match &one.what {
                    BlockEventKind::Claimed { owner: claimer, .. } if *claimer == owner => {
                        after == Some(AffinityState::Confirmed)
                    }
                    BlockEventKind::Claimed { former, .. } => former.as_ref() == Some(&owner) && after.is_none(),
                    BlockEventKind::GivenUp { owner: former } => *former == owner && after.is_none(),
                    _ => false,
                }
        };
        let is_alone = before != after && !reported.block_events.iter().any(goes_with);
        is_alone.then(|| BlockEvent::of(block, BlockEventKind::Affinity { owner, state: after }))
    }
}

/// Derives the events between two versions of a block; a version is `None` if the block does not exist.
pub fn of_block(cidr: IpNet, before: Option<&Block>, after: Option<&Block>) -> Vec<BlockEvent> {
    let (mut gone, mut come) = (Vec::new(), Vec::new());
    let larger = before.into_iter().chain(after).max_by_key(|block| block.capacity());
    for address in larger.iter().flat_map(|block| block.addresses()) {
        let state =
            |block: Option<&'_ Block>| block.map_or(AddressVersion::Free, |block| AddressVersion::of(block, address));
        of_address(address, state(before), state(after), &mut gone, &mut come);
    }
    let block_events = gone.into_iter().chain(of_owner(before, after)).chain(come);
    let length = larger.map(Block::length).filter(|length| *length < cidr.max_prefix_len());
    block_events
        .map(|what| BlockEvent {
            prefix_length: length.filter(|_| what.address().is_some()),
            ..BlockEvent::of(cidr, what)
        })
        .collect()
}

/// The state of an address in one version of its block. A sticky address that waits for its workload counts as free.
enum AddressVersion {
    Free,
    InCooldown(OffsetDateTime),
    Held(Attribute),
}

impl AddressVersion {
    fn of(block: &Block, address: IpAddr) -> Self {
        match block.lookup(address) {
            AddressState::Assigned(entry) if waits_until(entry).is_some() => Self::Free,
            AddressState::Assigned(holder) => Self::Held(holder.clone()),
            AddressState::CoolingDown(since) => Self::InCooldown(since),
            AddressState::Free | AddressState::Outside => Self::Free,
        }
    }
}

/// Derives the events of an address. Adds an event to `gone` if the address lost its holder, and to `come` if the
/// address got a holder.
fn of_address(
    address: IpAddr,
    before: AddressVersion,
    after: AddressVersion,
    gone: &mut Vec<BlockEventKind>,
    come: &mut Vec<BlockEventKind>,
) {
    match (before, after) {
        (AddressVersion::Held(from), AddressVersion::Held(to)) if from == to => {}
        (AddressVersion::Held(from), AddressVersion::Held(to)) if is_same_attachment(&from, &to) => {
            let what = match is_same(&from, &to) {
                true => BlockEventKind::Renewed { address, holder: to },
                false => BlockEventKind::Moved { address, from, to },
            };
            come.push(what);
        }
        (AddressVersion::Held(holder), AddressVersion::InCooldown(since)) => {
            gone.push(BlockEventKind::InCooldown { address, holder: Some(holder), since });
        }
        (AddressVersion::Free, AddressVersion::InCooldown(since)) => {
            gone.push(BlockEventKind::InCooldown { address, holder: None, since });
        }
        (AddressVersion::InCooldown(_), AddressVersion::Free) => gone.push(BlockEventKind::CooldownOver { address }),
        (before, after) => {
            if let AddressVersion::Held(holder) = before {
                gone.push(BlockEventKind::Released { address, holder });
            }
            if let AddressVersion::Held(holder) = after {
                come.push(BlockEventKind::Assigned { address, holder });
            }
        }
    }
}

/// True if the two given block entries record the same attachment. Entries without Margay's attributes are compared by
/// handle alone.
fn is_same_attachment(one: &Attribute, other: &Attribute) -> bool {
    let same = |one: Option<&str>, other| one.zip(other).is_none_or(|(one, other)| one == other);
    one.handle() == other.handle()
        && same(one.network(), other.network())
        && same(one.get(INTERFACE), other.get(INTERFACE))
}

/// True if two block entries have equal attributes, apart from those that every request renews. The comparison of two
/// entries ignores the time and boot id of the request, the workload that keeps the address, and whether the attribute
/// names are Calico's or Margay's.
fn is_same(one: &Attribute, other: &Attribute) -> bool {
    fn lasting(entry: &Attribute) -> BTreeMap<&str, &str> {
        let network = entry.network().map(|network| (NETWORK, network));
        let named = entry.attributes().iter().map(|(name, value)| (common_name(name), value.as_str())).chain(network);
        named.filter(|(name, _)| ![TIMESTAMP, BOOT, STICKY, STICKY_FOR].contains(name)).collect()
    }
    lasting(one) == lasting(other) && one.alternate_attributes() == other.alternate_attributes()
}

/// Derives the event of a block that got or lost its owner.
fn of_owner(before: Option<&Block>, after: Option<&Block>) -> Option<BlockEventKind> {
    let (former, owner) = (before.and_then(Block::owner), after.and_then(Block::owner));
    match (former, owner) {
        (former, owner) if former == owner => None,
        (former, Some(owner)) => Some(BlockEventKind::Claimed { owner, former, at: after.and_then(Block::claimed_at) }),
        (Some(owner), None) => Some(BlockEventKind::GivenUp { owner }),
        (None, None) => None,
    }
}

/// Describes a stored block by events for its owner, its held addresses, and its addresses in cooldown. Returns `None`
/// if the key is not a block's key.
pub fn of_listed(key: &Key, value: &[u8]) -> Option<Vec<BlockEvent>> {
    let cidr = keys::parse_block(key)?;
    match Block::decode(key, value) {
        Ok(block) => Some(of_block(cidr, None, Some(&block))),
        Err(error) => {
            tracing::warn!(%error, "cannot decode a stored block; reporting the block as damaged");
            Some(vec![BlockEvent::of(cidr, BlockEventKind::Damaged)])
        }
    }
}

/// The holder of an address, whose strings are borrowed from the address's entry in the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The holder's handle.
    pub handle: Option<&'a str>,
    /// The holder's node.
    pub node: Option<&'a str>,
    /// The name of the holder's network.
    pub network: Option<&'a str>,
    /// The container id, parsed from the handle; `None` if the block's entry does not record the container's network.
    pub container: Option<&'a str>,
    /// The name of the interface in the holder's container.
    pub interface: Option<&'a str>,
    /// The name of the holder's pod.
    pub pod: Option<&'a str>,
    /// The namespace of the holder's pod.
    pub namespace: Option<&'a str>,
}

impl<'a> Holder<'a> {
    /// Reads the holder from an entry of a block.
    pub fn of(entry: &'a Attribute) -> Self {
        let (handle, network) = (entry.handle(), entry.network());
        let container = handle.zip(network).and_then(|(id, network)| id.strip_prefix(network)?.strip_prefix('.'));
        Self {
            handle,
            network,
            container,
            node: entry.node(),
            interface: entry.get(INTERFACE),
            pod: entry.pod(),
            namespace: entry.namespace(),
        }
    }
}

/// A row of a history or watch: an event, or a part of the initial state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventRow {
    /// The revision of the event, or of the initial state of the history or watch.
    pub revision: i64,
    /// The time of the event; `null` in JSON if unknown.
    #[serde(serialize_with = "utc")]
    pub time: Option<OffsetDateTime>,
    /// The name of the event's kind, for example `assigned`.
    pub event: &'static str,
    /// The address that the event concerns; absent if the event concerns the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Length of the assigned prefix; absent for a block of single addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// The block that the event concerns.
    pub block: IpNet,
    /// The current or former holder of the address.
    #[serde(flatten)]
    pub holder: Option<AddressHolder>,
    /// The former holder of the address, if the address moved from one holder to another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<AddressHolder>,
    /// The current or former owner of the block or the affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The former owner of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub former_owner: Option<String>,
    /// The new state of the affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
}

/// The holder of an address in an [`EventRow`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AddressHolder {
    /// The holder's handle; `null` in JSON if the address has no handle. In JSON, only events with a holder have the
    /// field `handle`; the daemon's web page uses the field to recognize such events.
    pub handle: Option<String>,
    /// The holder's node; `null` in JSON if unknown.
    pub node: Option<String>,
    /// The name of the holder's network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The id of the holder's container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The name of the interface in the holder's container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The namespace of the holder's pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name of the holder's pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl AddressHolder {
    /// Reads the holder from an entry of a block.
    pub fn of(entry: &Attribute) -> Self {
        let Holder { handle, node, network, container, interface, pod, namespace } = Holder::of(entry);
        let [handle, node, network, container, interface, pod, namespace] =
            [handle, node, network, container, interface, pod, namespace].map(|text| text.map(str::to_owned));
        Self { handle, node, network, container, interface, namespace, pod }
    }
}

impl EventRow {
    /// Creates the row of an event.
    pub fn happened(revision: Revision, time: Option<OffsetDateTime>, block_event: &BlockEvent) -> Self {
        Self::new(revision, time, block_event.what.word(), block_event)
    }

    /// Creates the row for a block or an assigned address that already exists at `revision`, before the watch reports
    /// changes.
    pub fn listed(revision: Revision, block_event: &BlockEvent) -> Self {
        Self::new(revision, block_event.what.recorded_at(), block_event.what.standing_word(), block_event)
    }

    fn new(revision: Revision, time: Option<OffsetDateTime>, event: &'static str, block_event: &BlockEvent) -> Self {
        let BlockEvent { block, what, .. } = block_event;
        let text = |owner: &Owner| owner.to_string();
        let (from, former_owner) = match what {
            BlockEventKind::Moved { from, .. } => (Some(AddressHolder::of(from)), None),
            BlockEventKind::Claimed { former, .. } => (None, former.as_ref().map(text)),
            _ => (None, None),
        };
        Self {
            revision: revision.get(),
            time,
            event,
            address: what.address(),
            prefix_length: block_event.prefix_length,
            block: *block,
            holder: what.holder().map(AddressHolder::of),
            from,
            owner: what.owner().map(text),
            former_owner,
            state: what.state_word(),
        }
    }
}

fn utc<S: serde::Serializer>(time: &Option<OffsetDateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(rfc3339).serialize(serializer)
}

#[cfg(test)]
mod tests;
