#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! The trait [`Driver`] describes how programs use a kind of store. [`LocalDriver`] implements [`Driver`] for the
//! stores of every [`kv_local::Engine`], and [`MEMORY`] is the driver for stores in memory. [`Drivers`] is the list of
//! drivers with which a program is built. A [`Location`] consists of the place of a store and the driver that opens the
//! store.

mod contract;
mod drivers;
mod error;
mod place;

pub use contract::{
    ClusterDescription, ClusterProblem, ClusterProblemKind, ClusterStore, DEFAULT_QUOTA_BYTES, Driver, DriverFacts,
    LocalDriver, MAX_QUOTA_PERCENT_IN_USE, MEMORY, MemberReport, MemberRole, MemoryDriver, Opened, Scope,
};
pub use drivers::{DEFAULT_ENGINE, Drivers, Location};
pub use error::{Candidate, ConfigError, ConfigResult};
pub use kv_local::{Create, OpenOptions, Sharing};
pub use place::{Access, ClientCertificate, ClusterAddress, EtcdFiles, Login, Orchestrator, Pem, Settings, StorePlace};
