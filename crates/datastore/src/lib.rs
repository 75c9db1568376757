#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Chooses a store from a NetConf, the environment or a URL, and opens the store.
//!
//! Opening a store takes two steps: choosing the store, which has no side effects, and opening the chosen store. To
//! choose the store, [`for_netconf`] (for the plugin) or [`for_operator`] (for the command `margay`) reads the
//! configuration and returns a [`Location`] for one of the program's [`Drivers`]. The caller passes a function that
//! looks up environment variables. This function is not called if a NetConf names an embedded store. The function
//! [`open`] opens the store at the chosen [`Location`]. The module [`maintenance`] inspects, shrinks, upgrades and
//! replaces whole stores.

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
    Access, Candidate, ClientCertificate, ClusterAddress, ClusterDescription, ClusterProblem, ClusterProblemKind,
    ClusterStore, ConfigError, Create, DEFAULT_ENGINE, DEFAULT_QUOTA_BYTES, Driver, DriverFacts, Drivers, Location,
    Login, MAX_QUOTA_PERCENT_IN_USE, MemberReport, MemberRole, OpenOptions, Pem, Scope, Sharing, StorePlace,
};
pub use kv::Purpose;
pub use kv_mvcc::Blocking;
pub use netconf::{NetConfStore, for_netconf};
pub use open::{OpenStore, open};
pub use operator::{ChoiceSource, ChosenStore, all_for_operator, for_operator};
pub use settings::{ConfigFile, DEFAULT_CONFIG_FILE, Environment, TextFault, process_environment, text_fault};
