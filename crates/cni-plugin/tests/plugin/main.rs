//! Tests of the whole plugin, as a function with an allocator of prepared answers, and as a process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod garbage;
mod kubevirt;
mod process;
mod replay;
mod transcript;
mod verbs;
