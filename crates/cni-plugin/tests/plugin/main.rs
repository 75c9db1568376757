//! Tests of the whole plugin, called as a function with an allocator of prepared answers, and as a process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod garbage;
mod kubevirt;
mod process;
mod replay;
mod transcript;
mod verbs;
