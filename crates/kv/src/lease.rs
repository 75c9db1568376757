//! Leases, as etcd has them: times to live that keys are attached to.
//!
//! A put attaches its key to a lease, or to none. When the lease ends, its keys are deleted. Leases are granted and revoked
//! beside a [`Store`](crate::Store), by the program that keeps their time.

use std::fmt;
use std::num::NonZeroI64;
use std::time::Duration;

/// The number of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LeaseId(NonZeroI64);

impl LeaseId {
    /// The lease with this number; `None` for 0, which means none.
    pub const fn new(number: i64) -> Option<Self> {
        match NonZeroI64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> i64 {
        self.0.get()
    }

    /// The number of a lease, or 0 for none.
    pub fn number(lease: Option<Self>) -> i64 {
        lease.map_or(0, Self::get)
    }
}

impl fmt::Display for LeaseId {
    /// As etcd's tools write it: hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A lease that is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// The time to live that was granted, in whole seconds.
    pub ttl: Duration,
}

impl Lease {
    /// The longest time to live, as with etcd.
    pub const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);
}

/// The answer to a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// The lease is there now.
    New,
    /// There was a lease of this number already; nothing has changed.
    Taken,
}
