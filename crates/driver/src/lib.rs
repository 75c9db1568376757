#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! [`Driver`] is the trait. [`LocalDriver`] implements it for every [`kv_local::Engine`], and [`MEMORY`] for a store in
//! memory. [`Drivers`] is the list that a program is built with. A [`Location`] is the place of a store and its driver
//! from such a list.

mod contract;
mod drivers;
mod error;
mod place;

pub use contract::{
    ClusterDescription, ClusterStore, Driver, DriverFacts, LocalDriver, MEMORY, MemoryDriver, Opened, Scope,
};
pub use drivers::{DEFAULT_ENGINE, Drivers, Location};
pub use error::{Candidate, ConfigError, ConfigResult};
pub use kv_local::{Create, OpenOptions, Sharing};
pub use place::{Access, ClientCertificate, ClusterAddress, EtcdFiles, Login, Orchestrator, Pem, Settings, StorePlace};
