//! Implements the CNI protocol, the IPAM plugin `margay-ipam` and the main plugin `margay-cni`.
//!
//! [`run`] does everything that the IPAM plugin does, but gets its input as an argument and returns its output instead
//! of printing it. First, [`run`] reads and checks the environment and the configuration, as Go's CNI library and
//! Calico's `calico-ipam` do. After checking its input, [`run`] changes the store through an
//! [`Allocator`](agent::Allocator) and formats the result in the configured CNI version.
//!
//! The module `netconf` reads the network configuration. The module `run` converts the configuration to a CNI verb,
//! which the crate `agent` carries out. The module `main_plugin` implements the main plugin, and the module `logging`
//! writes the log.

mod bridged;
mod dataplane_grpc;
mod env;
#[doc(hidden)]
pub mod fuzzing;
mod gojson;
mod identity;
mod invocation;
mod kubernetes;
mod kubevirt;
mod logging;
pub mod main_plugin;
mod netconf;
mod policy_wait;
mod probing;
mod process;
mod ranges;
mod result;
mod run;
mod sticky;
mod verbs;
mod versions;

pub use env::Environment;
pub use identity::Host;
pub use invocation::{Invocation, LogDestination, PluginName, ProcessOutcome, ProgramKind, install_hook};
pub use kubernetes::Kubernetes;
pub use process::{answer_option, main};
pub use run::run;
pub use versions::SUPPORTED_VERSIONS;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
