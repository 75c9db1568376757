//! The rules of `crates/kv/SEMANTICS.md` as cases: judge any KV-with-revisions store.
//!
//! The author of a store implements [`Harness`] and [`Fixture`] for it and calls [`main`](crate::main()) from a test
//! with `harness = false`; `README.md` beside this crate shows the whole of it. [`run()`] runs the same cases from a
//! program.
//!
//! ```
//! let rules = conformance::rules();
//! assert!(rules.iter().any(|rule| rule.id == "T12"));
//! ```
//!
//! - [`rules()`] are the rules, [`cases()`] the one table of cases; each case names the rules that it judges, and each
//!   rule has a case.
//! - A case gets a fresh store and returns a [`Failure`] that says what was expected, what came and which rule that
//!   breaks. No rule can be opted out of: a harness only says what its environment can do.
//! - [`broken`] has stores that break one rule each; they prove that the suite fails when it must.

pub mod broken;
mod case;
mod expect;
mod groups;
mod harness;
pub mod history;
mod ignored;
mod in_place;
mod ledger;
mod mimic;
mod model;
mod patience;
mod prefix_harness;
mod prefixed;
mod process;
#[doc(hidden)]
pub mod proxy;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod remote;
mod roles;
mod rules;
mod runner;
mod seed;
mod stage;
mod state;
mod steps;
mod subject;
mod table;
mod watcher;

pub use case::{Case, Group};
pub use expect::Failure;
pub use harness::{Ability, BoxError, Fixture, Harness, RefusedUser, Scene, Server, Tenancy};
pub use ignored::{WITHOUT_FILES, WITHOUT_SERVERS};
pub use in_place::{ForeignKeys, InPlaceHarness};
pub use mimic::{FailureFrequency, KnownFailure, main, main_knowing};
pub use patience::patient;
pub use prefix_harness::PrefixHarness;
pub use prefixed::PrefixedStore;
pub use roles::play_role;
pub use rules::{Rule, rules};
pub use runner::{Report, Run, RunOptions, Verdict, run};
pub use seed::seed;
pub use table::cases;
