//! The daemon `margay serve`: one process that keeps a store open for plugins, commands and people.
//!
//! - [`write_queue`]: queues the CNI verbs that need a write, and commits one transaction at a time. On an embedded
//!   store, all waiting ADDs share one commit.
//! - [`daemon`] and `connection`: serve the store to plugins and commands through the private socket.
//! - [`socket`]: the exclusive right to serve a store, and the path of the private socket.
//! - [`accept`]: accepts clients at every listener.
//! - [`http`]: serves Prometheus metrics and a web page, with data from [`metrics`] and the store. The pulse in
//!   [`metrics`] tells waiting clients when the store last finished an operation.
//! - [`api`]: offers etcd's API in front of an embedded store to other programs.
//! - [`life`]: starts and stops the daemon, and reports readiness and liveness to systemd.

pub mod accept;
pub mod api;
mod connection;
pub mod daemon;
pub mod http;
pub mod life;
pub mod metrics;
#[cfg(test)]
mod shared_store_tests;
pub mod socket;
pub mod write_queue;
