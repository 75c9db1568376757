//! Stores around a store. Tests, metrics and benchmarks are built on these rather than on hooks inside the code.

mod counting;
mod faults;
mod rehearsal;
mod traced;

pub use counting::{Counting, Counts};
pub use faults::{Fault, Faults, Faulty};
pub use rehearsal::Rehearsal;
pub use traced::Traced;

/// The targets of what this crate logs.
pub mod tracing_targets {
    /// Calls of a store.
    pub const STORE: &str = "margay::store";
    /// Transactions.
    pub const TRANSACT: &str = "margay::transact";
}
