//! Units: what an ordinal of a block stands for, a single address or a prefix.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::Key;

use super::{Block, MAX_BLOCK_ADDRESSES};
use crate::model::codec::Malformed;
use crate::model::prefixes::{is_of_prefixes, length_in_block};
use crate::net::{Count, nth, number};
use crate::reservations::Reservations;

/// How many networks of this length a block has, where a block can have so many: addresses or prefixes.
pub(super) fn capacity_of(cidr: IpNet, length: u8) -> Option<usize> {
    let count = 1_usize.checked_shl(u32::from(length.checked_sub(cidr.prefix_len())?))?;
    (count <= MAX_BLOCK_ADDRESSES).then_some(count)
}

impl Block {
    /// How many addresses it has, or prefixes.
    pub fn capacity(&self) -> usize {
        self.allocations.len()
    }

    /// The length of what an ordinal stands for: that of a single address, or of a prefix.
    pub fn length(&self) -> u8 {
        self.family().bits() - self.host_bits()
    }

    /// The prefix of the block that has an address, or the address itself.
    pub fn unit_of(&self, ip: IpAddr) -> IpNet {
        let unit = self.cidr().contains(&ip).then(|| self.family().network(ip, self.length()));
        unit.flatten().unwrap_or_else(|| ip.into())
    }

    /// The address that stands for an address in this block: of a prefix the first one.
    pub fn first_of(&self, ip: IpAddr) -> IpAddr {
        self.unit_of(ip).network()
    }

    /// True if the address is reserved, or some of its prefix is.
    pub fn is_reserved(&self, ip: IpAddr, reservations: &Reservations) -> bool {
        match self.host_bits() {
            0 => reservations.contains(ip),
            _ => reservations.touches(self.unit_of(ip)),
        }
    }

    /// The ordinal of an address; `None` if it is not of this block.
    pub fn ordinal(&self, ip: IpAddr) -> Option<usize> {
        if !self.cidr().contains(&ip) {
            return None;
        }
        let distance = number(ip).checked_sub(number(self.cidr().network()))?;
        usize::try_from(distance.checked_shr(self.host_bits().into())?).ok()
    }

    /// The address of an ordinal; `None` if it lies outside.
    pub fn address(&self, ordinal: usize) -> Option<IpAddr> {
        nth(self.cidr(), (ordinal as u128).checked_shl(self.host_bits().into())?)
    }

    /// How many bits of an address its ordinal does not tell: none, or what a prefix leaves free.
    pub(super) fn host_bits(&self) -> u8 {
        let bits = self.family().bits() - self.cidr().prefix_len();
        bits.saturating_sub(self.allocations.len().checked_ilog2().and_then(|of| u8::try_from(of).ok()).unwrap_or(0))
    }

    /// Checks that there are as many allocations as addresses, or as prefixes of some length.
    pub(super) fn check_size(&self, key: &Key) -> Result<(), Malformed> {
        let (found, cidr) = (self.allocations.len(), self.cidr());
        if found <= MAX_BLOCK_ADDRESSES && length_in_block(cidr, found).is_some() {
            return Ok(());
        }
        if is_of_prefixes(cidr) {
            return Err(Malformed::new(key, format_args!("block {cidr} cannot have {found} prefixes")));
        }
        Err(Malformed::new(key, format_args!("{found} allocations for {} addresses", Count::of_net(cidr))))
    }
}
