//! The CNI protocol and the plugin margay-ipam.
//!
//! [`run`] is the whole program minus process input and output: it reads the environment and the configuration that it
//! gets, checks them as Go's CNI library and Calico's `calico-ipam` do, has an [`Allocator`](agent::Allocator) do the work in the
//! store, and prints the result in the configuration's version of CNI.
//!
//! `netconf` reads the configuration, `run` turns it into a verb of the crate `agent`, which does it. `wired` is the main plugin.
//! `logging` and `log_file` write the log.

mod about;
mod args;
mod assigner;
mod bridged;
mod check;
mod dataplane_grpc;
mod env;
#[doc(hidden)]
pub mod fuzzing;
mod gc;
mod gojson;
mod govalues;
mod identity;
mod invocation;
mod kubernetes;
mod kubevirt;
mod log_file;
mod logging;
mod netconf;
mod netns;
mod network;
mod outcome;
mod panics;
mod policy_wait;
mod prev_result;
mod probing;
mod process;
mod ranges;
mod result;
mod routes;
mod run;
mod status;
mod sticky;
mod versions;
mod wanted;
mod weights;
mod whereabouts;
pub mod wired;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

pub use about::answer_option;
pub use env::Environment;
pub use identity::Host;
pub use invocation::{Invocation, Kind, Logging, Name};
pub use kubernetes::Kubernetes;
pub use outcome::Outcome;
pub use panics::install_hook;
pub use process::main;
pub use run::run;
pub use versions::SUPPORTED;
