//! Tests the whole plugin, both as a function call with an allocator that returns prepared answers, and as a process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod garbage;
mod kubevirt;
mod process;
mod replay;
mod transcript;
mod verbs;
