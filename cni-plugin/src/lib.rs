//! The CNI protocol and the plugin margay-ipam.
//!
//! [`run`] is the whole program minus process input and output: it reads the environment and the configuration that it
//! gets, checks them as Go's CNI library and Calico's `calico-ipam` do, has an [`Allocator`] do the work in the store,
//! and prints the result in the configuration's version of CNI.
//!
//! `netconf` reads the configuration, `run` turns it into the requests of `request`, and `allocator` and `served` carry them
//! out. `wired` is the main plugin. `logging` and `log_file` write the log.

mod about;
mod allocator;
mod args;
mod bridged;
mod check;
mod dataplane_grpc;
mod env;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod gc;
mod gojson;
mod govalues;
mod hints;
mod host_lock;
mod identity;
mod intents;
mod invocation;
mod kubernetes;
mod kubevirt;
mod log_file;
mod logging;
mod netconf;
mod netns;
mod panics;
mod policy_wait;
mod prev_result;
mod probing;
mod process;
mod request;
mod result;
mod run;
pub mod served;
mod session;
mod sight;
mod status;
mod sticky;
pub mod verbs;
mod versions;
mod wanted;
mod weights;
mod whereabouts;
mod whole_file;
pub mod wired;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

pub use about::answer_option;
pub use allocator::StoreAllocator;
pub use env::Environment;
pub use error::{CniError, Code, Result};
pub use identity::Host;
pub use intents::{FileIntents, INTENTS_FOLDER};
pub use invocation::{Invocation, Kind, Logging, Name};
pub use kubernetes::Kubernetes;
pub use panics::install_hook;
pub use process::main;
pub use request::{
    AddRequest, Allocator, Assigned, Attachment, Bridged, CheckRequest, Checked, Collected, DelRequest, Gateway,
    GcRequest, Network, OwnPool, Quarantine, StoreAt, VmPod,
};
pub use run::{Outcome, run};
pub use versions::SUPPORTED;
