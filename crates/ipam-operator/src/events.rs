//! The changes between two versions of a document: addresses assigned and released, and blocks that changed owners.
//!
//! A store remembers versions of blocks, not what was done. A change follows from two versions that are next to each
//! other. They are compared here, without any I/O: for the past ([`crate::history`]) as for what happens. A row is the JSON of
//! `margay watch`, of `margay ipam history` and of the daemon's page.

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

/// Something that happened to a block or to one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockEvent {
    /// The block.
    pub block: IpNet,
    /// In a block of prefixes their length: an address stands for its prefix. `None` in a block of addresses, and where
    /// there is no address.
    pub prefix_length: Option<u8>,
    /// The happening.
    pub what: BlockEventKind,
}

impl BlockEvent {
    /// Something that happened to a block, or to a single address of it.
    pub(crate) fn of(block: IpNet, what: BlockEventKind) -> Self {
        Self { block, prefix_length: None, what }
    }

    /// The address that it is about, or the prefix.
    pub fn unit(&self) -> Option<IpNet> {
        let address = self.what.address()?;
        self.prefix_length.map_or_else(|| Some(address.into()), |length| IpNet::new(address, length).ok())
    }
}

/// The happening.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockEventKind {
    /// Somebody has the address from now on.
    Assigned {
        /// The address.
        address: IpAddr,
        /// The holder.
        holder: Attribute,
    },
    /// The holder of the address asked for it again.
    Renewed {
        /// The address.
        address: IpAddr,
        /// The holder.
        holder: Attribute,
    },
    /// The address went from one owner to another one under the same handle: a virtual machine that moved.
    Moved {
        /// The address.
        address: IpAddr,
        /// The former owner.
        from: Attribute,
        /// The owner.
        to: Attribute,
    },
    /// Nobody has the address any more, and anybody can get it.
    Released {
        /// The address.
        address: IpAddr,
        /// The former holder.
        holder: Attribute,
    },
    /// Nobody has the address any more, and nobody gets it for a while.
    InCooldown {
        /// The address.
        address: IpAddr,
        /// The former holder, where known.
        holder: Option<Attribute>,
        /// When it was released.
        since: OffsetDateTime,
    },
    /// The address has rested for long enough, and anybody can get it.
    CooldownOver {
        /// The address.
        address: IpAddr,
    },
    /// The block became an owner's.
    Claimed {
        /// The owner.
        owner: Owner,
        /// The former owner.
        former: Option<Owner>,
        /// When, as the block records it.
        at: Option<OffsetDateTime>,
    },
    /// The block is nobody's any more.
    GivenUp {
        /// The former owner.
        owner: Owner,
    },
    /// An owner's affinity to the block changed alone, as when Calico claims a block in steps.
    Affinity {
        /// The owner of the affinity.
        owner: Owner,
        /// Its state now; `None` if it is gone.
        state: Option<AffinityState>,
    },
    /// The value in the block's place cannot be read: nothing is known of its addresses.
    Damaged,
}

impl BlockEventKind {
    /// The word for it in JSON, in tables and in lines.
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

    /// The word for it where it is a part of the state at the beginning.
    pub fn standing_word(&self) -> &'static str {
        match self {
            Self::Assigned { .. } => "held",
            Self::Claimed { .. } => "owned",
            other => other.word(),
        }
    }

    /// The word for the state of an affinity that it is about; `gone` for one that was deleted.
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

    /// The address that it is about; `None` if it is about the block.
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

    /// The holder of the address now or, if there is none, the former holder.
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

    /// The owner of the block that it is about.
    pub fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Claimed { owner, .. } | Self::GivenUp { owner } | Self::Affinity { owner, .. } => Some(owner),
            _ => None,
        }
    }

    /// When it happened by the clock of the node, where the document itself says so: on stores that remember no times.
    pub fn recorded_at(&self) -> Option<OffsetDateTime> {
        match self {
            Self::Assigned { holder, .. } | Self::Renewed { holder, .. } => parse_go_string(holder.get(TIMESTAMP)?),
            Self::InCooldown { since, .. } => Some(*since),
            Self::Claimed { at, .. } => *at,
            _ => None,
        }
    }
}

/// The happenings of a revision, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchEvents {
    /// The happenings, releases before assignments.
    pub happenings: Vec<BlockEvent>,
    /// Blocks of which the version before is not known, so that nobody can tell what happened to them.
    pub unreported: Vec<IpNet>,
}

/// The happenings of a revision. `batch` must come from a watch that brings along what was there before; keys that are
/// neither of blocks nor of affinities are passed over.
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
            reported.happenings.push(BlockEvent::of(cidr, BlockEventKind::Damaged));
        } else {
            reported.happenings.extend(of_block(cidr, before.flatten().as_ref(), after.flatten().as_ref()));
        }
    }
    let affinities: Vec<BlockEvent> = batch.events.iter().filter_map(affinity_alone(&reported)).collect();
    reported.happenings.extend(affinities);
    reported
}

/// True if there was a version before, and the store does not have it any more.
pub fn is_before_unknown(event: &Event) -> bool {
    event.prev.is_none() && (event.kind == EventKind::Delete || event.kv.version > 1)
}

fn decode<D: Document>(kv: &Kv) -> Option<D> {
    D::decode(&kv.key, kv.value.as_bytes()).inspect_err(|error| tracing::warn!(%error, "cannot read a damaged document")).ok()
}

/// The happenings of an affinity beyond those of its block.
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
        let is_alone = before != after && !reported.happenings.iter().any(goes_with);
        is_alone.then(|| BlockEvent::of(block, BlockEventKind::Affinity { owner, state: after }))
    }
}

/// The happenings of a block between two versions; `None` where there is no block.
pub fn of_block(cidr: IpNet, before: Option<&Block>, after: Option<&Block>) -> Vec<BlockEvent> {
    let (mut gone, mut come) = (Vec::new(), Vec::new());
    let larger = before.into_iter().chain(after).max_by_key(|block| block.capacity());
    for address in larger.iter().flat_map(|block| block.addresses()) {
        let state =
            |block: Option<&'_ Block>| block.map_or(AddressVersion::Free, |block| AddressVersion::of(block, address));
        of_address(address, state(before), state(after), &mut gone, &mut come);
    }
    let happenings = gone.into_iter().chain(of_owner(before, after)).chain(come);
    let length = larger.map(Block::length).filter(|length| *length < cidr.max_prefix_len());
    happenings
        .map(|what| BlockEvent {
            prefix_length: length.filter(|_| what.address().is_some()),
            ..BlockEvent::of(cidr, what)
        })
        .collect()
}

/// The state of an address. One that waits for its workload belongs to nobody.
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

/// The happenings of an address: the holder that it lost, and the one that it got.
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

/// True if both are the same attachment's; an entry without marks of ours counts by its handle alone.
fn is_same_attachment(one: &Attribute, other: &Attribute) -> bool {
    let same = |name| one.get(name).zip(other.get(name)).is_none_or(|(one, other)| one == other);
    one.handle() == other.handle() && same(NETWORK) && same(INTERFACE)
}

/// True if two entries differ at most in when and in which boot the address was asked for, in whose names they use, and in the
/// workload that keeps the address.
fn is_same(one: &Attribute, other: &Attribute) -> bool {
    fn lasting(entry: &Attribute) -> BTreeMap<&str, &str> {
        let named = entry.attributes().iter().map(|(name, value)| (common_name(name), value.as_str()));
        named.filter(|(name, _)| ![TIMESTAMP, BOOT, STICKY, STICKY_FOR].contains(name)).collect()
    }
    lasting(one) == lasting(other) && one.alternate_attributes() == other.alternate_attributes()
}

/// The happenings of a block's ownership.
fn of_owner(before: Option<&Block>, after: Option<&Block>) -> Option<BlockEventKind> {
    let (former, owner) = (before.and_then(Block::owner), after.and_then(Block::owner));
    match (former, owner) {
        (former, owner) if former == owner => None,
        (former, Some(owner)) => Some(BlockEventKind::Claimed { owner, former, at: after.and_then(Block::claimed_at) }),
        (Some(owner), None) => Some(BlockEventKind::GivenUp { owner }),
        (None, None) => None,
    }
}

/// The addresses of a stored block as happenings: those that are held and those in cooldown. `None` for what is no
/// block.
pub fn of_listed(key: &Key, value: &[u8]) -> Option<Vec<BlockEvent>> {
    let cidr = keys::parse_block(key)?;
    match Block::decode(key, value) {
        Ok(block) => Some(of_block(cidr, None, Some(&block))),
        Err(error) => {
            tracing::warn!(%error, "cannot read a damaged document");
            Some(vec![BlockEvent::of(cidr, BlockEventKind::Damaged)])
        }
    }
}

/// The holder that an entry names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The handle.
    pub handle: Option<&'a str>,
    /// The node.
    pub node: Option<&'a str>,
    /// The network.
    pub network: Option<&'a str>,
    /// The container's id: what the handle has behind the network, where that is recorded.
    pub container: Option<&'a str>,
    /// The interface in the container.
    pub interface: Option<&'a str>,
    /// The pod.
    pub pod: Option<&'a str>,
    /// Its namespace.
    pub namespace: Option<&'a str>,
}

impl<'a> Holder<'a> {
    /// The contents of an entry.
    pub fn of(entry: &'a Attribute) -> Self {
        let (handle, network) = (entry.handle(), entry.get(NETWORK));
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

/// An event, or a fact of the state at which the report begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventRow {
    /// The revision of the event or of the state.
    pub revision: i64,
    /// The time; null if it is unknown.
    #[serde(serialize_with = "utc")]
    pub time: Option<OffsetDateTime>,
    /// The kind of event.
    pub event: &'static str,
    /// The address; absent if the event is about the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The length of the prefix that the address stands for; absent if it is an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// The block.
    pub block: IpNet,
    /// The holder of the address, or the former one.
    #[serde(flatten)]
    pub holder: Option<AddressHolder>,
    /// The former holder of an address that moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<AddressHolder>,
    /// The owner of the block or the affinity, or the former one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The former owner of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub former_owner: Option<String>,
    /// The state of the affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
}

/// The holder of an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AddressHolder {
    /// The handle; null if there is none. An event has this member if and only if it has a holder: the page asks for it.
    pub handle: Option<String>,
    /// The node; null if it is unknown.
    pub node: Option<String>,
    /// The network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The container's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The interface in the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The pod's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl AddressHolder {
    /// The holder that an entry of a block records.
    pub fn of(entry: &Attribute) -> Self {
        let Holder { handle, node, network, container, interface, pod, namespace } = Holder::of(entry);
        let [handle, node, network, container, interface, pod, namespace] =
            [handle, node, network, container, interface, pod, namespace].map(|text| text.map(str::to_owned));
        Self { handle, node, network, container, interface, namespace, pod }
    }
}

impl EventRow {
    /// The row of an event.
    pub fn happened(revision: Revision, time: Option<OffsetDateTime>, happening: &BlockEvent) -> Self {
        Self::new(revision, time, happening.what.word(), happening)
    }

    /// The row of a fact of the state at a revision.
    pub fn listed(revision: Revision, happening: &BlockEvent) -> Self {
        Self::new(revision, happening.what.recorded_at(), happening.what.standing_word(), happening)
    }

    fn new(revision: Revision, time: Option<OffsetDateTime>, event: &'static str, happening: &BlockEvent) -> Self {
        let BlockEvent { block, what, .. } = happening;
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
            prefix_length: happening.prefix_length,
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
