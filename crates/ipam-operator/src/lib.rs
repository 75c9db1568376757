#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! [`Operator`] is the allocator with the verbs of a person: each is one or more transactions on the allocator's store.
//! [`inspect`] compares all documents of a store and mends what is wrong; [`documents`] shows and writes documents in
//! the form of Calico's API; [`moving`] copies what a store holds to another one; [`events`] and [`history`] tell what
//! has happened to addresses, and [`forecast`] when a pool will be full.

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

/// The verbs that only a person uses on the store of an allocator.
#[derive(Clone, Debug)]
pub struct Operator(Ipam);

impl Operator {
    /// On this store, by the system's clock.
    pub fn new(store: Arc<dyn Store>, nodes: Nodes) -> Self {
        Self(Ipam::new(store, nodes))
    }

    /// The allocator.
    pub fn ipam(&self) -> &Ipam {
        &self.0
    }
}

impl From<Ipam> for Operator {
    fn from(ipam: Ipam) -> Self {
        Self(ipam)
    }
}
