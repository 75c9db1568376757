//! The IPAM data model and the allocator; speaks kv and nothing else.
//!
//! [`model`] holds the documents exactly as Calico stores them. [`pools`], [`reservations`], [`selector`] and
//! [`utilization`] decide on those documents without any I/O: time, host names and random numbers come in as arguments,
//! so that every decision can be repeated. [`Ipam`] is the allocator: each of its verbs is one transaction on a store,
//! told as a story that reads documents, decides, and writes; [`assign`] is the largest of them.

mod addresses;
pub mod affinity;
pub mod assign;
pub mod attachment;
mod check;
mod error;
pub mod gc;
pub mod intents;
mod ipam;
pub mod model;
pub mod net;
mod owners;
pub mod pools;
mod release;
pub mod reservations;
mod resources;
pub mod selector;
mod settings;
mod surroundings;
pub mod timestamps;
mod usage;
pub mod utilization;
mod workset;

pub use check::{Comparison, Standing};
pub use error::{BridgeError, Error, Result};
pub use ipam::{Clock, Ipam, Nodes, Uids};
pub use release::ReleasedAddresses;
pub use usage::{Holding, Inventory};
