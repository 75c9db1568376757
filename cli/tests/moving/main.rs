//! `margay export`, `import` and `migrate` on real sled, redb and etcd stores.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests of backups use the rest")]
#[path = "../store/content.rs"]
mod content;
#[path = "../../../backend-etcd/tests/support/server.rs"]
mod support;

mod files;
mod fill;
mod kill;
mod migrate;
mod take_over;
mod turns;
