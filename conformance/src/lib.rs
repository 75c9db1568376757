//! Tests any key-value store with revisions against the rules of `crates/kv/SEMANTICS.md`.
//!
//! The author of a store implements [`Harness`] and [`Fixture`] and calls [`main`](crate::main()) from a test with
//! `harness = false`. `README.md` in this crate's folder shows a complete example. A program can run the test cases
//! with [`run()`].
//!
//! ```
//! let rules = conformance::rules();
//! assert!(rules.iter().any(|rule| rule.id == "T12"));
//! ```
//!
//! - The functions [`rules()`] and [`cases()`] list the rules and the test cases. Each test case names the rules that
//!   it judges, and each rule has a test case.
//! - Each test case gets a fresh store. When a test case fails, its [`Failure`] reports the expected result, the
//!   store's result, and the broken rule. A store cannot opt out of a rule: a harness only declares the abilities of
//!   its environment.
//! - The module [`broken`] contains stores that break one rule each. The broken stores prove that the suite detects
//!   faults.

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
