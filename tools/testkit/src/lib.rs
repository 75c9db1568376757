//! Contains helpers for the tests of several crates. Each group of helpers has a cargo feature, so that a crate's tests
//! compile only the kinds of stores that they use.
//!
//! | feature | contents |
//! |---|---|
//! | `api` | a store for the server of etcd's API ([`backing`]) |
//! | `etcd` | real etcd servers ([`server`]), [`certificates`], network namespaces ([`namespace`]), a [`dns`] server, [`room`] in a full etcd |
//! | `engine` | the conformance suite on an engine of kv-local ([`judged`]), and power cuts below the engine ([`cuts`]) |
//! | `programs` | the [`programs`] under test, calls of the plugin ([`process`]), a store for them ([`lab`]) and its contents ([`books`]), and whole scenarios: [`kills`], [`crash`], [`power_cuts`] |
//! | `world` | the allocator on a store in memory ([`world`]) |
//!
//! The modules [`random`] (random numbers), [`copy`] (copies of programs) and [`machine`] (namespaces that act as a
//! machine) need no cargo feature. Helpers report
//! failures by panicking.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "prints seeds and measurements of tests")]
#![allow(missing_docs, reason = "not published; most names need no comment")]

pub mod copy;
pub mod machine;
pub mod random;

#[cfg(feature = "api")]
pub mod backing;

#[cfg(feature = "etcd")]
pub mod certificates;
#[cfg(feature = "etcd")]
pub mod dns;
#[cfg(feature = "etcd")]
pub mod namespace;
#[cfg(feature = "etcd")]
pub mod room;
#[cfg(feature = "etcd")]
pub mod server;

#[cfg(feature = "engine")]
pub mod cuts;
#[cfg(feature = "engine")]
pub mod judged;

#[cfg(feature = "programs")]
pub mod books;
#[cfg(feature = "programs")]
pub mod crash;
#[cfg(feature = "programs")]
pub mod kills;
#[cfg(feature = "programs")]
pub mod lab;
#[cfg(feature = "programs")]
pub mod mounts;
#[cfg(feature = "programs")]
pub mod power_cuts;
#[cfg(feature = "programs")]
pub mod prefix_pools;
#[cfg(feature = "programs")]
pub mod process;
#[cfg(feature = "programs")]
pub mod programs;
#[cfg(feature = "programs")]
pub mod sticky_kills;
#[cfg(feature = "programs")]
pub mod under_quota;
#[cfg(feature = "programs")]
pub mod victim;
#[cfg(feature = "programs")]
pub mod wire;

#[cfg(feature = "world")]
pub mod world;
