//! The daemon `margay serve`: one process that keeps a store open for plugins, commands and people.
//!
//! - [`write_queue`]: the verbs that write, one commit at a time; on an embedded store one commit for all ADDs that wait.
//! - [`daemon`] and `connection`: the private socket of plugins and commands, and the store behind it.
//! - [`socket`]: the right to serve a store, and the socket's place.
//! - [`accept`]: the acceptance of clients, wherever the daemon listens.
//! - [`http`]: numbers for Prometheus and the page, from [`metrics`] and the store. The pulse in [`metrics`] tells clients that wait when the store last finished something.
//! - [`api`]: etcd's API in front of an embedded store, for other programs.
//! - [`life`]: start, readiness, watchdog, end.

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
