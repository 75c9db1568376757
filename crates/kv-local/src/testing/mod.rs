//! The duties of an [`Engine`], as a test program: how its [`Table`](kv_mvcc::Table) orders, commits and
//! shows rows, and what becomes of its store when files are missing, damaged, or not its own.
//!
//! ```no_run
//! # use std::path::Path;
//! # use kv_local::{Engine, Log};
//! # #[derive(Clone, Copy)] struct MyEngine;
//! # impl Engine for MyEngine {
//! #     fn name(&self) -> &'static str { "mine" }
//! #     fn entry(&self) -> &'static str { "db" }
//! #     fn files(&self) -> &'static [&'static str] { &["db"] }
//! #     fn log(&self) -> Log { Log::Own }
//! #     fn open(&self, _: &Path, _: &str) -> kv::Result<Box<dyn kv_mvcc::Table>> { unimplemented!() }
//! # }
//! // tests/engine.rs, with `harness = false` in Cargo.toml.
//! fn main() -> std::process::ExitCode {
//!     kv_local::testing::main(MyEngine)
//! }
//! ```
//!
//! A store on the engine is judged by the crate `conformance` besides.

#![allow(clippy::unwrap_used, reason = "a trial that cannot go on fails")]

mod opening;
mod steps;
mod table;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use crate::{Engine, Log};

/// A duty: it panics if the engine breaks it.
type Duty = fn(&dyn Engine);

/// Runs all trials, with the arguments of `cargo test`.
pub fn main(engine: impl Engine + Copy + 'static) -> ExitCode {
    let trial = |&(name, duty): &(&str, Duty)| {
        Trial::test(name, move || {
            duty(&engine);
            Ok(())
        })
    };
    let mut trials: Vec<Trial> = table::DUTIES.iter().chain(opening::DUTIES).map(trial).collect();
    trials.push(trial(&opening::OF_A_JOURNAL).with_ignored_flag(engine.log() != Log::Journal));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
