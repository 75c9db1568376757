//! Decodes IPAM documents as Calico's client does. When Calico's client writes a document back, fields that the client
//! does not know are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// Why an operation of Calico's client failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The key to create already exists, or the key to write has changed since the client read it.
    Conflict,
    Missing,
    Claimed,
    NotEmpty,
    /// No address of the pool is free.
    Full,
    Store(String),
}

pub(crate) const BLOCKS: &str = "/calico/ipam/v2/assignment/";
pub(crate) const HANDLES: &str = "/calico/ipam/v2/handle/";
pub(crate) const HOSTS: &str = "/calico/ipam/v2/host/";
pub(crate) const VIRTUALS: &str = "/calico/ipam/v2/virtual/";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Block {
    pub(crate) cidr: String,
    pub(crate) affinity: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) affinity_claim_time: Option<String>,
    pub(crate) allocations: Vec<Option<usize>>,
    pub(crate) unallocated: Vec<usize>,
    pub(crate) attributes: Option<Vec<Attribute>>,
    #[serde(default, rename = "sequenceNumber")]
    pub(crate) sequence_number: u64,
    #[serde(default, rename = "sequenceNumberForAllocation")]
    pub(crate) sequence_numbers: Option<BTreeMap<String, u64>>,
    #[serde(default)]
    pub(crate) deleted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attribute {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handle_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) secondary: Option<BTreeMap<String, String>>,
    #[serde(default, rename = "releasedAt", skip_serializing_if = "Option::is_none")]
    pub(crate) released_at: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Handle {
    pub(crate) block: BTreeMap<String, i64>,
    #[serde(default)]
    pub(crate) deleted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Affinity {
    #[serde(default)]
    pub(crate) state: String,
    #[serde(default)]
    pub(crate) deleted: bool,
}

impl Affinity {
    pub(crate) fn is_confirmed(&self) -> bool {
        self.state == "confirmed" || self.state.is_empty()
    }
}

pub(crate) fn affinity_of(value: &[u8]) -> Affinity {
    serde_json::from_slice(if value.is_empty() { b"{}" } else { value }).unwrap()
}

fn family(cidr: &str) -> &'static str {
    if cidr.contains(':') { "ipv6" } else { "ipv4" }
}

pub(crate) fn block_key(cidr: &str) -> String {
    format!("{BLOCKS}{}/block/{}", family(cidr), cidr.replace('/', "-"))
}

pub(crate) fn affinity_key(host: &str, cidr: &str) -> String {
    format!("{HOSTS}{host}/{}/block/{}", family(cidr), cidr.replace('/', "-"))
}

pub(crate) fn handle_key(handle: &str) -> String {
    format!("{HANDLES}{handle}")
}

/// Decodes the CIDR of a block from the last part of the block's key.
pub(crate) fn cidr_of(key: &str) -> String {
    key.rsplit('/').next().unwrap().replace('-', "/")
}

impl Block {
    /// Creates the document of a new block that the host `host` owns.
    pub(crate) fn new(cidr: &str, host: &str, size: usize, claimed: &str, sequence_number: u64) -> Self {
        Self {
            cidr: cidr.to_owned(),
            affinity: Some(format!("host:{host}")),
            affinity_claim_time: Some(claimed.to_owned()),
            allocations: vec![None; size],
            unallocated: (0..size).collect(),
            attributes: None,
            sequence_number,
            sequence_numbers: Some(BTreeMap::new()),
            deleted: false,
        }
    }

    pub(crate) fn is_of(&self, host: &str) -> bool {
        self.affinity.as_deref() == Some(&format!("host:{host}"))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.allocations.iter().all(Option::is_none)
    }

    fn entries(&self) -> &[Attribute] {
        self.attributes.as_deref().unwrap_or_default()
    }

    pub(crate) fn address(&self, ordinal: usize) -> IpAddr {
        match self.cidr.split_once('/').unwrap().0.parse().unwrap() {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + u32::try_from(ordinal).unwrap()).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + ordinal as u128).into(),
        }
    }

    /// Returns each assigned address of the block with the handle that holds it. Old versions of Calico wrote a
    /// carriage return and more text after the handle's id, both of which are ignored.
    pub(crate) fn holders(&self) -> BTreeMap<IpAddr, String> {
        let held = self.allocations.iter().enumerate().filter_map(|(ordinal, slot)| {
            let handle = self.entries()[(*slot)?].handle_id.as_ref()?;
            Some((self.address(ordinal), handle.split('\r').next().unwrap().to_owned()))
        });
        held.collect()
    }

    /// Returns the sequence number that the block had when it assigned an address.
    pub(crate) fn sequence_number_of(&self, ip: IpAddr) -> Option<u64> {
        let ordinal = (0..self.allocations.len()).find(|ordinal| self.address(*ordinal) == ip)?;
        self.sequence_numbers.as_ref()?.get(&ordinal.to_string()).copied()
    }

    /// Returns the assigned addresses of the block, each with its handle and attributes.
    pub(crate) fn held(&self) -> impl Iterator<Item = (IpAddr, &str, &BTreeMap<String, String>)> {
        self.allocations.iter().enumerate().filter_map(|(ordinal, slot)| {
            let entry = self.entries().get((*slot)?)?;
            Some((self.address(ordinal), entry.handle_id.as_deref()?, entry.secondary.as_ref()?))
        })
    }

    /// Assigns addresses from the start of the block's list of free addresses.
    pub(crate) fn assign(&mut self, count: usize, holder: &Attribute) -> Vec<IpAddr> {
        let taken: Vec<usize> = self.unallocated.drain(..count.min(self.unallocated.len())).collect();
        if taken.is_empty() {
            return Vec::new();
        }
        let sequence_number = self.sequence_number;
        let entries = self.attributes.get_or_insert_default();
        let index = entries.iter().position(|entry| entry == holder).unwrap_or_else(|| {
            entries.push(holder.clone());
            entries.len() - 1
        });
        for ordinal in &taken {
            self.allocations[*ordinal] = Some(index);
            self.sequence_numbers.get_or_insert_default().insert(ordinal.to_string(), sequence_number);
        }
        taken.into_iter().map(|ordinal| self.address(ordinal)).collect()
    }

    /// Releases the block's addresses for which `test` returns true. Returns the released addresses, each with the
    /// handle that held it.
    pub(crate) fn release(&mut self, test: impl Fn(IpAddr, &str) -> bool) -> Vec<(IpAddr, String)> {
        let gone: Vec<_> = self.holders().into_iter().filter(|(ip, handle)| test(*ip, handle)).collect();
        for (ip, _) in &gone {
            let ordinal = (0..self.allocations.len()).find(|ordinal| self.address(*ordinal) == *ip).unwrap();
            self.allocations[ordinal] = None;
            self.unallocated.push(ordinal);
            self.sequence_numbers.get_or_insert_default().remove(&ordinal.to_string());
        }
        let used: BTreeSet<usize> = self.allocations.iter().flatten().copied().collect();
        let place: BTreeMap<usize, usize> = used.iter().enumerate().map(|(place, index)| (*index, place)).collect();
        let kept = self.entries().iter().enumerate().filter(|(index, _)| used.contains(index));
        self.attributes = self.attributes.as_ref().map(|_| kept.map(|(_, entry)| entry.clone()).collect());
        for slot in self.allocations.iter_mut().flatten() {
            *slot = place[slot];
        }
        gone
    }

    /// Returns the first inconsistency between the lists in the block's document, as `calicoctl ipam check` would
    /// report it.
    pub(crate) fn flaw(&self, cidr: &str) -> Option<&'static str> {
        let allocated: BTreeSet<usize> =
            (0..self.allocations.len()).filter(|i| self.allocations[*i].is_some()).collect();
        let free: BTreeSet<usize> = self.unallocated.iter().copied().collect();
        let used: BTreeSet<usize> = self.allocations.iter().flatten().copied().collect();
        let bits: u32 = cidr.split_once('/')?.1.parse().ok()?;
        let size = 1_usize << (if cidr.contains(':') { 128 } else { 32 } - bits);
        let numbered = self.sequence_numbers.iter().flatten().all(|(ordinal, number)| {
            ordinal.parse().is_ok_and(|ordinal: usize| allocated.contains(&ordinal)) && *number < self.sequence_number
        });
        let holds = [
            (self.cidr == cidr, "it says that it is another block"),
            (!self.deleted, "it says that it is deleted"),
            (self.allocations.len() == size, "it has not as many addresses as its network"),
            (used == (0..self.entries().len()).collect(), "attributes and allocations do not match"),
            (free.len() == self.unallocated.len(), "an ordinal is free twice"),
            (free.is_disjoint(&allocated), "an ordinal is free and allocated"),
            (free.len() + allocated.len() == size, "an ordinal is neither free nor allocated"),
            (numbered, "an ordinal has a sequence number that cannot be"),
        ];
        holds.into_iter().find(|(holds, _)| !holds).map(|(_, what)| what)
    }
}
