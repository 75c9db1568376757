//! Simulates many nodes on a real store, with faults and kills, and checks every revision.
//!
//! Workers on several nodes add and delete containers in pools that are too small for all of the containers. Nodes
//! borrow addresses from each other, take over each other's empty blocks, and claim and release affinities. Calls fail
//! as on real networks and servers, and callers die after sending a commit and before the commit's answer. A checker
//! follows the store and checks the following rules at every revision:
//!
//! - No address is held twice, and no acknowledged address is released before its DEL has begun.
//! - Handle counts match the blocks, and affinities match the owners of blocks.
//! - The lists in a block agree with each other, and the block's sequence number rises by one with each write.
//! - After its DEL, a container holds no address and gets no address.
//! - After the DEL of all containers, the store contains no documents.
//!
//! The checker decodes the documents itself: the module `checker` shares no code with `ipam_core::model`. A run has one
//! of two modes. [In one process](Mode::InProcess), a death is a dropped future and faults are injected. In [several
//! processes](Mode::Processes), workers are processes of this program that are killed with SIGKILL. An etcd server is
//! also killed, frozen and restarted.
//!
//! The seed determines the operations of each worker, but not their timing, so two runs with one seed can differ.

mod chaos;
mod checker;
mod command;
mod faults;
mod in_process;
mod ledger;
mod press;
mod processes;
mod scene;
mod soak;
mod worker;

pub use command::{Mode, Plan, Reach, Report, main};
pub use faults::Sabotage;
pub use press::{PressPlan, PressReport, press};
pub use processes::{ChildPlan, be_a_worker};
pub use soak::{SoakPlan, SoakReport, soak};

/// A violation that the torture found, or the reason why the torture stopped.
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

/// Runs a plan. Must be called on a multi-threaded tokio runtime. With [`Mode::Processes`], `program` is the path of
/// the `torture` program.
///
/// # Errors
/// The violation, with the revision, the keys and the history of the addresses; or the reason why the run stopped.
pub async fn run(plan: &Plan, program: &std::path::Path) -> Result<Report, Failure> {
    if plan.way != Reach::Files && (plan.mode == Mode::InProcess || plan.scope() != datastore::Scope::Machine) {
        return Err(Failure("a daemon runs beside processes on a store in a folder".into()));
    }
    match plan.mode {
        Mode::InProcess => in_process::run(plan).await,
        Mode::Processes => processes::run(plan, program).await,
    }
}
