//! Tests of the real plugin binary on a real etcd, including failures of the connection between the plugin and etcd.
//!
//! The tests need the `etcd` program and root (for `/run/margay` and a mount), and fail with the name of what is
//! missing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "prints seeds and measurements of tests")]

mod borrowing;
mod cluster;
mod fallback;
mod faults;
mod filling;
mod late;
mod lock;
mod lost_replies;
mod namespaces;
mod nospace;
mod notes;
mod one_key_only;
mod prefixes;
mod probe;
mod quotas;
mod renamed;
mod round_trips;
mod samples;
mod secondary;
mod secrets;
mod status;
mod sticky;
mod ways_in;
mod whereabouts;

use conformance::proxy;
use testkit::{
    certificates, dns, kills, lab, prefix_pools, process, random, room, server, sticky_kills, under_quota, victim, wire,
};
