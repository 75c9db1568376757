#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! Which store: from NetConf, environment or URL to an open store.
//!
//! Two halves. The first only decides and is pure: [`for_netconf`] (the plugin) and [`for_operator`] (the command
//! `margay`) turn configuration into a [`Location`]; the environment is a function that the caller passes in, and is
//! not even called where a NetConf names an embedded store. The second half, [`open`], opens a location; [`care`] looks
//! after a store as a whole.

mod access;
pub mod care;
mod config_file;
mod conflist;
mod engines;
mod environment;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod location;
mod netconf;
mod open;
mod operator;
mod runtimes;
pub mod served;
mod settings;
mod text;
mod yielding;

pub use access::{Access, Identity, Login, Pem};
#[cfg(feature = "etcd")]
pub use backend_etcd::{About, EtcdStore};
pub use config_file::{ConfigFile, DEFAULT_CONFIG_FILE};
pub use conflist::{CalicoNetwork, DEFAULT_CONF_DIR, Network, calico_networks, networks};
pub use environment::{Environment, process_environment};
pub use error::{Candidate, ConfigError, Result};
pub use location::{DEFAULT_REDB_PATH, DEFAULT_SLED_PATH, Etcd, Location};
pub use netconf::{NetConfStore, for_netconf};
pub use open::{
    Create, OpenStore, open, open_in_place, open_in_place_to_release, open_to_release, reach, reach_in_place,
    reach_in_place_to_release, reach_to_release,
};
pub use operator::{Chosen, Source, all_for_operator, for_operator};
pub use runtimes::runtime_subnets;
pub use text::{TextFault, text_fault};
pub use yielding::{LEAST_HOLD, YieldingStore};
