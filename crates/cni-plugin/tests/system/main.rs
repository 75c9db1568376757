//! Tests of the plugin as a runtime calls it: the real program on stores on disk, with many concurrent processes,
//! damage, full disks, and all calls that the program must refuse.
//!
//! The tests run the program that cargo has built; `MARGAY_RELEASE_PLUGIN` names another program, for example the
//! installed program. A test that lacks a requirement (root, a mount, host-local) fails and names the requirement.
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
