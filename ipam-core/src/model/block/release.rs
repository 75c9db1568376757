//! Releases the addresses of a block, in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use time::OffsetDateTime;

use super::{AddressState, Attribute, Block};
use crate::model::handle::same_handle;
use crate::sticky;

/// A request to release an address, optionally only if it has a given handle or sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// The address to release.
    pub address: IpAddr,
    /// The handle that must hold the address, or `None` for any handle.
    pub handle: Option<String>,
    /// The sequence number that the address must have, or `None` for any number.
    pub sequence_number: Option<u64>,
}

impl ReleaseRequest {
    /// Creates a release request without conditions.
    pub fn new(address: IpAddr) -> Self {
        Self { address, handle: None, sequence_number: None }
    }

    /// Adds the condition that the given handle holds the address.
    #[must_use]
    pub fn with_handle(mut self, handle: impl Into<String>) -> Self {
        self.handle = Some(handle.into());
        self
    }

    /// Adds the condition that the address has the given sequence number.
    #[must_use]
    pub fn with_sequence_number(mut self, number: u64) -> Self {
        self.sequence_number = Some(number);
        self
    }
}

/// Which addresses a release has freed, and which had no holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReleaseResult {
    /// The addresses that had a holder and were released, in ascending order.
    pub released: Vec<IpAddr>,
    /// The addresses that had no holder, because they were free, in cooldown, or outside this block.
    pub unallocated: Vec<IpAddr>,
    /// The number of released addresses per handle, by which the caller must decrease the count in the handle's
    /// document.
    pub by_handle: BTreeMap<String, usize>,
}

impl ReleaseResult {
    /// True if the release has changed the block, so that it must be written.
    pub fn changed(&self) -> bool {
        !self.released.is_empty()
    }
}

/// The error for an address whose handle or sequence number differs from its release request. On a release conflict, no
/// address is released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("update conflict: {address}: {kind}")]
pub struct ReleaseConflict {
    address: IpAddr,
    kind: ReleaseConflictKind,
}

/// The condition of a release request that was not met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseConflictKind {
    /// The address was assigned or released again after the caller had read its sequence number.
    #[error("bad sequence number: requested {requested}, expected {stored}")]
    SequenceNumber {
        /// The sequence number in the release request.
        requested: u64,
        /// The sequence number that the block records for the address.
        stored: u64,
    },
    /// The address is held by a handle other than the one in the release request, or by no handle.
    #[error("bad handle: requested {requested}, expected {stored}")]
    Handle {
        /// The handle in the release request.
        requested: String,
        /// The handle that the block records for the address; empty if no handle holds the address.
        stored: String,
    },
}

impl ReleaseConflict {
    /// Returns the address that does not meet the conditions of its release request.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the condition of the release request that was not met.
    pub fn kind(&self) -> &ReleaseConflictKind {
        &self.kind
    }
}

impl Block {
    /// Releases the held addresses of the block for which the predicate is true. After the release, a sticky address
    /// waits for its workload; see [`crate::sticky`].
    ///
    /// Released addresses are in cooldown for `cooldown_seconds` from `now`, or are free immediately if
    /// `cooldown_seconds` is 0 or less. `release_where` also frees the addresses whose cooldown is over
    /// ([`Self::apply_cooldown`]).
    pub fn release_where(
        &mut self,
        now: OffsetDateTime,
        cooldown_seconds: i64,
        test: impl Fn(IpAddr, &Attribute) -> bool,
    ) -> ReleaseResult {
        let held = self.allocated().filter(|(_, entry)| entry.released_at().is_none());
        let addresses: Vec<IpAddr> = held.filter(|(ip, entry)| test(*ip, entry)).map(|(ip, _)| ip).collect();
        self.release_held(addresses, |_| true, now, cooldown_seconds)
    }

    /// Releases all addresses that a handle holds; see [`Self::release_where`].
    pub fn release_by_handle(&mut self, handle: &str, now: OffsetDateTime, cooldown_seconds: i64) -> ReleaseResult {
        self.release_where(now, cooldown_seconds, |_, entry| entry.has_handle(handle))
    }

    /// Releases either all requested addresses or none. An address in several release requests counts once, and must
    /// meet the conditions of all these requests. Addresses without a holder are returned in the result's field
    /// `unallocated`. If a release request names a handle, a sticky address waits for its workload, as in
    /// [`Self::release_where`]. If a release request names no handle, the workload of a sticky address loses the
    /// address.
    ///
    /// # Errors
    /// [`ReleaseConflict`] if the handle or the sequence number of a held address differs from the release request. If
    /// a release fails, the block is unchanged.
    pub fn release_addresses(
        &mut self,
        requests: &[ReleaseRequest],
        now: OffsetDateTime,
        cooldown_seconds: i64,
    ) -> Result<ReleaseResult, ReleaseConflict> {
        let (mut held, mut unallocated) = (BTreeSet::new(), BTreeSet::new());
        for request in requests {
            let address = request.address;
            match self.check_request(request)? {
                true => held.insert(self.first_of(address)),
                false => unallocated.insert(address),
            };
        }
        let of_holder = requests.iter().filter(|request| request.handle.is_some());
        let of_holder: BTreeSet<IpAddr> = of_holder.map(|request| self.first_of(request.address)).collect();
        let may_wait = |ip: &IpAddr| of_holder.contains(ip);
        let mut released = self.release_held(held.into_iter().collect(), may_wait, now, cooldown_seconds);
        released.unallocated = unallocated.into_iter().collect();
        Ok(released)
    }

    /// Checks a release request: returns true if the address is held, and false if the address has no holder.
    fn check_request(&self, request: &ReleaseRequest) -> Result<bool, ReleaseConflict> {
        let address = request.address;
        // As in Calico, the sequence number is checked first, so a request with an outdated number fails even if the
        // address is free.
        if let Some(requested) = request.sequence_number {
            let stored = self.sequence_number_of(address);
            if requested != stored {
                let kind = ReleaseConflictKind::SequenceNumber { requested, stored };
                return Err(ReleaseConflict { address, kind });
            }
        }
        let AddressState::Assigned(entry) = self.lookup(address) else { return Ok(false) };
        match &request.handle {
            Some(requested) if !same_handle(entry.handle_id().unwrap_or(""), requested) => {
                let stored = entry.handle().unwrap_or("").to_owned();
                let kind = ReleaseConflictKind::Handle { requested: requested.clone(), stored };
                Err(ReleaseConflict { address, kind })
            }
            _ => Ok(true),
        }
    }

    /// Marks the given held addresses as released at `now`, then applies the cooldown. After the release, a sticky
    /// address waits for its workload if `may_wait` accepts the address.
    fn release_held(
        &mut self,
        released: Vec<IpAddr>,
        may_wait: impl Fn(&IpAddr) -> bool,
        now: OffsetDateTime,
        cooldown_seconds: i64,
    ) -> ReleaseResult {
        if released.is_empty() {
            return ReleaseResult::default();
        }
        let waiting = |ip: &IpAddr| Some((*ip, sticky::waiting(self.attributes_of(*ip)?, now, cooldown_seconds)?));
        let kept: Vec<(IpAddr, Attribute)> = released.iter().filter(|ip| may_wait(ip)).filter_map(waiting).collect();
        let mut by_handle = BTreeMap::new();
        let ordinals: Vec<usize> = released.iter().filter_map(|ip| self.ordinal(*ip)).collect();
        for ip in &released {
            let handle = self.attributes_of(*ip).and_then(Attribute::handle);
            if let Some(handle) = handle.filter(|handle| !handle.is_empty()) {
                *by_handle.entry(handle.to_owned()).or_default() += 1;
            }
        }
        let marker = self.push_attribute(Attribute::released(now));
        for ordinal in ordinals {
            if let Some(slot) = self.allocations.get_mut(ordinal) {
                *slot = Some(marker);
            }
            // A release gives the address a new sequence number, so a caller that remembers the previous number cannot
            // release the address again during the cooldown.
            self.set_sequence(ordinal);
        }
        self.compact();
        // The result of `apply_cooldown` says whether the block must be written; it is ignored, because callers write
        // the block after a release anyway.
        let _freed = self.apply_cooldown(now, cooldown_seconds);
        for (ip, waiting) in kept {
            self.keep(ip, &waiting);
        }
        ReleaseResult { released, unallocated: Vec::new(), by_handle }
    }
}
