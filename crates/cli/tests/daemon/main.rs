//! Tests `margay serve`, `margay-ipam` and `margay` together, as real programs. Each of the programs must work even
//! when the other programs fail. The tests need root.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod activation;
mod alike;
mod api;
mod bad_input;
mod cluster;
mod commands;
mod crowd;
mod daemon;
mod disk;
mod ends;
mod fake;
mod fallback;
mod frozen;
mod gone;
mod hand_over;
mod lab;
mod late;
mod lost;
mod never_needed;
mod prefixes;
mod probe;
mod programs;
mod quotas;
mod role;
mod sticky;
mod trust;
mod versions;

use testkit::{certificates, server, wire};
