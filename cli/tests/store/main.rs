//! `margay store` on real sled and redb stores.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;

mod backup;
mod content;
mod disk;
mod kill;
mod restore;
mod status;
mod turns;
mod upkeep;
