//! The IPAM data model and the allocator; speaks kv and nothing else.
//!
//! [`model`] holds the documents exactly as Calico stores them. The other modules decide on those documents without
//! any I/O: time, host names and random numbers come in as arguments, so that every decision can be repeated.

pub mod model;
pub mod net;
pub mod pools;
pub mod reservations;
pub mod selector;
pub mod timestamps;
pub mod utilization;
