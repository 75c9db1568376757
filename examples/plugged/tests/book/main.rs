//! Runs the sessions of the book with a plugged store instead of sled and redb.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(dead_code, reason = "the modules are the command's own tests' as well, which use more of them")]

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
