//! Tests of the plugin as a runtime calls it: the real program on stores on disk. The tests cover many concurrent
//! processes, damaged files, full disks, and all calls that the plugin must reject.
//!
//! The tests run the plugin binary that cargo has built, or the binary that `MARGAY_RELEASE_PLUGIN` names. If a
//! requirement of a test is missing (root, a mount, host-local), the test fails and names the requirement.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "prints seeds and measurements of tests")]

mod attachments;
mod check;
mod clocks;
mod crashes;
mod damage;
mod disk;
mod fallback;
mod filling;
mod gc;
mod hostlocal;
mod prefixes;
mod probe;
mod quotas;
mod refusals;
mod samples;
mod status;
mod stdout;
mod sticky;
mod torture;
mod whereabouts;

use testkit::{
    copy, crash, kills, lab, mounts, prefix_pools, process, random, sticky_kills, under_quota, victim, wire,
};
