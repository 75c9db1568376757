#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! [`Driver`] is the trait, [`LocalDriver`] implements it for every [`kv_local::Engine`], and [`MEMORY`] for a store in
//! memory. [`Drivers`] is the list that a program is made with. A [`Location`] is a place in the care of a driver of such a list.

mod contract;
mod drivers;
mod error;
mod place;

pub use contract::{About, ClusterStore, Driver, Facts, LocalDriver, MEMORY, Memory, Opened, Scope};
pub use drivers::{DEFAULT_ENGINE, Drivers, Location};
pub use error::{Candidate, ConfigError, Result};
pub use kv_local::{Create, OpenOptions, Sharing};
pub use place::{Access, ClusterAddress, EtcdFiles, Identity, Login, Orchestrator, Pem, Place, Settings};
