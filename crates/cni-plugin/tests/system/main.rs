//! The plugin as a runtime meets it: the real program on stores on disk, many processes at once, damage, full disks,
//! and everything that it has to refuse.
//!
//! The program is the one that cargo built for the tests; `MARGAY_RELEASE_PLUGIN` names another one, such as the one
//! that is installed. A test that lacks something that it needs (root, a mount, host-local) fails and says so.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]

mod attachments;
mod books;
mod check;
mod clocks;
mod copy;
mod crash;
mod crashes;
mod damage;
mod disk;
mod fallback;
mod filling;
mod gc;
mod hostlocal;
mod kills;
mod lab;
mod life;
mod prefix_pools;
mod prefixes;
mod probe;
mod process;
mod quotas;
mod random;
mod refusals;
mod samples;
mod status;
mod stdout;
mod sticky;
mod sticky_kills;
#[path = "../support/tested.rs"]
#[allow(dead_code, reason = "shared with the other test programs")]
mod tested;
mod torture;
mod under_quota;
mod victim;
mod whereabouts;
#[path = "../support/wire.rs"]
mod wire;
