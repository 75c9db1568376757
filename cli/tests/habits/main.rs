//! What operators know from calicoctl, on real stores.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;

mod deletion;
mod documents;
mod etcd;
mod files;
mod kills;
mod rules;
mod settings;
mod split;
