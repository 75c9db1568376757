//! Runs the shell sessions of the book on a plugged example store instead of sled and redb.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "shared with the tests of the command, which use more of it")]

#[path = "../../../../crates/cli/tests/command/book/mod.rs"]
mod book;
#[path = "../../../../crates/cli/tests/command/common/mod.rs"]
mod common;
#[path = "../support/tested.rs"]
mod tested;

#[path = "../../../../crates/cli/tests/command/install"]
mod install {
    pub(crate) mod tree;
}

use testkit::server as support;
