//! Tests the `margay` command on real stores. All tests are in one program, because each test program links all stores.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod book;
mod check;
mod cluster_setup;
mod common;
mod conditions;
mod conformance;
mod cursors;
mod etcd;
mod etcd_size;
mod explain;
mod forecast;
mod gc;
mod gone;
mod habits;
mod history;
mod history_etcd;
mod hooks;
mod install;
mod manual;
mod map;
mod moving;
mod quotas;
mod reach;
mod store;
mod tested;
mod usage;
mod verbs;

use testkit::copy;
use testkit::server as support;
