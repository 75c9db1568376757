//! The plugin on a real etcd: the real program, and all that can go wrong between the two.
//!
//! Needs `etcd` and root (for `/run/margay` and a mount); without them the tests fail and say so.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "seeds and numbers, for whoever reads the output of a test")]
#![allow(dead_code, reason = "some modules are other test programs' as well, and each uses a part of them")]

#[path = "../system/books.rs"]
mod books;
mod borrowing;
#[path = "../../../../backend-etcd/tests/support/certificates.rs"]
mod certificates;
mod cluster;
#[path = "../../../../backend-etcd/tests/support/dns.rs"]
mod dns;
mod fallback;
mod faults;
mod filling;
#[path = "../system/kills.rs"]
mod kills;
mod lab;
mod late;
mod lock;
mod lost_replies;
mod namespaces;
mod notes;
mod one_key_only;
#[path = "../system/prefix_pools.rs"]
mod prefix_pools;
mod prefixes;
mod probe;
#[path = "../system/process.rs"]
mod process;
#[path = "../../../../conformance/src/proxy.rs"]
mod proxy;
mod quotas;
#[path = "../system/random.rs"]
mod random;
mod renamed;
#[path = "../../../../backend-etcd/tests/support/room.rs"]
mod room;
mod round_trips;
mod samples;
mod secondary;
mod secrets;
#[path = "../../../../backend-etcd/tests/support/server.rs"]
mod server;
mod status;
mod sticky;
#[path = "../system/sticky_kills.rs"]
mod sticky_kills;
#[path = "../support/tested.rs"]
mod tested;
#[path = "../system/under_quota.rs"]
mod under_quota;
#[path = "../system/victim.rs"]
mod victim;
mod ways_in;
mod whereabouts;
#[path = "../support/wire.rs"]
mod wire;

use server::Etcd;
