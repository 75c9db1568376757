#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Which store: from NetConf, environment or URL to an open store.
//!
//! Two halves. The first only decides and is pure: [`for_netconf`] (the plugin) and [`for_operator`] (the command
//! `margay`) turn configuration into a [`Location`] of one of the program's [`Drivers`]; the environment is a function that the caller passes in, and is
//! not even called where a NetConf names an embedded store. The second half, [`open`], opens a location; [`care`] looks
//! after a store as a whole.

mod conflist;
pub mod maintenance;
mod netconf;
mod open;
mod operator;
pub mod served;
mod settings;
pub mod shared_store;

pub use conflist::{CalicoNetwork, ConfiguredNetwork, DEFAULT_CONF_DIR, calico_networks, networks, runtime_subnets};
pub use driver::{
    Access, Candidate, ClientCertificate, ClusterAddress, ClusterDescription, ClusterStore, ConfigError, Create,
    DEFAULT_ENGINE, Driver, DriverFacts, Drivers, Location, Login, OpenOptions, Pem, Scope, Sharing, StorePlace,
};
pub use kv::Purpose;
pub use kv_mvcc::Blocking;
pub use netconf::{NetConfStore, for_netconf};
pub use open::{OpenStore, open};
pub use operator::{ChoiceSource, ChosenStore, all_for_operator, for_operator};
pub use settings::{ConfigFile, DEFAULT_CONFIG_FILE, Environment, TextFault, process_environment, text_fault};
