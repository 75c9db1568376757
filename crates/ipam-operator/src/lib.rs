#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! [`Operator`] wraps the allocator and adds the operations that operators of a cluster run by hand. Each operation of
//! [`Operator`] is one or more transactions on the allocator's store. The module [`inspect`] compares all documents of
//! a store and repairs damage. The module [`cluster`] sets up a cluster without Calico. The module [`documents`] shows and writes documents in the form of Calico's API. The
//! module [`moving`] compares two stores for a migration from one to the other. The modules [`events`] and [`history`]
//! report past changes of addresses. The module [`forecast`] estimates when a pool will be full.

pub mod cluster;
pub mod compaction;
pub mod documents;
pub mod events;
pub mod forecast;
pub mod history;
pub mod inspect;
pub mod moving;
mod node_prefix;
mod pools;
mod quotas;
mod sticky;

use std::sync::Arc;

use ipam_core::{Ipam, Nodes};
use kv::Store;

pub use node_prefix::NodePrefix;
pub use pools::{InUse, PoolChoice, SplitResult};
pub use quotas::QuotaRow;
pub use sticky::KeptAddress;

/// An allocator with additional operations that operators of a cluster run by hand.
#[derive(Clone, Debug)]
pub struct Operator(Ipam);

impl Operator {
    /// Creates an [`Operator`] that works on a store and uses the system clock.
    pub fn new(store: Arc<dyn Store>, nodes: Nodes) -> Self {
        Self(Ipam::new(store, nodes))
    }

    /// The allocator that this [`Operator`] wraps.
    pub fn ipam(&self) -> &Ipam {
        &self.0
    }
}

impl From<Ipam> for Operator {
    fn from(ipam: Ipam) -> Self {
        Self(ipam)
    }
}
