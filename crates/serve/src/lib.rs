//! The daemon `margay serve`: one process that keeps a store open for plugins, commands and people.
//!
//! - [`write_queue`]: verbs that write, one commit at a time. On an embedded store all waiting ADDs share one commit.
//! - [`daemon`] and `connection`: the private socket for plugins and commands, and the store behind it.
//! - [`socket`]: the right to serve a store, and the path of the socket.
//! - [`accept`]: accepts clients at every listener.
//! - [`http`]: Prometheus metrics and the page, from [`metrics`] and the store. The pulse in [`metrics`] reports to
//!   waiting clients when the store last finished an operation.
//! - [`api`]: etcd's API in front of an embedded store, for other programs.
//! - [`life`]: start, readiness, watchdog and end.

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
