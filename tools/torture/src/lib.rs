//! Simulates many nodes that share a real store, with faults and killed processes, and checks every revision of the
//! store.
//!
//! Workers on several nodes add and delete containers. The pools are too small for all containers, so nodes borrow
//! addresses from each other, take over each other's empty blocks, and claim and release affinities. Store calls fail
//! in the ways that real networks and servers make them fail. Some callers die between sending a commit and receiving
//! its response. A checker follows the store and checks these rules at each revision:
//!
//! - No two containers hold the same address, and no acknowledged address is released before the DEL of its container
//!   has begun.
//! - The counts in handle documents match the blocks, and the affinity documents match the owners in the blocks.
//! - In a block document, the lists of assigned and free addresses agree, and each write of a block increases its
//!   sequence number by one.
//! - After its DEL, a container holds no address and never gets one again.
//! - After all containers have been deleted, the store contains no documents.
//!
//! The module `checker` shares no code with `ipam_core::model`: it decodes the documents itself, so a decoding bug
//! cannot hide. In the mode [`InProcess`](Mode::InProcess), the workers are tasks, a caller dies when its future is
//! dropped, and the store injects faults. In the mode [`Processes`](Mode::Processes), each worker is a process of this
//! program and is killed with SIGKILL; an etcd server is killed, frozen and restarted as well. With
//! [`Servers::Three`], an etcd cluster has three members in network namespaces, with the faults of clusters.
//!
//! The seed determines the operations of each worker but not their timing, so two runs with the same seed can differ.

mod chaos;
mod checker;
mod command;
mod faults;
mod in_process;
mod ledger;
mod members;
mod press;
mod processes;
mod scene;
mod soak;
mod worker;

pub use command::{Mode, Plan, Reach, Report, Servers, main};
pub use faults::Sabotage;
pub use members::{CLUSTER_FAULTS, Outage};
pub use press::{PressPlan, PressReport, press};
pub use processes::{ChildPlan, be_a_worker};
pub use soak::{SoakPlan, SoakReport, soak};

/// A violation that a torture run found, or the reason why the run could not continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub String);

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<ipam_core::Error> for Failure {
    fn from(error: ipam_core::Error) -> Self {
        Self(error.to_string())
    }
}

/// Runs a plan. Must be called from within a multi-threaded tokio runtime. With [`Mode::Processes`], `program` is the
/// path of the program `torture`.
///
/// # Errors
/// A violation, with its revision, the changed keys and the history of the addresses; or the reason why the run could
/// not continue.
pub async fn run(plan: &Plan, program: &std::path::Path) -> Result<Report, Failure> {
    if plan.way != Reach::Files && (plan.mode == Mode::InProcess || plan.scope() != datastore::Scope::Machine) {
        return Err(Failure("a daemon runs beside processes on a store in a folder".into()));
    }
    if plan.servers == Servers::Three && (plan.mode != Mode::InProcess || plan.scope() != datastore::Scope::Cluster) {
        return Err(Failure("three servers take --store etcd and --mode in-process".into()));
    }
    match plan.mode {
        Mode::InProcess => in_process::run(plan).await,
        Mode::Processes => processes::run(plan, program).await,
    }
}
