//! Many nodes at once on a real store, with faults and kills, checked at every revision.
//!
//! Workers on several nodes add and delete containers in pools that are too small for all of them, so that they borrow
//! from each other and take over each other's empty blocks; meanwhile they claim and release affinities. Calls fail as
//! networks and servers make them fail, and callers die between sending and knowing. A checker follows the store and looks
//! at every revision:
//!
//! - no address is held twice, and none that was acknowledged goes before its DEL has begun;
//! - what blocks hold is what handles count, and what blocks say of their owners is what affinities say;
//! - a block's own lists agree, and its sequence number rises by one with each write;
//! - after its DEL a container has nothing and gets nothing any more;
//! - after the DEL of everything nothing is left.
//!
//! The checker reads the documents by itself: the module `checker` shares no code with `ipam_core::model`. Two ways of
//! running: [in one process](Mode::InProcess), where a death is a dropped future and faults are injected; and
//! [in several](Mode::Processes), where workers are processes of this program that SIGKILL ends. On etcd the server is
//! killed, stopped and started again, too.
//!
//! The acts of each worker follow from the seed. Its encounters do not: they depend on the quicker one.

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

/// A fault that the torture found, or the reason why it could not go on.
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

/// Carries out a plan. Must be called on a tokio runtime with several threads. For processes, `program` is this program.
///
/// # Errors
/// The fault, with the revision, the keys and the history of the addresses.
pub async fn run(plan: &Plan, program: &std::path::Path) -> Result<Report, Failure> {
    if plan.way != Reach::Files && (plan.mode == Mode::InProcess || plan.scope() != datastore::Scope::Machine) {
        return Err(Failure("a daemon runs beside processes on a store in a folder".into()));
    }
    match plan.mode {
        Mode::InProcess => in_process::run(plan).await,
        Mode::Processes => processes::run(plan, program).await,
    }
}
