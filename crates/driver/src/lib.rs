#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! [`Driver`] is the trait, [`LocalDriver`] implements it for every [`kv_local::Engine`], and [`MEMORY`] for a store in
//! memory. [`Drivers`] is the list that a program is made with. A [`Location`] is a place in the care of a driver of such a list.

mod access;
mod advice;
mod cluster;
mod contract;
mod drivers;
mod error;
mod local;
mod location;
mod memory;
mod path;
mod place;
mod settings;

pub use access::{Access, Identity, Login, Pem};
pub use cluster::ClusterAddress;
pub use contract::{About, ClusterStore, Driver, Facts, Opened, Scope};
pub use drivers::{DEFAULT_ENGINE, Drivers};
pub use error::{Candidate, ConfigError, Result};
pub use kv_local::{Create, OpenOptions, Sharing};
pub use local::LocalDriver;
pub use location::Location;
pub use memory::{MEMORY, Memory};
pub use place::Place;
pub use settings::{EtcdFiles, Orchestrator, Settings};
