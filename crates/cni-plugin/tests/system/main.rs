//! The plugin as a runtime meets it: the real program on stores on disk, many processes at once, damage, full disks,
//! and everything that it has to refuse.
//!
//! The program is the one that cargo built for the tests; `MARGAY_RELEASE_PLUGIN` names another one, such as the one
//! that is installed. A test that lacks something that it needs (root, a mount, host-local) fails and says so.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]

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
